"""Versioned weights between processes, through the Ray object store.

A state is `{name: tensor}` as plain bytes (`PackedState`), so that every process on a node reads it without a copy. The
reference is owned by the caller of `export`, not by the process that made it: weights outlive the model host they came from.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from termrsi.errors import WeightsError

PackedTensor = tuple[str, tuple[int, ...], np.ndarray]  # dtype name, shape, bytes
PackedState = dict[str, PackedTensor]


@dataclass(frozen=True, slots=True)
class StateMeta:
    """What is known of a packed state without fetching it."""

    checksum: str
    size_bytes: int
    num_tensors: int


def pack(state: Mapping[str, torch.Tensor]) -> PackedState:
    """Tensors as bytes; keeps dtype and shape. The arrays share memory with CPU tensors: put them before the next update."""
    packed = {}
    for name, tensor in state.items():
        flat = tensor.detach().cpu().contiguous()
        packed[name] = (str(flat.dtype).removeprefix("torch."), tuple(flat.shape), flat.view(-1).view(torch.uint8).numpy())
    return packed


def unpack(packed: PackedState) -> dict[str, torch.Tensor]:
    """Tensors again, each a copy (arrays from the object store are read-only)."""
    return {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape) for name, (dtype, shape, data) in packed.items()
    }


def tensor_digest(data: np.ndarray) -> str:
    """Digest of one tensor's bytes; the unit in which two processes compare weights."""
    return hashlib.blake2b(np.ascontiguousarray(data).view(np.uint8).data, digest_size=16).hexdigest()


def digests(packed: PackedState) -> dict[str, str]:
    return {name: tensor_digest(data) for name, (_, _, data) in packed.items()}


def checksum(packed: PackedState) -> str:
    """One digest of the whole state: names, dtypes, shapes and bytes, in the order of names."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(packed):
        dtype, shape, data = packed[name]
        whole.update(f"{name}\0{dtype}\0{shape}\0{tensor_digest(data)}\n".encode())
    return whole.hexdigest()


def meta(packed: PackedState) -> StateMeta:
    return StateMeta(checksum(packed), sum(data.nbytes for _, _, data in packed.values()), len(packed))


def write(packed: PackedState, directory: Path) -> None:
    """A safetensors file that an engine can load from, in `directory` (shared memory, where the machine has it)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape) for name, (dtype, shape, data) in packed.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raises WeightsError naming the first expected tensor that is missing or differs."""
    for name, digest in expected.items():
        if name not in found:
            raise WeightsError(f"tensor {name} is not in the engine", "weights")
        if found[name] != digest:
            raise WeightsError(f"tensor {name} differs between learner and engine after a pull", "weights")
