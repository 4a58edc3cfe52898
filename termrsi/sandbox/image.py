"""A task's image from its Dockerfile: one cached layer over the host's programs.

`FROM` means an unpacked root file system, if there is one of that name below `CACHE/rootfs` (`root_of`), and else the host as a
sandbox sees it (`host.py`): its /usr, /etc, /opt, and a fresh rest. The host is a base image only in so far as it has the programs
the task wants; a build that misses one fails with the RUN that missed it. What is not in the subset of `dockerfile.py` is refused
by file and line. Commands of an agent run as root, whatever USER says last.

A build has the network only if asked for: it is the host's own, and what listens on the host's loopback (Ray's dashboard, which
runs what it is told) is then in reach of a task's author.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from termrsi.errors import SandboxError, TaskError
from termrsi.records import EnvironmentSpec
from termrsi.sandbox import dockerfile, layers, tree
from termrsi.sandbox.dockerfile import Instruction

if TYPE_CHECKING:
    from termrsi.sandbox.local import LocalSandbox

FORMAT = 3
SCRATCH = "tmp-"
OUTPUT_CHARS = 2000
# Images that hold a distribution's programs, or a Python beside them: what the host has too.
STAND_IN = re.compile(r"^(?:docker\.io/)?(?:library/)?(?P<kind>debian|ubuntu|python|buildpack-deps)(?::[\w.-]+)?$")
# The Python of images is nobody's but theirs; a distribution's refuses packages of others.
ON_THE_HOST = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
WITH_PASSWORD = re.compile(rb"://[^/\s]+@")


@dataclass(frozen=True, slots=True)
class Image:
    """Layers top first (directories that are never written again), and how a shell starts on them."""

    layers: tuple[str, ...] = ()
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    digest: str = ""
    root: str = ""  # an unpacked root file system below the layers; "": the host's programs


async def build(
    environment: EnvironmentSpec, cache_dir: Path | str, *, state_dir: Path | str | None = None, network: bool = False
) -> Image:
    """The image of a task, from the cache if it was built before. Without a Dockerfile: its `docker_image`'s root, or the host's
    where that is a distribution and no more.

    Builds of one image at the same time, in this process or another, wait for the first. Raises TaskError for what the
    Dockerfile asks (file:line), SandboxError if the machine could not build.
    """
    context = Path(environment.context)
    path = context / "Dockerfile"
    if not environment.context or not path.is_file():
        root = root_of(environment.docker_image or "", cache_dir)
        if environment.docker_image and not root and STAND_IN.match(environment.docker_image):
            context = _stand_in(environment.docker_image, cache_dir)
            return await build(replace(environment, context=str(context)), cache_dir, state_dir=state_dir)
        if environment.docker_image and not root:
            raise TaskError(
                f"needs the image {environment.docker_image}, which the local backend cannot fetch",
                environment.context,
                f"sandbox.backend=docker can; or unpack it to {root_place(environment.docker_image, cache_dir)}",
            )
        return Image(workdir=environment.workdir or "", root=root)
    steps = dockerfile.parse(path)
    root = root_of(_base_of(steps), cache_dir)
    key = await asyncio.to_thread(key_of, path, context, root, network=network)
    home = Path(cache_dir).absolute() / "images" / key
    if not (home / "image.json").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        lock = await _lock(home.with_suffix(".lock"))
        try:
            if not (home / "image.json").exists():
                async with asyncio.timeout(environment.build_timeout_s):
                    await _build(steps, context, home, state_dir, root, network=network)
        except TimeoutError as error:
            raise TaskError(f"build took longer than {environment.build_timeout_s:.0f} s", str(path)) from error
        finally:
            os.close(lock)
    saved = json.loads((home / "image.json").read_text())
    chain = tuple(str(home / layer) for layer in saved["layers"])
    return Image(chain, saved["workdir"], saved["env"], saved["user"], key, root)


def _stand_in(name: str, cache_dir: Path | str) -> Path:
    """A build context that means no more than an image of that name."""
    place = Path(cache_dir).absolute() / "stand-ins" / name.replace("/", "%").replace(":", "%")
    if not (place / "Dockerfile").is_file():
        place.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{layers.label('build')}")  # outside of the context, which others may read at this moment
        draft.write_text(f"FROM {name}\n")
        draft.rename(place / "Dockerfile")
    return place


def root_place(name: str, cache_dir: Path | str) -> Path:
    """Where the root file system of an image is looked for: `/` and `:` of its name are `%`."""
    return Path(cache_dir).absolute() / "rootfs" / name.replace("/", "%").replace(":", "%")


def root_of(name: str, cache_dir: Path | str) -> str:
    """An unpacked root file system, "" if there is none: made by debootstrap, or `docker export | tar -x`."""
    place = root_place(name, cache_dir)
    return str(place) if name and (place / "bin").exists() else ""


def _base_of(steps: list[Instruction]) -> str:
    """What FROM names, its arguments filled in."""
    args: dict[str, str] = {}
    for step in steps:
        if step.name == "FROM":
            return dockerfile.expand(step.words[0], args)
        for word in step.words:
            name, _, value = word.partition("=")
            args[name] = dockerfile.expand(value, args)
    return ""


async def _lock(path: Path) -> int:
    """Held until its descriptor is closed, or its process ends; keeps out others of this process as well.

    Waits in a thread of its own: the shared ones are few, and the build that is waited for needs them.
    """
    loop = asyncio.get_running_loop()
    locked: asyncio.Future[int] = loop.create_future()

    def deliver(fd: int) -> None:
        if locked.done():  # the waiter was cancelled
            os.close(fd)
        else:
            locked.set_result(fd)

    def fail(error: OSError) -> None:
        if not locked.done():
            locked.set_exception(SandboxError(f"the image lock: {error}", str(path)))

    def wait() -> None:
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            loop.call_soon_threadsafe(deliver, fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(fail, error)
        except RuntimeError:  # the loop has been closed meanwhile
            os.close(fd)

    threading.Thread(target=wait, name="image-lock", daemon=True).start()
    try:
        return await locked
    except asyncio.CancelledError:
        if locked.done() and not locked.cancelled() and locked.exception() is None:  # delivered in the moment of the cancellation
            os.close(locked.result())
        raise


def key_of(path: Path, context: Path, root: str = "", *, network: bool = False) -> str:
    """Of the Dockerfile, every file of its context with its mode, the base, the network, the user and this format."""
    base = (root, Path(root).stat().st_ctime_ns) if root else ""
    total = hashlib.sha256(repr((FORMAT, os.geteuid(), base, network)).encode())
    for file in [path, *_context_files(context)]:
        relative = file.relative_to(context).as_posix()
        info = file.lstat()
        total.update(repr((relative, info.st_mode)).encode())
        if file.is_symlink():
            total.update(os.fsencode(file.readlink()))
        elif file.is_file():
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def _context_files(context: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(context):
        names.sort()
        yield from (Path(directory, name) for name in sorted([*names, *files]))


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    scratch = home.parent / f"{SCRATCH}{layers.label('build')}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        tree.remove(scratch)


def reap(cache_dir: Path | str) -> list[str]:
    """Removes what builds of dead processes left half-made."""
    removed = []
    for path in sorted((Path(cache_dir) / "images").glob(f"{SCRATCH}*")):
        if layers.is_left_over(path.name.removeprefix(SCRATCH), "build"):
            tree.remove(path)
            removed.append(str(path))
    return removed


async def _build(
    steps: list[Instruction], context: Path, home: Path, state_dir: Path | str | None, root: str, *, network: bool
) -> None:
    # Imported here: `local` needs `Image` for its options.
    from termrsi.sandbox.local import LocalOptions, LocalSandbox

    options = LocalOptions(
        image=Image(root=root),
        state_dir=state_dir,
        workdir="/",
        owner="build",
        pids=1024,
        memory_mb=2048,
        disk_mb=4096,
        network=network,
        env={} if root else ON_THE_HOST,
    )
    sandbox = LocalSandbox(options)
    await sandbox.start()
    try:
        base = STAND_IN.match(_base_of(steps))
        if base and base["kind"] == "python" and not root:  # a distribution's is called python3 alone
            await sandbox.run("[ -e /usr/bin/python ] || [ -e /usr/local/bin/python ] || ln -s python3 /usr/bin/python")
        if network and not root:
            await _give_sources(sandbox)
        state = _Build(sandbox, context, network=network)
        for step in steps:
            await state.step(step)
        if not state.workdir_made:
            await state.make_workdir()
        await sandbox.kill_processes()
        with _scratch(home) as scratch:
            await sandbox.copy_layer(scratch / "new" / "layer")
            saved = {"layers": ["layer"], "workdir": state.workdir, "env": state.env, "user": state.user}
            (scratch / "new" / "image.json").write_text(json.dumps(saved))
            (scratch / "new").rename(home)
    finally:
        await sandbox.close()


async def _give_sources(sandbox: "LocalSandbox") -> None:
    """The host's list of package sources, which a sandbox does not see: but for those with a password."""
    for file in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))):
        with contextlib.suppress(OSError):  # one that this user may not read
            if file.suffix in (".list", ".sources") and file.is_file() and not WITH_PASSWORD.search(file.read_bytes()):
                await sandbox.put(file, str(file))


