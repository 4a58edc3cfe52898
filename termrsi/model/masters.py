"""Float32 master weights with AdamW, and the bf16 copies the module computes with.

In bf16 alone a step of 5e-7 rounds to nothing. So the module holds bf16 parameters, each with a float32 master; a gradient
moves to its master as soon as it is complete, micro-batches add up in float32, and after the step the masters are rounded back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from termrsi.errors import CheckpointError
from termrsi.model.offload import Parking
from termrsi.model.ranks import ALONE, Ranks, part_of, whole

Compute = Literal["bf16", "fp32"]
FILE_BYTES = 1 << 30  # of training state in one file, and so twice in memory while it is written
BUCKET_BYTES = 256 << 20  # of masters that a step brings back at once, where they and their moments are away (as much again twice)


class Masters:
    """The trainable parameters of one module and their optimizer. The module is changed in place.

    `half` is the part that computes in bf16 (None: nothing does, and the parameters are their own masters). Over several `ranks`
    the module is cut (`ranks.shard`), its parameters are their own masters, and each process steps on its parts of them; what is
    handed out is whole, on the first process only, and what is taken in is whole on each.
    `offload`: between steps, moments and masters that nothing computes with are in CPU memory; a step brings them back a bucket
    at a time. The numbers are the same.
    AdamW, betas (0.9, 0.95) (ours: the second moment forgets in tens of steps, as long as a phase lasts), weight decay 0.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        half: nn.Module | None,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float = 1.0,
        offload: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks, self._offload, self._parking = ranks, offload, Parking()
        self._betas, self._max_grad_norm = betas, max_grad_norm
        # A tied weight has one name here: named_parameters yields each parameter once.
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        originals = {name: p.detach().float() for name, p in self._parameters.items()} if half is not None else {}
        # Parameters get other memory: what `originals` have is theirs. No buffers: in bf16, frequencies of positions are others.
        for parameter in half.parameters() if half is not None else ():
            parameter.data = parameter.data.to(torch.bfloat16)
        self._masters: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype == torch.float32:
                self._masters[name] = parameter
            else:
                self._masters[name] = originals[name].requires_grad_()
                parameter.register_post_accumulate_grad_hook(_mover(self._masters[name]))
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget moments, step counts and gradients."""
        buckets = _portions(self._masters.items(), BUCKET_BYTES) if self._offload else [list(self._masters.items())]
        names = [[name for name, _ in bucket] for bucket in buckets]
        self._buckets = [(these, self._optimizer_of(these)) for these in names]
        self._optimizers = {name: optimizer for these, optimizer in self._buckets for name in these}
        self.drop_gradients()
        self._put_all()

    def drop_gradients(self) -> None:
        """Before the first micro-batch, so that a batch that failed half-way leaves nothing behind."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._masters[name].grad = None

    def step(self, lr: float) -> float:
        """One step on the gradients so far; returns their norm before clipping. A norm that is not finite changes nothing."""
        masters = list(self._masters.values())
        norm = whole(torch.nn.utils.clip_grad_norm_(masters, self._max_grad_norm))
        if bool(torch.isfinite(norm)):
            for names, optimizer in self._buckets:
                self._parking.take(self._parked(names))
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
                self._round_back(names)
                if self._offload:
                    for name in names:
                        self._masters[name].grad = None  # room for the next bucket
                    self._parking.put(self._parked(names))
        self.drop_gradients()
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the float32 masters by parameter name."""
        return self._handed_out(self._masters.items())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Weights only: the optimizer starts afresh. Raises CheckpointError if names or shapes differ."""
        self._check(weights)
        for name, master in self._parking.one_by_one(self._masters.items()):
            with torch.no_grad():
                master.copy_(part_of(weights[name], master))
            self._round_back([name])
        self.reset_optimizer()

    def training_state(self) -> dict[str, Tensor]:
        """All that a resumed run needs to go on bit for bit: masters (`master.*`), moments and step counts (`optimizer.*`)."""
        return self._handed_out(self._training_tensors())

    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        """What `training_state` returned. Raises CheckpointError if it is of another model."""
        self.load_weights({k.removeprefix("master."): v for k, v in state.items() if k.startswith("master.")})
        for full, value in state.items():
            kind, _, rest = full.partition(".")
            key, _, name = rest.partition(".")
            if kind == "optimizer":
                master = self._masters[name]
                made = self._optimizers[name].state[master][key] = part_of(value, master).clone()
                if self._offload:  # one after the other: all of them together are what there is no room for
                    self._parking.put([made])

    def save_training(self, directory: Path) -> None:
        """`training_state` into `directory` of the first process, in files of about `FILE_BYTES`."""
        for number, part in enumerate(_portions(self._training_tensors(), FILE_BYTES)):
            state = self._handed_out(part)
            if self._ranks.first:
                save_file(state, directory / f"training-{number:05d}.safetensors")
            del state  # or the next part would be put together beside it

    def load_training(self, directory: Path) -> None:
        """What `save_training` wrote, by however many processes. Raises CheckpointError as `load_training_state`."""
        state: dict[str, Tensor] = {}
        for file in sorted(directory.glob("training-*.safetensors")):
            state |= load_file(file)  # mapped into memory, so that a process reads its parts only
        self.load_training_state(state)

    @property
    def has_moments(self) -> bool:
        """False for a fresh optimizer."""
        return any(len(optimizer.state) > 0 for _, optimizer in self._buckets)

    def _optimizer_of(self, names: Sequence[str]) -> torch.optim.Optimizer:
        masters = [self._masters[name] for name in names]
        return torch.optim.AdamW(masters, lr=0.0, betas=self._betas, weight_decay=0.0, fused=True)

    def _state_of(self, name: str) -> dict[str, Tensor]:
        """Moments and step count; empty before the first step."""
        return self._optimizers[name].state.get(self._masters[name], {})

    def _parked(self, names: Iterable[str]) -> Iterator[Tensor]:
        """What of these parameters is away between steps."""
        for name in names:
            if self._masters[name] is not self._parameters[name]:
                yield self._masters[name]
            yield from self._state_of(name).values()

    def _put_all(self) -> None:
        if self._offload:
            self._parking.put(self._parked(self._masters))

    def _training_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield f"master.{name}", master
        for name in self._masters:
            for key, value in self._state_of(name).items():
                yield f"optimizer.{key}.{name}", value

    def _handed_out(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies, whole; over several processes on the first one's CPU, elsewhere nothing."""
        there = self._parking.one_by_one(tensors)
        if self._ranks.size > 1:
            return self._ranks.keep(there)
        # What is away has no room here, whole, as a copy either.
        return {name: tensor.detach().to("cpu" if self._offload else tensor.device, copy=True) for name, tensor in there}

    def _round_back(self, names: Iterable[str]) -> None:
        with torch.no_grad():
            for name in names:
                if self._masters[name] is not self._parameters[name]:
                    self._parameters[name].copy_(self._masters[name])

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        ours = {name: tuple(master.shape) for name, master in self._masters.items()}
        theirs = {name: tuple(weight.shape) for name, weight in weights.items()}
        if ours != theirs:
            odd = sorted({name for name, _ in ours.items() ^ theirs.items()})
            raise CheckpointError(f"these weights are of another model ({', '.join(odd[:3])})", "model.masters", "")


def _portions(tensors: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, each portion full once it has `limit_bytes`."""
    held: list[tuple[str, Tensor]] = []
    for item in tensors:
        held.append(item)
        if sum(tensor.nbytes for _, tensor in held) >= limit_bytes:
            yield held
            held = []
    if held:
        yield held


def _mover(master: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None:
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
            parameter.grad = None  # two bytes per weight, held for one layer at a time

    return move
