"""The value model: the body of a causal LM and a linear head. The value of an action token is that of the prefix before it.

V_k = head(hidden state k - 1): it has seen every observation so far and not the token itself (turn-boundary GAE needs that).
It shares no memory with a policy. `termrsi.ports.Critic` is this with `async`, `publish` and `pull`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from termrsi.algo import batch as batching
from termrsi.algo import loss as losses
from termrsi.algo import metrics
from termrsi.errors import CheckpointError, ConfigError
from termrsi.model import checkpoint
from termrsi.model.learning import (
    enable_checkpointing,
    learn,
    load_module,
    place,
    return_freed_memory,
    save_training,
    split,
    untied_state,
)
from termrsi.model.liger import fuse
from termrsi.model.logprob import hidden_of
from termrsi.model.masters import Compute, Masters
from termrsi.model.ranks import ALONE, Ranks, rest
from termrsi.records import Sample, UpdateMetrics

HEAD_FILE = "value_head.safetensors"


class CriticModel:
    """Body and value head, all trained, with the optimizer, masters and micro-batches of `PolicyModel`.

    `directory` is a causal LM (then the head is new: weights of standard deviation 0.01 / sqrt(hidden size), bias 0, drawn
    from `seed`) or one written by `save`. A new critic keeps the first `layers` blocks of the LM's body (0: all): a value needs
    less depth than the next token, and the critic's updates cost as much as the policy's. A saved critic keeps its own depth.
    The head computes in float32. `ranks`, `liger`, what is offloaded, CheckpointError and ConfigError as in PolicyModel.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        compute: Compute = "bf16",
        device: str | torch.device = "cpu",
        micro_tokens: int = 4096,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float = 1.0,
        gradient_checkpointing: bool = False,
        share_prefix: bool = False,
        offload_activations: bool = False,
        offload_optimizer: bool = False,
        liger: bool = False,
        seed: int = 0,
        layers: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        if compute not in ("bf16", "fp32"):
            raise ConfigError(f"unknown compute {compute!r}", "model.critic", "bf16 or fp32")
        self._compute: Compute = compute
        self._device, self._ranks = torch.device(device), ranks
        self._micro_tokens, self._seed, self._layers = micro_tokens, seed, layers
        self._betas, self._max_grad_norm = betas, max_grad_norm
        self._gradient_checkpointing, self._share_prefix = gradient_checkpointing, share_prefix
        self._offload_activations, self._offload_optimizer = offload_activations, offload_optimizer
        self._liger = liger
        self.load(directory)

    def load(self, directory: Path | str) -> str:
        """Weights from a directory, fresh optimizer; returns the checksum. Raises CheckpointError."""
        checkpoint.verify(directory)
        saved = Path(directory) / HEAD_FILE
        body = load_module(AutoModel, directory, self._ranks)
        if self._layers and not saved.exists():
            keep_layers(body, self._layers, str(directory))
        if self._liger:
            fuse(body)
        head = _make_head(int(body.config.get_text_config().hidden_size), self._seed)
        if saved.exists():
            try:
                head.load_state_dict(load_file(saved))
            except (RuntimeError, OSError) as error:
                raise CheckpointError(f"the value head does not fit ({error})", str(saved)) from error
        if self._gradient_checkpointing:
            enable_checkpointing(body)
        self._source, self._body, self._head = Path(directory), body, head
        self._module = _Valuer(body, head)
        half = place(self._module, body, compute=self._compute, device=self._device, ranks=self._ranks, full=[head])
        self._masters = Masters(
            self._module,
            half=half,
            betas=self._betas,
            max_grad_norm=self._max_grad_norm,
            offload=self._offload_optimizer,
            ranks=self._ranks,
        )
        return self.checksum()

    def save(self, directory: Path | str) -> str:
        """The body as a bf16 Hugging Face directory, the head beside it in float32; returns the checksum."""
        state = self.state()
        if not self._ranks.first:
            return ""
        body = {name.removeprefix("body."): tensor for name, tensor in state.items() if name.startswith("body.")}
        head = {name.removeprefix("value_head."): tensor for name, tensor in state.items() if name.startswith("value_head.")}
        with checkpoint.atomic_directory(directory) as temporary:
            self._body.save_pretrained(temporary, state_dict=body)
            checkpoint.set_config_dtype(temporary)
            checkpoint.copy_tokenizer(self._source, temporary)
            save_file({name: tensor.contiguous() for name, tensor in head.items()}, temporary / HEAD_FILE)
        return checkpoint.checksum(state)

    def state(self) -> dict[str, Tensor]:
        """What `save` writes, in memory: body in bf16 (`body.*`), head in float32 (`value_head.*`); see `PolicyModel.state`."""
        cast = (
            (name, tensor if name.startswith("value_head.") else tensor.to(torch.bfloat16))
            for name, tensor in untied_state(self._module).items()
        )
        return dict(cast) if self._ranks.size == 1 else self._ranks.keep(cast)

    def checksum(self) -> str:
        """Of `state`; over several processes meaningless but on the first."""
        return checkpoint.checksum(self.state())

    def weights_only(self) -> dict[str, Tensor]:
        """Copies of the float32 weights, for the hand-off to another critic; no optimizer state."""
        return self._masters.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Take over what `weights_only` gave, with a fresh optimizer; returns the checksum. Raises CheckpointError."""
        self._masters.load_weights(weights)
        return self.checksum()

    def save_training(self, directory: Path | str) -> str:
        """As PolicyModel's: masters, the head's among them, and optimizer."""
        return save_training(directory, self._masters, self.checksum(), self._ranks)

    def load_training(self, directory: Path | str) -> str:
        """As PolicyModel's, of a critic of this depth."""
        checkpoint.verify(directory)
        self._masters.load_training(Path(directory))
        return self.checksum()

    @property
    def fresh_optimizer(self) -> bool:
        """True until the first update after a load or a hand-off."""
        return not self._masters.has_moments

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Value of the prefix before each action token: one list per sample, as long as its ids, 0 off the mask."""
        with torch.no_grad():
            batches = self._split(samples, ())
            rows = batching.restore(samples, [(batch, self._forward(batch)) for batch in batches])
        rest(self._module)
        return_freed_memory()
        return self._ranks.fill(rows, [i for batch in batches for i in batch.rows])

    def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        """One step of `algo.loss.value_loss` towards `returns`, clipped around `old_values`; denominator: all action tokens.

        Without a clip (0) `old_values` may be missing. `extra` holds `explained_variance` unless it is undefined.
        """
        clipped = value_clip > 0.0
        fields: list[batching.Field] = ["returns", "old_values"] if clipped else ["returns"]
        count = float(sum(sum(sample.mask) for sample in samples))
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        def one(micro: batching.MicroBatch) -> Tensor:
            values, returns = self._forward(micro), micro.columns["returns"]
            old = micro.columns.get("old_values", values.detach())
            seen.append((_numpy(values, micro), _numpy(returns, micro)))
            return losses.value_loss(values, returns, old, micro.mask, clip=value_clip, denominator=count)

        result = learn(self._masters, self._split(samples, fields), one, lr, self._ranks, offload=self._offload_activations)
        seen = [part for parts in self._ranks.gather(seen) for part in parts]
        if seen:
            values, returns = (np.concatenate(part) for part in zip(*seen, strict=True))
            explained = metrics.explained_variance(values, returns)
            result.extra.update(value_mean=float(values.mean()), return_mean=float(returns.mean()))
            result.extra.update({} if explained is None else {"explained_variance": explained})
        return result

    def refit(self, scale: float, shift: float) -> None:
        """From now on each value V is scale x V + shift: the head's weights scaled, its bias scaled and shifted; fresh optimizer.

        Raises ValueError if either is not finite.
        """
        if not (math.isfinite(scale) and math.isfinite(shift)):
            raise ValueError(f"scale {scale} and shift {shift} must be finite")
        with torch.no_grad():  # the head is its own master: it computes in float32
            self._head.weight.mul_(scale)
            self._head.bias.mul_(scale).add_(shift)
        self._masters.reset_optimizer()

    def _split(self, samples: Sequence[Sample], fields: Sequence[batching.Field]) -> list[batching.MicroBatch]:
        return split(samples, fields, self._micro_tokens, self._device, self._ranks, share_prefix=self._share_prefix)

    def _forward(self, micro: batching.MicroBatch) -> Tensor:
        """Values `[B, T]`, 0 off the mask."""
        return torch.zeros(micro.mask.shape, device=self._device).masked_scatter(micro.mask, self._module(micro).squeeze(1))


class _Valuer(nn.Module):
    """Body and head, from micro-batch to values `[K, 1]`."""

    def __init__(self, body: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.value_head = body, head

    def forward(self, micro: batching.MicroBatch) -> Tensor:
        return self.value_head(hidden_of(self.body, micro).float())


def keep_layers(body: PreTrainedModel, layers: int, where: str) -> None:
    """Cut a decoder off behind its first `layers` blocks; its final norm stays. Raises ConfigError if it has fewer."""
    config, blocks = body.config.get_text_config(), getattr(body, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not 1 <= layers <= len(blocks):
        raise ConfigError(f"critic_layers={layers}", where, f"valid: 0 (all) to {config.num_hidden_layers}")
    body.layers = blocks[:layers]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _make_head(hidden_size: int, seed: int) -> nn.Linear:
    head = nn.Linear(hidden_size, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0.0, 0.01 / hidden_size**0.5, generator=generator)
        head.bias.zero_()
    return head


def _numpy(column: Tensor, micro: batching.MicroBatch) -> np.ndarray:
    return column.detach()[micro.mask].double().cpu().numpy()
