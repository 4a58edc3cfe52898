"""Buckets of weights in shared memory: written by one process, mapped by another on the same machine. No torch here."""

import fcntl
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
    """One file in shared memory that another process maps, locked as long as this one lives.

    Raises OSError if there is no room for it: all of it is there at once, as a page that is missing later ends a process by SIGBUS.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        folder = Path(tempfile.mkdtemp(prefix=f"{SHARED_PREFIX}{os.getpid()}-", dir=_shared_memory(size_bytes)))
        self.path = folder / "bucket"
        self._file = self.path.open("x+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
            self._bytes = np.memmap(self._file, np.uint8, "r+", shape=(size_bytes,))
        except OSError:
            self.close()
            raise

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
        self._file.close()
        shutil.rmtree(self.path.parent, ignore_errors=True)


def _shared_memory(size_bytes: int) -> str | None:
    """/dev/shm if it has room (a container's may be 64 MiB), else None: a temporary directory."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * size_bytes else None


def reap() -> list[str]:
    """Removes weights that a killed process left on this machine; their names."""
    removed = []
    for place in {Path("/dev/shm"), Path(tempfile.gettempdir())}:
        for folder in place.glob(f"{SHARED_PREFIX}*"):
            pid = folder.name.removeprefix(SHARED_PREFIX).partition("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and not _locked(folder / "bucket"):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(str(folder))
    return removed


def _locked(path: Path) -> bool:
    """Whether somebody has it who is not seen from here: a process in another container that shares this memory."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
