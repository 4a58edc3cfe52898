"""What policy and critic share: a model from its directory to its devices, a batch to micro-batches, and the step they lead to."""

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from termrsi.algo import batch as batching
from termrsi.errors import CheckpointError
from termrsi.model import checkpoint
from termrsi.model.masters import Compute, Masters
from termrsi.model.offload import activations
from termrsi.model.ranks import ALONE, Ranks, shard
from termrsi.model.routing import RoutingReplay
from termrsi.records import Sample, UpdateMetrics

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # as safetensors names them


def return_freed_memory() -> None:
    """Give what was freed back to the system (glibc; elsewhere nothing).

    Left to itself, glibc keeps freed blocks of up to 32 MiB in its heap: activations, of another size in each micro-batch, then lie
    there between what stays, and a learner on a CPU grows with every batch.
    """
    with suppress(OSError, AttributeError):  # another system, another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def load_module(factory: type, directory: Path | str, ranks: Ranks = ALONE) -> PreTrainedModel:
    """A transformers model, in evaluation mode, from local files only: in float32, of one process. Raises CheckpointError.

    Of several it is in the type that its files have: then they are mapped, not read, and the processes of a node share their pages
    until `place` has made each its float32 part. (Experts that transformers puts together as it loads them are not.)
    """
    dtype = torch.float32 if ranks.size == 1 else _dtype_of(Path(directory))
    try:
        return factory.from_pretrained(str(directory), dtype=dtype, local_files_only=True).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load it ({error})", str(directory)) from error


def _dtype_of(directory: Path) -> torch.dtype:
    """Of a model's files, whatever its config says."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                if (found := _DTYPES.get(opened.get_slice(name).get_dtype())) is not None:
                    return found
    return torch.float32


def enable_checkpointing(module: PreTrainedModel, replay: RoutingReplay | None = None) -> None:
    """Recompute each layer in the backward pass, under the record of `replay` that its forward pass had.

    transformers does so in training mode only; dropouts are set to 0 for that.
    """
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    contexts = {} if replay is None else {"context_fn": replay.recomputation}
    module.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
    module.train()


def place(
    root: nn.Module,
    model: PreTrainedModel,
    *,
    compute: Compute,
    device: torch.device,
    ranks: Ranks,
    full: Sequence[nn.Module] = (),
) -> nn.Module | None:
    """`root`, which holds `model`, on its device or cut over the processes; returns what `Masters` are to compute in bf16 of it."""
    if ranks.size == 1:
        nn.Module.to(root, device)  # transformers' own wrapper has no signature
        return model if compute == "bf16" else None
    shard(root, ranks, blocks=set(model._no_split_modules or ()), half=compute == "bf16", full=full)
    if any(p.requires_grad and p.dtype != torch.float32 for p in root.parameters()):  # as its files have it
        nn.Module.float(root)
    return None


def split(
    samples: Sequence[Sample],
    fields: Sequence[batching.Field],
    budget_tokens: int,
    device: torch.device,
    ranks: Ranks,
    *,
    share_prefix: bool,
) -> list[batching.MicroBatch]:
    """This process's micro-batches, with blank ones behind them where another process has more."""
    own = batching.micro_batches(
        samples,
        budget_tokens=budget_tokens,
        fields=fields,
        device=device,
        share_prefix=share_prefix,
        part=(ranks.rank, ranks.size),
    )
    return own + [batching.blank(fields, device)] * (ranks.most(len(own)) - len(own))


def learn(
    masters: Masters,
    batches: Sequence[batching.MicroBatch],
    loss_of: Callable[[batching.MicroBatch], Tensor],
    lr: float,
    ranks: Ranks,
    *,
    offload: bool = False,
) -> UpdateMetrics:
    """Backward over all micro-batches, then one step. `loss_of` must divide by the whole batch's denominator.

    `offload`: what a forward pass keeps for the backward pass waits in CPU memory.
    """
    start = time.perf_counter()
    masters.drop_gradients()
    total = 0.0
    for micro in batches:
        with activations() if offload else nullcontext():
            loss = loss_of(micro)
        loss.backward()
        total += float(loss.detach())
    norm = masters.step(lr)
    return_freed_memory()
    own = [micro for micro in batches if micro.rows]
    counts = (len(own), sum(micro.computed for micro in own), sum(micro.tokens for micro in own))
    total, number, computed, tokens = ranks.sum((total, *counts))
    extra = {"micro_batches": float(number), "padded_tokens": float(computed)}
    return UpdateMetrics(total, norm, int(tokens), time.perf_counter() - start, extra)


def save_training(directory: Path | str, masters: Masters, checksum: str, ranks: Ranks) -> str:
    """The first process writes, the others give it their parts; returns `checksum`, which stands beside."""
    if not ranks.first:
        masters.save_training(Path())
        return checksum
    with checkpoint.atomic_directory(directory) as temporary:
        masters.save_training(temporary)
        (temporary / "config.json").write_text(json.dumps({"checksum": checksum}))
    return checksum


def untied_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each storage under its first name only."""
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}
