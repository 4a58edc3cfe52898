"""A run directory, for one process at a time: claimed before anything is written, left as it was found by a run that is refused."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from termrsi.errors import ConfigError

CURE = "give run_dir=DIR, where this user may write"


def check_place(directory: Path, cure: str) -> Path:
    """The part of it that is there. Raises ConfigError if it cannot be made or written; nothing is written to find out."""
    there = directory
    while not there.exists() and not there.is_symlink():
        there = there.parent
    if not there.is_dir():
        what = "is not a directory" if there == directory else f"cannot be made: {there} is not a directory"
        raise ConfigError(what, str(directory), cure)
    if not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written" if there == directory else f"cannot be made: {there} cannot be written"
        raise ConfigError(what, str(directory), cure)
    return there


class Claim:
    """The lock ends with the process. Refused before `keep`, a run leaves no file and no directory that it has made."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._lock = run_dir / "lock"
        self._kept = False

    def keep(self) -> None:
        """The run begins: from here on what it writes stays."""
        self._kept = True

    def __enter__(self) -> "Claim":
        """Raises ConfigError if another process has it, or if it cannot be written."""
        check_place(self._dir, CURE)
        if (stages := self._dir / "stages").exists() and not stages.is_dir():
            raise ConfigError("is not a directory", str(stages), CURE)
        self._made = [place for place in (self._dir, *self._dir.parents) if not place.exists()]  # deepest first
        self._new = not self._lock.exists()
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            self._take()
        except BlockingIOError as error:
            what = f"another process is running in {self._dir}"
            raise ConfigError(what, "run_dir", "wait for it, or take another run_dir") from error
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", error.filename or str(self._dir), CURE) from error
        return self

    def _take(self) -> None:
        """A lock that its owner has removed meanwhile is none: it is taken anew."""
        while True:
            self._file = self._lock.open("a")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise
            with contextlib.suppress(FileNotFoundError):
                if self._lock.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                    return
            self._file.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, ConfigError) and not self._kept:
            if self._dir in self._made:
                shutil.rmtree(self._dir)
            elif self._new:
                self._lock.unlink()
            for place in self._made:
                with contextlib.suppress(OSError):  # not empty: another run has begun beside it
                    place.rmdir()
        self._file.close()
