"""runsc's calls on one running sandbox: a command in it, files in and out, each within a time. They block their thread."""

import contextlib
import errno
import os
import shutil
import signal
import struct
import subprocess
import tarfile
import tempfile
import threading
from pathlib import Path, PurePosixPath
from typing import IO, Any

from termrsi import watched
from termrsi.errors import SandboxError, SandboxSpoiled
from termrsi.sandbox import files, keeper

PT_INTERP = 3
CONTAINER = (
    "sandbox"  # the same for all: a restored process goes on to belong to the one it was saved in. runsc's directory differs.
)
CALL_S = 30.0  # a gVisor that lost one of its own processes may never answer
COPY_S = 300.0  # for as much as a disk holds
# $1 target, $2 the source's name, or nothing for a directory's contents; the archive on standard input.
PUT = r"""set -e
if [ -z "$2" ]; then mkdir -p -- "$1"; exec tar -xf - -C "$1"; fi
if [ -d "$1" ]; then into=$1 name=$2; else into=$(dirname -- "$1") name=$(basename -- "$1"); mkdir -p -- "$into"; fi
new=$into/.termrsi-$$; mkdir -- "$new"
tar -xf - -C "$new"; mv -f -- "$new/$2" "$into/$name"; rmdir -- "$new" """
# Paths on standard input, and every name that the patterns in the arguments match.
SIGNATURES = r"""{ cat; for place; do for path in $place; do echo "$path"; done; done; } | while IFS= read -r path; do
  case $path in */ls | */stat) [ "$(readlink -f "$path")" != /.termrsi/busybox ] || continue ;; esac
  [ ! -e "$path" ] || echo "$path"
done | tr '\n' '\0' | xargs -0 -r /.termrsi/busybox stat -L -c '%n	%s %Y %Z %f'"""
# $1 a file or a directory, links followed; the archive on standard output.
GET = r"""if [ -d "$1" ]; then exec tar -cf - -C "$1" .; fi
if [ -f "$1" ]; then exec tar -chf - -C "$(dirname -- "$1")" "./$(basename -- "$1")"; fi
echo "not a file or a directory: $1" >&2; exit 3"""


