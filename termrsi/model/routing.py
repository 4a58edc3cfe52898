"""Rollout routing replay (R3, arXiv 2510.11370): the learner computes with the experts that the sampler chose.

The selection is the record's, the gate weights are the live router's, so that gradients still reach the router. Records come with
the samples (`records.Routing`); a token or a layer without one is an error, never the learner's own choice.
Letters: B rows, T tokens, N tokens of one forward pass in row-major order, L mixture-of-experts layers, E experts kept per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from termrsi.algo.batch import MicroBatch
from termrsi.errors import ConfigError
from termrsi.records import Routing, Sample


class _Places(NamedTuple):
    """Where a router's output holds what."""

    logits: int = 0
    weights: int = 1
    experts: int = 2


# By the names of transformers' own modules. All of these score by a softmax; others (DeepSeek's sigmoid with a bias and groups) are
# refused rather than guessed at.
ROUTERS = {
    "Qwen2MoeTopKRouter": _Places(),
    "Qwen3MoeTopKRouter": _Places(),
    "Qwen3NextTopKRouter": _Places(),
    "Qwen3_5MoeTopKRouter": _Places(),
    "OlmoeTopKRouter": _Places(),
    "MixtralTopKRouter": _Places(),
    "GptOssTopKRouter": _Places(),
    "GraniteMoeTopKRouter": _Places(logits=2, weights=1, experts=0),
}


@dataclass(slots=True)
class _Record:
    """Experts `[N, L, E]`, and the layers that have not taken theirs yet: in the forward pass, and when computed again."""

    experts: Tensor
    first: set[int]
    again: set[int]


