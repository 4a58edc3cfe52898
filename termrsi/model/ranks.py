"""Several processes that hold one model: who they are, what they tell each other, and how the model is cut (FSDP2).

All run the same calls with the same arguments (SPMD); each computes its share of the samples. Gradients are added up, never
averaged: the losses divide by the whole batch's denominator. One process alone needs none of it, and every answer is its own.
"""

import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]: documented there
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place: `rank` of `size`. `mesh` is None alone. What is exchanged here goes through CPU memory (gloo)."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    @property
    def first(self) -> bool:
        """The one that writes files and publishes."""
        return self.rank == 0

    def most(self, count: int) -> int:
        """The largest `count` of all."""
        return max(self.gather_all(count))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the processes, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """Every process's value by rank, on the first; elsewhere nothing."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.first else []  # Any: filled in the next line
        dist.gather_object(value, values or None)
        return values

    def gather_all(self, value: T) -> list[T]:
        """Every process's value by rank, everywhere."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size  # Any: filled in the next line
        dist.all_gather_object(values, value)
        return values

    def fill(self, rows: Sequence[list[float]], own: Iterable[int]) -> list[list[float]]:
        """`rows` with those of `own` from this process and the others' own from them: float32 numbers, everywhere."""
        if self.size == 1:
            return list(rows)
        filled = list(rows)
        for part in self.gather_all({i: np.asarray(rows[i], np.float32) for i in own}):
            for i, row in part.items():
                filled[i] = row.tolist()
        return filled

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Each tensor whole, on the first process's CPU, one after the other; elsewhere nothing."""
        kept: dict[str, Tensor] = {}
        for name, tensor in tensors:
            full = whole(tensor.detach())
            if self.first:
                kept[name] = full.cpu()
        return kept


ALONE = Ranks()


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Where the processes meet, on a free port of this machine; the first one holds it as long as it lives."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def find_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The others' way to `open_store`. Raises RuntimeError of torch if nobody is there in time."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Ranks:
    """Wait for all `size` processes, then be one of them; no exchange waits longer than `timeout_s`, RuntimeError of torch then.

    On GPUs tensors go through NCCL, everything else through gloo.
    """
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return Ranks(rank, size, init_device_mesh(device.type, (size,)))


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    return None


def shard(root: nn.Module, ranks: Ranks, *, blocks: Collection[str], half: bool, full: Sequence[nn.Module] = ()) -> None:
    """Cut `root`'s parameters over the processes, in place: each keeps a part of every parameter, which is in float32 its master.

    Modules whose class is named in `blocks` are put together for a forward or backward pass one at a time, those of `full` too,
    and what is left as long as `root` computes. `half`: they compute in bf16, but for `full`, which stay in float32; gradients are
    added up in float32. `root` must be what is called.
    """
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    for part in full:
        fully_shard(part, mesh=ranks.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), reshard_after_forward=True)
    for part in [part for part in root.modules() if type(part).__name__ in blocks]:
        fully_shard(part, mesh=ranks.mesh, mp_policy=low)
    fully_shard(root, mesh=ranks.mesh, mp_policy=low)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction


def rest(root: nn.Module) -> None:
    """After a pass without backward: what `root` itself put together is given back, or the next pass would see old weights."""
    if isinstance(root, FSDPModule):
        root.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is cut, on every process; one that is not is itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of `tensor`, which is whole, cut as `like` is and on its device."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
