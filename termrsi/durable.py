"""Files of a run that are whole, or as they were: a disk that fills up leaves none that a later run would take for what it is not.

Every OSError from here names the file, and if there was no room for it, how much was to be written.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_NAMES = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)  # of a directory that cannot be synced
LONGEST = 60  # characters of a name in its draft's: of up to four bytes each, and a name has at most 255


def write_text(path: Path, text: str, *, errors: str = "strict", sync: bool = True) -> None:
    """All of it under its name, in place of what was there; on an error what was there stays. `sync`: on disk on return, both."""
    write_bytes(path, text.encode("utf-8", errors), sync=sync)


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """As `write_text`."""
    draft = path.with_name(f".{path.name[:LONGEST]}.part")
    with _named(path, len(data)):
        try:
            with draft.open("wb", buffering=0) as file:
                _write(file.fileno(), data)
                if sync:
                    os.fsync(file.fileno())
            draft.replace(path)
            if sync:
                _sync_name(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


class Lines:
    """A file that lines are added to, each whole or not at all. Takes up what is there, less a last line that broke off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _named(path, 0):
            drop_half_line(path)
            self._named = False  # on disk under its name: an earlier life may have been killed before it was
            self._file = path.open("ab", buffering=0)  # nothing waits in here: a close cannot fail for want of room

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, line: str, *, sync: bool = False) -> None:
        """`line` without its end. `sync`: on disk on return. On an error the file ends as before."""
        data, number = (line + "\n").encode("utf-8"), self._file.fileno()
        before = os.fstat(number).st_size
        with _named(self._path, len(data)):
            try:
                _write(number, data)
                if sync:
                    self._sync()
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(number, before)
                raise

    def sync(self) -> None:
        """All of it is on disk on return."""
        with _named(self._path, 0):
            self._sync()

    def close(self) -> None:
        self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        if not self._named:
            _sync_name(self._path)
            self._named = True


def drop_half_line(path: Path) -> None:
    """Cuts what a kill in the middle of writing left behind the last whole line."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:  # backwards, block by block, to behind the last line's end
            start = max(0, end - 65536)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _sync_name(path: Path) -> None:
    """The directory's own entry: without it a machine that stops may forget a file whose content it has.

    Some file systems know no such thing, or do not let this user: then there is no more to be had.
    """
    try:
        number = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in NO_NAMES:
            raise


def _write(number: int, data: bytes) -> None:
    """A disk that fills up takes a part first, and then says so."""
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]


@contextmanager
def _named(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{error.strerror}, {size} bytes were to be written" if error.errno in FULL and size else error.strerror
        raise OSError(error.errno, what, str(path)) from error