class RoutingReplay:
    """Forward hooks on the routers of a transformers model: without a record they change nothing.

    Each layer takes its part of a record exactly once in the forward pass, and at most once more when gradient checkpointing
    computes the layer again (`recomputation` is torch's `context_fn`). Raises ConfigError if the model has no router it knows.
    """

    def __init__(self, module: nn.Module) -> None:
        routers: list[Any] = [part for part in module.modules() if type(part).__name__ in ROUTERS]  # Any: no common base
        if not routers:
            known = ", ".join(name.removesuffix("TopKRouter") for name in ROUTERS)
            raise ConfigError(
                f"{type(module).__name__} has no router that can be replayed", "model.routing_replay", f"one of {known}"
            )
        self.layers, self.top_k, self.num_experts = len(routers), int(routers[0].top_k), int(routers[0].num_experts)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._replace, layer))
        self.active: tuple[_Record, set[int]] | None = None  # and the layers that may take it

    @contextmanager
    def using(self, experts: Tensor) -> Iterator[None]:
        """The one forward pass inside takes its selection from `experts` `[N, L, E]` (integers).

        Raises ValueError if a token or layer has no record, RuntimeError if a layer takes its record twice or not at all.
        """
        self._check(experts)
        record = _Record(experts.long(), set(range(self.layers)), set(range(self.layers)))
        self.active = (record, record.first)
        try:
            yield
        finally:
            self.active = None
        if record.first:
            raise RuntimeError(f"the forward pass left the routing of layers {sorted(record.first)} unused")

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a checkpointed layer: its forward pass as it stands, its recomputation under the same record."""
        return nullcontext(), _Again(self, None if self.active is None else self.active[0])

    def _replace(
        self, layer: int, router: Any, _: object, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:  # Any: as above
        if self.active is None:
            return None
        record, waiting = self.active
        if layer not in waiting:
            raise RuntimeError(f"layer {layer} takes its routing a second time")
        waiting.remove(layer)
        places = ROUTERS[type(router).__name__]
        logits, weights = output[places.logits], output[places.weights]
        if len(logits) != len(record.experts):
            raise ValueError(f"routing of {len(record.experts)} tokens for a forward pass of {len(logits)}")
        experts = record.experts[:, layer].to(logits.device)
        replaced = list(output)
        replaced[places.weights] = gates(logits, experts, normalised=getattr(router, "norm_topk_prob", True)).to(weights.dtype)
        replaced[places.experts] = experts
        return tuple(replaced)

    def _check(self, experts: Tensor) -> None:
        if experts.dim() != 3 or tuple(experts.shape[1:]) != (self.layers, self.top_k):
            found, needed = tuple(experts.shape), f"(tokens, {self.layers}, {self.top_k})"
            raise ValueError(f"routing of shape {found}, {needed} is needed")
        gap = first_missing(experts.cpu().numpy(), self.num_experts)
        if gap is not None:
            raise ValueError(f"no record of the routing of token {gap[0]} in layer {gap[1]}: {experts[gap].tolist()}")


class _Again(AbstractContextManager[None]):
    """The recomputation of a layer, under the record of its forward pass, or under none."""

    def __init__(self, replay: RoutingReplay, record: _Record | None) -> None:
        self._replay, self._record = replay, record

    def __enter__(self) -> None:
        self._before = self._replay.active
        self._replay.active = None if self._record is None else (self._record, self._record.again)

    def __exit__(self, *_: object) -> None:
        self._replay.active = self._before


def gates(logits: Tensor, experts: Tensor, *, normalised: bool) -> Tensor:
    """Weights `[N, E]` in float32 of the recorded `experts` `[N, E]`, from the live `logits` `[N, experts]`.

    g_e = I_e exp(z_e) / sum_j I_j exp(z_j), I the recorded selection (R3). A family that does not normalise over its selection
    (`norm_topk_prob` false) keeps its own weights there: exp(z_e) over the sum of all experts.
    """
    if normalised:
        return torch.softmax(logits.float().gather(1, experts), -1)
    return torch.softmax(logits.float(), -1).gather(1, experts)


def lay_out(samples: Sequence[Sample], micro: MicroBatch) -> Tensor:
    """Records `[B * (T - 1), L, E]` of a padded micro-batch: its last column predicts nothing and is not computed.

    Padding gets experts 0, 1, and so on: nothing that counts can see it. Raises ValueError if a sample has no record, one that ends
    before its last action token, or one of another shape than the others'.
    """
    assert micro.shared is None, "PolicyModel refuses both together"
    arrays = [_array(samples[i]) for i in micro.rows]
    layers, top_k = arrays[0].shape[1:]
    size = micro.ids.shape[1] - 1
    laid = np.broadcast_to(np.arange(top_k), (len(arrays), size, layers, top_k)).copy()
    for b, (i, array) in enumerate(zip(micro.rows, arrays, strict=True)):
        needed = int(micro.mask[b].nonzero()[-1])  # the last action token itself is not computed
        name = samples[i].rollout_id or "a sample"
        if len(array) < needed:
            raise ValueError(f"{name}: routing of {len(array)} tokens, {needed} are needed")
        if array.shape[1:] != (layers, top_k):
            raise ValueError(f"{name}: routing of shape {array.shape[1:]}, {(layers, top_k)} beside it")
        laid[b, :needed] = array[:needed]
    return torch.from_numpy(laid).flatten(0, 1).to(micro.ids.device)


def _array(sample: Sample) -> np.ndarray:
    """`[tokens, L, E]`."""
    routing = sample.routing
    if routing is None:
        raise ValueError(f"{sample.rollout_id or 'a sample'}: no record of the sampler's routing")
    return np.frombuffer(routing.data, f"<u{routing.width}").reshape(routing.tokens, routing.layers, routing.top_k)


def record(experts: np.ndarray, num_experts: int) -> Routing:
    """The record of an array `[tokens, L, E]` of expert ids: one byte for each if all the model's experts fit, else two."""
    width = 1 if num_experts <= 256 else 2
    _, layers, top_k = experts.shape
    return Routing(experts.astype(f"<u{width}").tobytes(), layers, top_k, width)


def first_missing(experts: np.ndarray, num_experts: int) -> tuple[int, int] | None:
    """Token and layer of `[tokens, L, E]` whose capture is missing; None if all are there.

    An engine that captured nothing leaves zeros or a mark that is no expert; a real selection names each of its experts once.
    """
    ordered = np.sort(experts, -1)
    missing = (ordered[..., 0] < 0) | (ordered[..., -1] >= num_experts) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if not missing.any():
        return None
    token, layer = np.argwhere(missing)[0].tolist()
    return token, layer
