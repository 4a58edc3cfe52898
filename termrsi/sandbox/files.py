# Works on names relative to descriptors, which pathlib does not offer:
# ruff: noqa: PTH115, PTH208
"""Copies between the host and a sandbox's tree, by directory descriptors. A link inside can never lead to the host.

Every path inside is opened with openat2 and RESOLVE_IN_ROOT: absolute links and `..` stay under the sandbox's root. No
program of the sandbox takes part, so an agent that replaced `tar` changes nothing.
"""

import contextlib
import ctypes
import errno
import io
import os
import shutil
import stat
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from termrsi import watched
from termrsi.sandbox import tree
from termrsi.sandbox.tree import extents

MAX_DEPTH = 200  # of what is copied out of a sandbox: each level holds a descriptor
SYS_OPENAT2 = 437  # the same number on every architecture
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
LIBC = ctypes.CDLL(None, use_errno=True)


def put(root_fd: int, source: Path, target: str) -> None:
    """A host file, or the contents of a host directory, to `target` inside; parents are made, owner root. Raises OSError."""
    if source.is_dir():
        directory = make_dirs(root_fd, target)
        try:
            _put_contents(source, directory)
        finally:
            os.close(directory)
        return
    path = PurePosixPath("/", target)
    with contextlib.suppress(OSError):
        # An existing directory as target takes the file under its own name, as `cp` does.
        existing = open_in_root(root_fd, target, os.O_RDONLY | os.O_DIRECTORY)
        os.close(existing)
        path = path / source.name
    directory = make_dirs(root_fd, str(path.parent))
    try:
        _put_file(source, directory, path.name)
    finally:
        os.close(directory)


class Room:
    """How many bytes a copy may still take of this machine's disk."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes

    def take(self, size_bytes: int, what: str) -> None:
        """Raises OSError (EFBIG) if there is not so much."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise OSError(errno.EFBIG, f"more than may be copied to this machine: {what}")


def get(root_fd: int, source: str, target: Path, *, largest_bytes: int = 1 << 62) -> None:
    """A file, or the contents of a directory, from inside. Links stay links; pipes, sockets and devices are left out.

    Raises OSError, for more than `largest_bytes` (holes are none) too.
    """
    room = Room(largest_bytes)
    fd = open_in_root(root_fd, source, os.O_PATH)
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            directory = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                target.mkdir(parents=True, exist_ok=True)
                _get_contents(directory, target, {}, MAX_DEPTH, room)
            finally:
                os.close(directory)
        elif stat.S_ISREG(info.st_mode):
            target = target / PurePosixPath(source).name if target.is_dir() else target
            target.parent.mkdir(parents=True, exist_ok=True)
            reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            _get_file(reader, target, room)
        else:
            raise OSError(f"not a file or a directory: {source}")
    finally:
        os.close(fd)


def signatures(root_fd: int) -> dict[str, str]:
    """Of every watched path that is there, links followed: what no process can set back once the file was changed.

    The time of the last change of the inode is the kernel's own, and a sandbox cannot set the clock.
    """
    found = {}
    names = [f"{place}/{name}" for place in watched.REPORTED_IN for name in _names(root_fd, place)]
    names += [f"{place}/{name}" for place in watched.PATH_FILES_IN for name in _names(root_fd, place) if name.endswith(".pth")]
    for path in dict.fromkeys((*watched.RELIED_ON, *watched.REPORTED, *names)):
        with contextlib.suppress(OSError):
            fd = open_in_root(root_fd, path, os.O_PATH)
            try:
                info = os.fstat(fd)
            finally:
                os.close(fd)
            found[path] = f"{info.st_size} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_mode:o}"
    return found


def _names(root_fd: int, path: str) -> list[str]:
    try:
        fd = open_in_root(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def pack(entries: Sequence[tuple[str, Path | None]], into: IO[bytes], mode: int = 0o755) -> None:
    """An archive of files, links and directories (None: a new one) by their names in it, owner root."""
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in entries:
            info = tarfile.TarInfo(name.lstrip("/"))
            if path is None:
                info.type, info.mode = tarfile.DIRTYPE, mode
                archive.addfile(info)
            elif path.is_symlink() or path.is_dir() or path.is_file():
                info = archive.gettarinfo(path, name.lstrip("/"))
                info.type = tarfile.REGTYPE if info.islnk() else info.type  # two names of one file: the content twice
                info.size = path.stat().st_size if info.isreg() else 0
                info.uid = info.gid = 0
                info.uname = info.gname = "root"
                with path.open("rb") if info.isreg() else contextlib.nullcontext() as content:
                    archive.addfile(info, content)


def unpack(archive: tarfile.TarFile, target: Path, *, largest_bytes: int, strip: int = 1) -> None:
    """A streamed archive of one file, or of a directory whose contents go to `target`. As `get`: links are never followed.

    `strip`: how many names a directory's members begin with that `target` stands for.
    Raises OSError for more than `largest_bytes` in all, and for a name that leaves the archive.
    """
    whole = target.is_dir()
    total = 0
    for member in archive:
        parts = _inside(member.name, "a name")
        total += member.size
        if total > largest_bytes:
            raise OSError(f"{member.name} and what comes before it are said to have {total} bytes, more than the disk allowed")
        if whole and len(parts) <= strip:
            continue
        path = target.joinpath(*parts[strip:]) if whole else target
        _real_parents(target if whole else target.parent, path)
        if member.issym():
            _clear(path)
            path.symlink_to(member.linkname)
        elif member.isdir():
            if not path.is_dir() or path.is_symlink():
                _clear(path)
            path.mkdir(exist_ok=True)
        elif member.islnk():
            first = target.joinpath(*_inside(member.linkname, "a link")[strip:])
            _real_parents(target, first)
            if first.is_file() and not first.is_symlink() and first != path:
                _clear(path)
                path.hardlink_to(first)  # a copy for each of its names could fill this machine's disk
        elif member.isreg():
            _clear(path)
            with path.open("xb") as writer, archive.extractfile(member) or io.BytesIO() as reader:
                shutil.copyfileobj(reader, writer, 1 << 20)
            path.chmod(member.mode & 0o777)
            os.utime(path, (member.mtime, member.mtime))


def _inside(name: str, what: str) -> tuple[str, ...]:
    """Raises OSError for one that leaves the archive, and ENAMETOOLONG for one too deep."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/"):
        raise OSError(f"{what} that leaves the archive: {name}")
    if len(parts) > MAX_DEPTH:
        raise _too_deep(name)
    return parts


def _too_deep(name: str) -> OSError:
    return OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} directories in each other", name[:200])


def _real_parents(top: Path, path: Path) -> None:
    """The directories between, made where they are missing; a link among them is replaced, never walked through."""
    top.mkdir(parents=True, exist_ok=True)
    here = top
    for name in path.relative_to(top).parts[:-1]:
        here /= name
        if not here.is_dir() or here.is_symlink():
            _clear(here)
        here.mkdir(exist_ok=True)


def open_in_root(root_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2(2) with the sandbox's root as the root. Raises OSError."""
    how = ctypes.create_string_buffer(struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS), 24)
    fd = LIBC.syscall(SYS_OPENAT2, root_fd, os.fsencode(str(PurePosixPath("/", path))), how, 24)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return fd


def make_dirs(root_fd: int, path: str) -> int:
    """A descriptor of the directory `path` inside, made with its parents where it is missing. Raises OSError."""
    here = "/"
    for name in PurePosixPath("/", path).parts[1:]:
        parent = here
        here = f"{parent.rstrip('/')}/{name}"
        try:
            os.close(open_in_root(root_fd, here, os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            parent_fd = open_in_root(root_fd, parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.mkdir(name, 0o755, dir_fd=parent_fd)
            finally:
                os.close(parent_fd)
    return open_in_root(root_fd, here, os.O_RDONLY | os.O_DIRECTORY)


def _put_contents(source: Path, directory: int) -> None:
    for entry in sorted(source.iterdir()):
        if entry.is_symlink():
            _unlink(entry.name, directory)
            os.symlink(os.readlink(entry), entry.name, dir_fd=directory)
        elif entry.is_dir():
            if not _is_dir(entry.name, directory):
                _unlink(entry.name, directory)
                os.mkdir(entry.name, 0o755, dir_fd=directory)
            child = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            try:
                os.fchmod(child, stat.S_IMODE(entry.stat().st_mode) | 0o700)
                _put_contents(entry, child)
            finally:
                os.close(child)
        elif entry.is_file():
            _put_file(entry, directory, entry.name)


def _put_file(source: Path, directory: int, name: str) -> None:
    """Always a new file: writing through what is there could follow a link, or reach an open descriptor of a process."""
    with source.open("rb") as reader:
        info = os.fstat(reader.fileno())
        _unlink(name, directory)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        with os.fdopen(fd, "wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fchmod(fd, stat.S_IMODE(info.st_mode))
            os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))


def _get_contents(directory: int, target: Path, seen: dict[tuple[int, int], Path], depth: int, room: Room) -> None:
    """`seen`: the first copy of each file that has other names: a copy for each could fill this machine's disk.

    Raises OSError, ENAMETOOLONG if a directory lies deeper than `depth` more.
    """
    if depth == 0:
        raise _too_deep(str(target))
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        new = target / name
        if stat.S_ISLNK(info.st_mode):
            _clear(new)
            new.symlink_to(os.readlink(name, dir_fd=directory))
        elif stat.S_ISDIR(info.st_mode):
            if not new.is_dir() or new.is_symlink():  # a link that an earlier copy brought is not to be walked through
                _clear(new)
            new.mkdir(exist_ok=True)
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            try:
                _get_contents(child, new, seen, depth - 1, room)
            finally:
                os.close(child)
        elif stat.S_ISREG(info.st_mode):
            first = seen.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
            if first is not None and first.is_file() and not first.is_symlink() and first != new:
                _clear(new)
                new.hardlink_to(first)
                continue
            seen[info.st_dev, info.st_ino] = new
            # O_NONBLOCK: a pipe put in the file's place in between must not hold us.
            _get_file(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory), new, room)


def _get_file(fd: int, target: Path, room: Room) -> None:
    with os.fdopen(fd, "rb"):
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return
        _clear(target)
        with target.open("xb") as writer:
            # A hole stays a hole: a file of an agent can be said to be a terabyte long.
            writer.truncate(info.st_size)
            for start, end in extents(fd, info.st_size):
                room.take(end - start, target.name)
                offset = start
                while offset < end and (data := os.pread(fd, min(1 << 20, end - offset), offset)):
                    offset += os.pwrite(writer.fileno(), data, offset)
        target.chmod(stat.S_IMODE(info.st_mode) & 0o777)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _clear(path: Path) -> None:
    """Whatever an earlier copy left where a file or a link goes now."""
    if path.is_dir() and not path.is_symlink():
        tree.remove(path)
    else:
        path.unlink(missing_ok=True)


def _is_dir(name: str, directory: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _unlink(name: str, directory: int) -> None:
    """Removes what stands where a file or link will go; an empty directory too. Raises OSError for a full one."""
    if _is_dir(name, directory):
        os.rmdir(name, dir_fd=directory)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
