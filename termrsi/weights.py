"""Versioned weights between processes: as bytes, with a digest for each tensor, cut into buckets.

A state is `{name: tensor}` as plain bytes (`PackedState`), so that every process on a node reads it without a copy. Digests say
which tensors two states have in common: what the other side holds is neither put, nor written, nor loaded again. Whoever publishes
owns the references in a `Stored`: weights outlive the model host they came from.

A digest is xxh3 with 128 bits: as fast as memory, and proof against accidents, not against an adversary.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from termrsi.errors import WeightsError

PackedTensor = tuple[str, tuple[int, ...], np.ndarray]  # dtype name, shape, bytes
PackedState = dict[str, PackedTensor]
SAMPLE_COLUMNS = 16  # of each matrix, that are proved after a load


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is known of a tensor without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    digest: str


Facts = dict[str, TensorFacts]  # in the order of the state


@dataclass(frozen=True, slots=True)
class Part:
    """One object of the store: the tensors taken from it, and how large it is, with those that nobody needs any more."""

    reference: Any  # Any: Ray's, of a PackedState
    names: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the tensors of one version lie: each name in one object, put with this version or with an earlier one."""

    facts: Facts
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.facts.values())

    @property
    def put_bytes(self) -> int:
        """What it keeps in the store."""
        return sum(part.size_bytes for part in self.parts)


def pack(state: Mapping[str, torch.Tensor]) -> PackedState:
    """Tensors as bytes; keeps dtype and shape. The arrays share memory with CPU tensors: put them before the next update."""
    packed = {}
    for name, tensor in state.items():
        flat = tensor.detach().cpu().contiguous()
        packed[name] = (dtype_name(flat.dtype), tuple(flat.shape), flat.view(-1).view(torch.uint8).numpy())
    return packed


def unpack(packed: PackedState) -> dict[str, torch.Tensor]:
    """Tensors over the same bytes: not to be written to where these are read-only, as those of the object store are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: as_tensor(data, dtype, shape) for name, (dtype, shape, data) in packed.items()}


def as_tensor(data: np.ndarray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over these bytes."""
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest_of(data: Any) -> str:  # Any: whatever has a contiguous buffer
    """Digest of these bytes; the unit in which two processes compare weights."""
    return xxhash.xxh3_128_hexdigest(data)


def facts_of(packed: PackedState) -> Facts:
    return {name: TensorFacts(dtype, shape, data.nbytes, digest_of(data.data)) for name, (dtype, shape, data) in packed.items()}


def checksum_of(state: Mapping[str, torch.Tensor]) -> str:
    """`checksum` of tensors wherever they are, one at a time on the CPU."""
    return checksum({name: facts_of(pack({name: tensor}))[name] for name, tensor in state.items()})


def checksum(facts: Facts) -> str:
    """One digest (32 hex digits) of the whole state: names, dtypes, shapes and bytes, in the order of names."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(facts):
        one = facts[name]
        whole.update(f"{name}\0{one.dtype}\0{one.shape}\0{one.digest}\n".encode())
    return whole.hexdigest()


def digests(facts: Facts) -> dict[str, str]:
    return {name: one.digest for name, one in facts.items()}


def group_of(name: str) -> str:
    """What an engine loads at once: a whole decoder layer (engines fuse projections, and the experts of a layer), or a module."""
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if layer is None else parts[: layer + 1])


def changed(facts: Facts, held: Mapping[str, str]) -> list[str]:
    """Names whose tensors differ from those of the digests `held`, in order."""
    return [name for name, one in facts.items() if held.get(name) != one.digest]


def to_load(facts: Facts, held: Mapping[str, str]) -> list[str]:
    """Names of all groups in which a tensor differs, in order."""
    groups = {group_of(name) for name in changed(facts, held)}
    return [name for name in facts if group_of(name) in groups]


def buckets(facts: Facts, names: Iterable[str], limit_bytes: int) -> list[tuple[str, ...]]:
    """`names` cut into buckets of at most `limit_bytes`, none through a group: a larger group is a bucket of its own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    found: list[list[str]] = []
    room = 0
    for members in groups.values():
        size = sum(facts[name].size_bytes for name in members)
        if not found or size > room:
            found.append([])
            room = limit_bytes
        found[-1] += members
        room -= size
    return [tuple(bucket) for bucket in found]


def portions(tensors: Iterable[tuple[str, torch.Tensor]], limit_bytes: int) -> Iterator[PackedState]:
    """Packed in order, each portion full once it has `limit_bytes`."""
    packed: PackedState = {}
    held_bytes = 0
    for name, tensor in tensors:
        packed |= pack({name: tensor})
        held_bytes += packed[name][2].nbytes
        if held_bytes >= limit_bytes:
            yield packed
            packed, held_bytes = {}, 0
    if packed:
        yield packed


def merge(facts: Facts, fresh: Iterable[tuple[Any, Sequence[str]]], before: Stored | None) -> Stored:
    """The state of `facts`: what was put now, references with their names, and the rest as it was `before`."""
    parts = [Part(reference, tuple(names), sum(facts[name].size_bytes for name in names)) for reference, names in fresh]
    new = {name for part in parts for name in part.names}
    for part in () if before is None else before.parts:
        if kept := tuple(name for name in part.names if name in facts and name not in new):
            parts.append(replace(part, names=kept))
    found = {name for part in parts for name in part.names}
    if missing := [name for name in facts if name not in found]:
        raise WeightsError(f"tensor {missing[0]} was not put", "weights")
    return Stored(facts, tuple(parts))


def sample_of(width: int, version: int, columns: int = SAMPLE_COLUMNS) -> tuple[int, int]:
    """First and number of the columns that are proved at this version, of `width`: all if `columns` is 0 or there are no more."""
    if columns == 0 or width <= columns:
        return 0, width
    return xxhash.xxh3_64_intdigest(f"{version} {width}".encode()) % (width - columns + 1), columns


def sample_digest(tensor: torch.Tensor, version: int, columns: int = SAMPLE_COLUMNS) -> str:
    """`canonical` of the columns of `sample_of`; a vector's is of all of it."""
    if tensor.dim() < 2:
        return canonical(tensor)
    first, count = sample_of(tensor.shape[-1], version, columns)
    return canonical(tensor[..., first : first + count])


def canonical(tensor: torch.Tensor) -> str:
    """Digest of a tensor's values: of its bytes, with negative zeros made positive."""
    flat = (tensor.detach() + 0.0).cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return digest_of(flat.data)


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raises WeightsError naming the first expected tensor that is missing or differs."""
    for name, digest in expected.items():
        if name not in found:
            raise WeightsError(f"tensor {name} is not in the engine", "weights")
        if found[name] != digest:
            raise WeightsError(f"tensor {name} differs between learner and engine after a pull", "weights")