class Runsc:
    """`home`: the sandbox's directory on the host; `name`: the sandbox's; `pid`: of the process that has its namespaces."""

    def __init__(self, home: Path, platform: str, name: str) -> None:
        self._home = home
        self._platform = platform
        self._name = name
        self.pid: int | None = None

    def program(self) -> list[str]:
        flags = [f"--root={self._home / 'root'}", f"--platform={self._platform}", "--network=none"]
        return ["runsc", *flags, "--overlay2=root:memory", "--host-fifo=open", "--ignore-cgroups"]

    def _inside(self, *arguments: str) -> list[str]:
        """runsc in the sandbox's own namespaces."""
        if self.pid is None:
            raise SandboxError("not started", self._name)
        spaces = Path("/proc", str(self.pid), "ns")
        names = {"mount": "mnt", "pid": "pid_for_children", "net": "net"}
        return ["nsenter", *(f"--{kind}={spaces / name}" for kind, name in names.items()), *self.program(), *arguments]

    def call(self, *arguments: str) -> str:
        return self._called(self._inside(*arguments), f"runsc {arguments[0]}", CALL_S).stdout

    def _called(
        self, argv: list[str], what: str, limit_s: float, given: IO[bytes] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`given` on its standard input. Raises SandboxError if it fails, or does not end in time."""
        with contextlib.ExitStack() as stack:
            # Of its own (`nsenter` forks), so that all of it can be ended.
            program = stack.enter_context(
                subprocess.Popen(
                    argv,
                    stdin=given or stack.enter_context(self.nothing()),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            try:
                said, complained = program.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired as error:
                _end_group(program)
                raise SandboxError(f"{what}: took longer than {limit_s:.0f} s", self._name) from error
        if program.returncode != 0:
            raise SandboxError(f"{what}: {complained[-1000:].strip() or program.returncode}", self._name)
        return subprocess.CompletedProcess(argv, program.returncode, said, complained)

    def nothing(self) -> IO[bytes]:
        """An empty file to read from. runsc gives its standard input to another user: it must not be the host's /dev/null."""
        return (self._home / "nothing").open("rb")

    def _exec(self, script: str, *arguments: str) -> list[str]:
        return self._inside("exec", CONTAINER, keeper.BUSYBOX, "sh", "-c", script, "termrsi", *arguments)

    def signatures(self) -> dict[str, str]:
        """As `files.signatures`."""
        places = (*(f"{place}/*" for place in watched.REPORTED_IN), *(f"{place}/*.pth" for place in watched.PATH_FILES_IN))
        argv = self._inside("exec", CONTAINER, keeper.BUSYBOX, "sh", "-c", SIGNATURES, "termrsi", *places)
        with tempfile.TemporaryFile() as names:
            names.write("\n".join((*watched.RELIED_ON, *watched.REPORTED, "")).encode())
            names.seek(0)
            said = self._called(argv, "look at the watched files", CALL_S, names)
        return dict(line.split("\t", 1) for line in said.stdout.splitlines() if "\t" in line)

    def put(self, source: Path, target: str) -> None:
        if not source.exists():
            raise SandboxError(f"no such file: {source}", self._name)
        name = "" if source.is_dir() else source.name
        paths = sorted(source.rglob("*")) if source.is_dir() else [source]
        with tempfile.TemporaryFile() as spool:
            files.pack([(name or str(path.relative_to(source)), path) for path in paths], spool)
            spool.seek(0)
            self._called(self._exec(PUT, target, name), f"put {source} -> {target}", COPY_S, spool)

    def get(self, source: str, target: Path, largest_bytes: int) -> None:
        with tempfile.TemporaryFile() as said, self.nothing() as nothing:
            argv = self._exec(GET, source)
            program = subprocess.Popen(argv, stdin=nothing, stdout=subprocess.PIPE, stderr=said, start_new_session=True)
            assert program.stdout is not None
            error: Exception | None = None
            timer = threading.Timer(COPY_S, _end_group, (program,))  # its output ends then
            timer.start()
            try:
                with tarfile.open(fileobj=program.stdout, mode="r|") as archive:
                    first = archive.next()
                    whole = first is not None and first.isdir()
                    if whole:
                        target.mkdir(parents=True, exist_ok=True)
                    elif target.is_dir():
                        target = target / PurePosixPath(source).name
                    if first is not None:
                        files.unpack(archive, target, largest_bytes=largest_bytes, strip=0)
            except (tarfile.TarError, OSError) as caught:
                error = caught
            finally:
                timer.cancel()
                program.stdout.close()
                if error is not None:
                    _end_group(program)
                code = program.wait()
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
        if error is not None or code != 0:
            too_deep = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
            raise (SandboxSpoiled if too_deep else SandboxError)(f"get {source}: {error or text}", self._name) from error


def _end_group(program: "subprocess.Popen[Any]") -> None:
    """Of a program that leads a session. Waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def link_busybox(target: Path) -> None:
    """The host's static BusyBox, by another name where that can be, or a copy. Raises SandboxError if there is none."""
    found = shutil.which("busybox")
    if found is None or not is_static(Path(found)):
        raise SandboxError("no static busybox is installed", "sandbox.gvisor", "apt-get install busybox-static")
    try:
        os.link(found, target)
    except OSError:
        shutil.copy2(found, target)


def is_static(program: Path) -> bool:
    """Whether an ELF program needs no loader, and so none of a sandbox's libraries."""
    data = program.read_bytes()
    if data[:4] != b"\x7fELF" or data[4] != 2:
        return False
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    return all(struct.unpack_from("<I", data, table + number * size)[0] != PT_INTERP for number in range(count))