class _Build:
    """Where a build stands: directory, variables, and the sandbox that holds the tree."""

    def __init__(self, sandbox: "LocalSandbox", context: Path, *, network: bool) -> None:
        self._sandbox = sandbox
        self._network = network
        self._context = context
        self.workdir = "/"
        self.workdir_made = True
        self.env: dict[str, str] = {}
        self.user = "root"
        self._shell = ["/bin/sh", "-c"]
        self._args: dict[str, str] = {}

    async def step(self, step: Instruction) -> None:
        match step.name:
            case "WORKDIR":
                self.workdir = str(PurePosixPath(self.workdir, self._expand(step.rest.strip("\"'"))))
                await self.make_workdir()
            case "ENV":
                known = self._args | self.env
                self.env |= {name: dockerfile.expand(value, known) for name, value in dockerfile.pairs(step).items()}
            case "ARG":
                for word in step.words:
                    name, _, value = word.partition("=")
                    self._args[name] = self._expand(value)
            case "COPY" | "ADD":
                await self._copy(step)
            case "RUN":
                await self._run(step)
            case "USER":
                self.user = self._expand(step.rest).partition(":")[0]
            case "SHELL":
                self._shell = list(step.words)
            case _:  # FROM, and what only matters to a container engine
                pass

    async def make_workdir(self) -> None:
        await self._checked(f"mkdir -p -- {shlex.quote(self.workdir)}")

    def _expand(self, text: str) -> str:
        return dockerfile.expand(text, self._args | self.env)

    async def _run(self, step: Instruction) -> None:
        command = step.rest
        if len(step.heredocs) == 1 and command.startswith("<<") and " " not in command:
            command = step.heredocs[0].body  # a script that is all of it
            if command.startswith("#!"):
                await self._write("/.termrsi-run", command, 0o755)
                command = "/.termrsi-run"
        else:
            command += "".join(f"\n{heredoc.body}{heredoc.name}" for heredoc in step.heredocs)
        argv = [*self._shell, command]
        if command.startswith("["):
            with contextlib.suppress(ValueError):  # a shell command that begins with a test
                argv = [str(word) for word in json.loads(command)]
        if self.user not in ("root", "0"):
            argv = [*await self._as_user(step), *argv]
        variables = [f"{name}={value}" for name, value in (self._args | self.env).items()]
        result = await self._sandbox.run(f"cd {shlex.quote(self.workdir)} && {shlex.join(['env', '--', *variables, *argv])}")
        await self._checked("rm -f /.termrsi-run")
        if result.exit_code != 0:
            output = result.output[-OUTPUT_CHARS:].strip()
            cure = "" if self._network else "if it is the network that it misses: sandbox.build_network=host"
            raise TaskError(f"RUN failed with exit code {result.exit_code}: {command}\n{output}", step.where, cure)

    async def _copy(self, step: Instruction) -> None:
        words = [self._expand(word) for word in step.words]
        if len(words) < 2:
            raise TaskError(f"{step.name} needs a source and a destination", step.where)
        if step.heredocs:
            await self._write_heredocs(step, words)
            return
        sources = [source for word in words[:-1] for source in self._sources(step, word)]
        into_directory = words[-1].endswith("/") or words[-1] in (".", "..") or len(sources) > 1
        target = PurePosixPath(self.workdir, words[-1])
        mode = step.flags.get("chmod")
        for source in sources:
            if step.name == "ADD" and source.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")):
                await self._unpack(step, source, target)
                continue
            into = target / source.name if into_directory and source.is_file() else target
            try:
                await self._sandbox.put(source, str(into))
            except SandboxError as error:
                raise TaskError(f"{step.name} {source.name}: {error}", step.where) from error
            if mode is not None:
                await self._checked(f"chmod -R {mode} -- {shlex.quote(str(into))}")

    async def _as_user(self, step: Instruction) -> list[str]:
        """What a command of USER begins with: its own numbers and home."""
        if not re.fullmatch(r"[\w.-]+", self.user):
            raise TaskError(f"USER {self.user} is not a name", step.where)
        if self.user.isdigit():  # it need not be in /etc/passwd
            return ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--"]
        result = await self._sandbox.run(f"id -g {self.user} && echo ~{self.user}")
        if result.exit_code != 0:
            raise TaskError(f"USER {self.user}: there is no such user", step.where, "RUN useradd comes first")
        group, home = result.output.split("\n")[:2]
        return [
            "setpriv",
            f"--reuid={self.user}",
            f"--regid={group}",
            "--init-groups",
            "--",
            "env",
            f"HOME={home}",
            f"USER={self.user}",
        ]

    async def _write_heredocs(self, step: Instruction, words: list[str]) -> None:
        """`COPY <<NAME ... TARGET`: a file of that text, or files of their names in a directory."""
        if len(words) != len(step.heredocs) + 1:
            raise TaskError(f"{step.name} of heredocs and files at once is not supported", step.where)
        target = PurePosixPath(self.workdir, words[-1])
        mode = int(step.flags.get("chmod", "644"), 8)
        for heredoc in step.heredocs:
            text = heredoc.body if heredoc.literal else self._expand(heredoc.body)
            into = target / heredoc.name if words[-1].endswith("/") or len(step.heredocs) > 1 else target
            await self._write(str(into), text, mode)

    async def _write(self, target: str, text: str, mode: int) -> None:
        with tempfile.TemporaryDirectory(prefix=f"termrsi-build-{os.getpid()}-") as folder:
            source = Path(folder, "file")
            source.write_text(text)
            source.chmod(mode)
            await self._sandbox.put(source, target)

    async def _unpack(self, step: Instruction, source: Path, target: PurePosixPath) -> None:
        await self._sandbox.put(source, "/.termrsi-add")
        into = shlex.quote(str(target))
        result = await self._sandbox.run(f"mkdir -p -- {into} && tar -xf /.termrsi-add -C {into}")
        await self._checked("rm -f /.termrsi-add")
        if result.exit_code != 0:
            raise TaskError(f"ADD {source.name}: {result.output[-OUTPUT_CHARS:].strip()}", step.where)

    def _sources(self, step: Instruction, pattern: str) -> list[Path]:
        """Files of the context. Raises TaskError for none, and for a way out of the context."""
        relative = pattern.lstrip("/") or "."
        root = self._context.resolve()
        found = sorted(self._context.glob(relative)) if any(c in relative for c in "*?[") else [self._context / relative]
        found = [path for path in found if path.exists() or path.is_symlink()]
        for path in found or [self._context / relative]:
            if not path.resolve().is_relative_to(root):
                raise TaskError(f"{step.name} {pattern}: outside of the context", step.where)
        if not found:
            raise TaskError(f"{step.name} {pattern}: no such file in the context", step.where)
        return found

    async def _checked(self, command: str) -> None:
        result = await self._sandbox.run(command)
        if result.exit_code != 0:
            raise SandboxError(f"{command}: {result.output.strip()}", "sandbox.image")
