"""Buckets of weights in shared memory: written by one process, mapped by another on the same machine. No torch here."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from termrsi.weights import Facts, PackedState

SHARED_PREFIX = "termrsi-weights-"  # then the pid of the owner, so that what it left can be told
ALIGNMENT = 64


class Slot(NamedTuple):
    """A tensor in a bucket's file. A tuple, for this crosses into the engine's process."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    digest: str


class BucketFile:
    """One file in shared memory that another process maps. Raises OSError if there is no room for it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        folder = tempfile.mkdtemp(prefix=f"{SHARED_PREFIX}{os.getpid()}-", dir=_shared_memory(size_bytes))
        self.path = Path(folder) / "bucket"
        self._bytes = np.memmap(self.path, np.uint8, "w+", shape=(size_bytes,))

    def fill(self, packed: "PackedState", facts: "Facts", names: Iterable[str]) -> list[Slot]:
        """Write these tensors, and say where each is."""
        slots, start = [], 0
        for name in names:
            dtype, shape, data = packed[name]
            np.copyto(self._bytes[start : start + data.nbytes], data)
            slots.append(Slot(name, dtype, shape, start, data.nbytes, facts[name].digest))
            start += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
        return slots

    def close(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)


def _shared_memory(size_bytes: int) -> str | None:
    """/dev/shm if it has room (a container's may be 64 MiB), else None: a temporary directory."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * size_bytes else None


def reap() -> list[str]:
    """Removes weights that a killed process left in shared memory; their names."""
    removed = []
    for folder in Path("/dev/shm").glob(f"{SHARED_PREFIX}*"):
        pid = folder.name.removeprefix(SHARED_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed
