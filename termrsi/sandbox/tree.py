# Names in directories that an agent filled: plain strings are exact and fast here:
# ruff: noqa: PTH101, PTH102, PTH115, PTH116, PTH118, PTH123, PTH211
"""Copies of a writable layer: faithful (deletions, owners, modes, times, links, attributes, holes), with a digest.

A deletion is a device node 0/0, a replaced directory carries an attribute, as overlayfs writes them; both are copied as
they are. Called while no process of the sandbox runs, so nothing moves under the copy; symlinks are never followed.
"""

import contextlib
import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 20
# Set by overlayfs for its own bookkeeping; they differ between two mounts of the same content.
IGNORED_ATTRIBUTES = ("overlay.origin", "overlay.impure", "overlay.uuid", "overlay.nlink")


def copy(source: str, target: str) -> tuple[str, int]:
    """Copies the directory `source` to the new directory `target`: (digest, bytes of content). Raises OSError."""
    writer = _Copy()
    digest = hashlib.sha256()
    directories: list[tuple[str, os.stat_result]] = []
    for relative, info in walk(source):
        old = os.path.join(source, relative) if relative else source
        new = os.path.join(target, relative) if relative else target
        content = writer.one(old, new, info)
        if stat.S_ISDIR(info.st_mode):
            directories.append((new, info))
        _add(digest, relative, info, content, old)
    for new, info in reversed(directories):  # after their contents: making those changes a directory's time
        os.chmod(new, stat.S_IMODE(info.st_mode))
        os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
    return digest.hexdigest(), writer.size_bytes


def digest(source: str) -> str:
    """The digest `copy` would return. Raises OSError."""
    total = hashlib.sha256()
    first: dict[tuple[int, int], str] = {}
    for relative, info in walk(source):
        path = os.path.join(source, relative) if relative else source
        content = ""
        if stat.S_ISREG(info.st_mode):
            key = (info.st_dev, info.st_ino)
            if key not in first:
                first[key] = _content_digest(path)
            content = first[key]
        _add(total, relative, info, content, path)
    return total.hexdigest()


def walk(source: str) -> Iterator[tuple[str, os.stat_result]]:
    """(relative path, lstat) of everything in a fixed order, each directory before its contents; "" is the top."""
    yield "", os.stat(source)
    pending = [""]
    while pending:
        directory = pending.pop()
        with (
            _opened(os.path.join(source, directory) if directory else source),
            os.scandir(os.path.join(source, directory) if directory else source) as entries,
        ):
            names = sorted(entry.name for entry in entries)
        for name in names:
            relative = os.path.join(directory, name)
            info = os.lstat(os.path.join(source, relative))
            yield relative, info
            if stat.S_ISDIR(info.st_mode):
                pending.append(relative)


def remove(path: Path) -> None:
    """Removes a tree, also one with directories that its owner has closed to himself. Raises OSError.

    By coreutils: an agent can nest directories deeper than a recursion, open descriptors and whole names go.
    """
    if not os.path.lexists(path):
        return
    rm = ("rm", "-rf", "--", str(path))
    done = subprocess.run(rm, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        subprocess.run(("chmod", "-R", "u+rwx", "--", str(path)), stderr=subprocess.DEVNULL, check=False)
        done = subprocess.run(rm, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{path} cannot be removed: {done.stderr.strip()[-300:]}")


class _Copy:
    def __init__(self) -> None:
        self.size_bytes = 0
        self._first: dict[tuple[int, int], tuple[str, str]] = {}  # inode -> (where its copy lies, digest of the content)

    def one(self, old: str, new: str, info: os.stat_result) -> str:
        """Copies one entry; the digest of a regular file's content, else ""."""
        kind = stat.S_IFMT(info.st_mode)
        content = ""
        if kind == stat.S_IFREG or (info.st_nlink > 1 and kind != stat.S_IFDIR):
            key = (info.st_dev, info.st_ino)
            if key in self._first:
                earlier, content = self._first[key]
                os.link(earlier, new, follow_symlinks=False)
                return content
            if kind == stat.S_IFREG:
                content = self._file(old, new, info)
            self._first[key] = (new, content)
        if kind == stat.S_IFDIR:
            os.mkdir(new, 0o700)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(old), new)
        elif kind != stat.S_IFREG:
            # Sockets and pipes have no content; a device node other than a deletion cannot be made inside.
            os.mknod(new, info.st_mode, info.st_rdev)
        if (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(new, info.st_uid, info.st_gid, follow_symlinks=False)
        for name, value in _attributes(old, info):
            os.setxattr(new, name, value, follow_symlinks=False)
        if kind not in (stat.S_IFLNK, stat.S_IFDIR):
            os.chmod(new, stat.S_IMODE(info.st_mode))
        if kind != stat.S_IFDIR:
            os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
        return content

    def _file(self, old: str, new: str, info: os.stat_result) -> str:
        """Data only where there is data: a hole stays a hole."""
        content = hashlib.sha256()
        with _opened(old), open(old, "rb", buffering=0) as reader, open(new, "xb", buffering=0) as writer:
            os.ftruncate(writer.fileno(), info.st_size)
            for start, end in extents(reader.fileno(), info.st_size):
                offset = start
                while offset < end and (data := os.pread(reader.fileno(), min(CHUNK_BYTES, end - offset), offset)):
                    written = os.pwrite(writer.fileno(), data, offset)
                    _add_extent(content, offset, data[:written])
                    offset += written
                    self.size_bytes += written
        return content.hexdigest()


def _content_digest(path: str) -> str:
    content = hashlib.sha256()
    with _opened(path), open(path, "rb", buffering=0) as reader:
        for start, end in extents(reader.fileno(), os.fstat(reader.fileno()).st_size):
            offset = start
            while offset < end and (data := os.pread(reader.fileno(), min(CHUNK_BYTES, end - offset), offset)):
                _add_extent(content, offset, data)
                offset += len(data)
    return content.hexdigest()


def _add_extent(content: "hashlib._Hash", offset: int, data: bytes) -> None:
    # By blocks with their place, blocks of zeros left out: file systems disagree on where a hole begins.
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096].rstrip(b"\0")
        if block:
            content.update(b"%d:%d:" % (offset + start, len(block)))
            content.update(block)


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the data of a file, its holes left out."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, offset


def _add(total: "hashlib._Hash", relative: str, info: os.stat_result, content: str, path: str) -> None:
    link = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    attributes = [(name, value.hex()) for name, value in _attributes(path, info)]
    record = (relative, info.st_mode, info.st_uid, info.st_gid, info.st_rdev, size, info.st_mtime_ns, link, content, attributes)
    total.update(repr(record).encode("utf-8", "surrogateescape"))


def _attributes(path: str, info: os.stat_result) -> list[tuple[str, bytes]]:
    if stat.S_ISLNK(info.st_mode):
        return []
    with contextlib.suppress(PermissionError):
        names = os.listxattr(path, follow_symlinks=False)
        kept = [name for name in sorted(names) if not name.endswith(IGNORED_ATTRIBUTES)]
        return [(name, os.getxattr(path, name, follow_symlinks=False)) for name in kept]
    return []


@contextlib.contextmanager
def _opened(path: str) -> Iterator[None]:
    """An owner other than root may have closed his own file or directory to himself (mode 000): opened while it is read."""
    info = os.lstat(path)
    needed = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(info.st_mode) else 0)
    if os.geteuid() == 0 or info.st_mode & needed == needed:
        yield
        return
    os.chmod(path, stat.S_IMODE(info.st_mode) | needed)
    try:
        yield
    finally:
        os.chmod(path, stat.S_IMODE(info.st_mode))
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
