"""The `docker` backend: containers of a Docker Engine through docker-py, one attached stream per sandbox for its shell.

Process 1 waits; the agent's shell is another one, so that its end does not end the container. Processes are ended from
inside by a script of bash built-ins, and counted from outside by the engine: where the two differ the container is restarted.

What this backend cannot do, and `local` can, stands in `CANNOT`.
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import io
import json
import logging
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from termrsi.errors import ConfigError, SandboxError, TaskError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, Snapshot
from termrsi.sandbox import files, layers
from termrsi.sandbox.script import SCRIPT_FD
from termrsi.sandbox.shell import Shell
from termrsi.sandbox.stream_wire import READ_BYTES, StreamWire

if TYPE_CHECKING:
    import docker
    import requests

T = TypeVar("T")
LOG = logging.getLogger(__name__)
LABEL, HOST_LABEL, STATE_LABEL, BUILD_LABEL = "termrsi.sandbox", "termrsi.host", "termrsi.state", "termrsi.image"
SNAPSHOTS = "termrsi-snapshot"
DEFAULT_IMAGE = "debian:bookworm-slim"  # of a task that names none
CALL_S = 120
PARALLEL_CALLS = 64
CANNOT = {
    "disk limit": "Docker limits a container's writable layer only on XFS with project quotas",
    "holes": "the engine's archives carry a sparse file in full: `get` refuses one that is larger than the disk allowed",
    "hidden process 1": "process 1 runs as the container's root, and has nothing of ours",
    "end with its owner": "a killed owner's containers are removed by the next `reap`",
}
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "DEBIAN_FRONTEND": "noninteractive",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}
# Waits for ever, deaf to what an agent may send it. While it ignores their end, the kernel itself collects the children it is
# given.
KEEPER = "trap '' CHLD HUP INT TERM USR1 USR2; exec tail -f /dev/null"
# $1 the shell (0: end it too), $2 the last process that is spared, $3 seconds. Built-ins only.
KILL = r"""set -f; shopt -u extglob; end=$((SECONDS + $3))
while :; do
  left=0
  set +f; set -- "$1" "$2" "$3" /proc/[0-9]*; set -f
  for entry in "${@:4}"; do
    pid=${entry#/proc/}
    [[ $pid = 1 || $pid = "$1" || $pid = $$ ]] && continue
    IFS= read -r line 2>/dev/null <$entry/stat || continue
    fields=(${line##*) })
    [[ ${fields[0]} = [ZX] ]] && continue
    ((pid > $2)) || continue
    kill -KILL $pid 2>/dev/null && left=1
  done
  ((left)) || exit 0
  ((SECONDS > end)) && exit 1
done"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """What a container is made from, and its limits. `owner` labels it, for `reap`. `engine`: "" is the environment's."""

    image: str = ""
    snapshot: Snapshot | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None  # where the shell starts; the image's, or /app, if None
    memory_mb: int = 2048
    pids: int = 256
    cpus: float | None = None
    disk_mb: int = 1024  # bounds what `get` takes; see CANNOT
    network: bool = False  # True: the engine's default network
    output_limit_bytes: int = 1 << 20
    owner: str = "none"
    start_timeout_s: float = 60.0
    engine: str = ""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "pids", "disk_mb", "output_limit_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", "sandbox.docker", "must be at least 1")
        if self.cpus is not None and self.cpus < 0.01:
            raise ConfigError(f"cpus is {self.cpus}", "sandbox.docker", "must be at least 0.01, or None for no limit")
        if bool(self.image) == (self.snapshot is not None):
            raise ConfigError("needs an image or a snapshot, not both", "sandbox.docker", "image=NAME or snapshot=...")
        if not self.owner or not all(c.isalnum() or c in "_.-" for c in self.owner):
            raise ConfigError(f"owner is {self.owner!r}", "sandbox.docker", "letters, digits, `_`, `.` and `-`")


@functools.lru_cache(maxsize=4)
def client(engine: str = "") -> "docker.APIClient":
    """One connection pool per process and engine. Raises SandboxError if the engine does not answer."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise SandboxError("docker-py is not installed", "sandbox.docker", "pip install 'termrsi[docker]'") from error
    try:
        from docker.utils import kwargs_from_env

        options: dict[str, Any] = {"base_url": engine} if engine else dict(kwargs_from_env())  # Any: docker-py is not typed
        api = docker.APIClient(**options, version="auto", timeout=CALL_S, max_pool_size=PARALLEL_CALLS)
        api.ping()
    except DockerException as error:
        raise SandboxError(
            f"no Docker Engine answers: {error}", engine or "DOCKER_HOST", "start dockerd, or set DOCKER_HOST"
        ) from error
    return api


class DockerSandbox:
    """Implements `ports.Sandbox`. Lives in the event loop that started it."""

    def __init__(self, options: DockerOptions) -> None:
        self._options = options
        self._id = layers.label(options.owner)
        self._api: Any = None  # Any: docker-py is not typed
        self._shell: Shell | None = None
        self._state = b""
        self._threads: set[asyncio.Future[Any]] = set()  # Any: only waited for
        self._closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        """Ready for `run` on return. Raises SandboxError, after giving back what it had."""
        if self._closed or self._api is not None:
            raise SandboxError("started twice, or after close", self._id)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                self._api = await asyncio.to_thread(client, self._options.engine)
                workdir = await self._call(self._create)
                self._shell = Shell(self, StreamWire(self._attach), workdir, self._options.output_limit_bytes)
                await self._shell.start(self._state)
        except TimeoutError as error:
            await self.close()
            raise SandboxError(f"could not start within {self._options.start_timeout_s:.0f} s", self._id) from error
        except BaseException:
            await self.close()
            raise

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """See `ports.Sandbox`. A command whose caller is cancelled makes the sandbox lost: close it."""
        return await self._live_shell().run(command, timeout_s)

    async def snapshot(self) -> Snapshot:
        """Names the agent's processes with the container frozen, commits it, ends them, and starts a fresh shell.

        The shell's state travels in a label of the image. Raises SandboxError.
        """
        shell = self._live_shell()
        state = await shell.dump()
        snapshot_id = layers.label(self._options.owner)
        snapshot = await self._call(lambda: self._commit(snapshot_id, state))
        await self.kill_all()
        await shell.restart(state)
        return snapshot

    async def fork(self, n: int) -> list[Sandbox]:
        """n started copies of the present state; running processes are not in them. Raises SandboxError, leaving none."""
        snapshot = await self.snapshot()
        options = dataclasses.replace(self._options, image="", snapshot=snapshot)
        copies = [DockerSandbox(options) for _ in range(n)]
        try:
            results = await asyncio.gather(*(copy.start() for copy in copies), return_exceptions=True)
        finally:
            # The copies hold the image; its name goes now, the rest of it with the last of them.
            await asyncio.to_thread(discard, snapshot, self._options.engine)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(copy.close() for copy in copies))
            raise errors[0]
        return list(copies)

    async def put(self, source: Path | str, target: str) -> None:
        """See `ports.Sandbox`. Raises SandboxError with the engine's reason."""
        self._live_shell()
        await self._call(lambda: self._put(Path(source), PurePosixPath("/", target)))

    async def get(self, source: str, target: Path | str) -> None:
        """See `ports.Sandbox`. Pipes, sockets and devices are left out. Raises SandboxError with the engine's reason."""
        self._live_shell()
        await self._call(lambda: self._get(source, Path(target)))

    async def kill_processes(self) -> int:
        """See `ports.Sandbox`."""
        shell = self._live_shell()
        count = await self.kill_all()
        await shell.restart()
        return count

    async def close(self) -> None:
        """Removes the container; whoever calls it waits for the same end."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def kill_since(self, last_pid: int, tick: int, give_up_s: float, signal: int = 0) -> bool:
        """For `shell.Shell`. By number alone: the engine's clock may be another's than ours."""
        shell, script = str(self._live_shell().pid), f"kill -{signal} $1\n{KILL}" if signal else KILL
        with contextlib.suppress(SandboxError):  # no process can be begun in it: `kill_all` knows a way
            status, _ = await self._exec(script, shell, str(last_pid), str(int(give_up_s) + 1))
            return status == 0
        return False

    async def kill_all(self) -> int:
        """For `shell.Shell`. Raises SandboxError if a process would not die."""
        others = await self._call(self._processes)
        with contextlib.suppress(SandboxError):
            status, _ = await self._exec(KILL, "0", "1", "5")
            if status == 0 and not await self._call(self._processes):
                return max(len(others) - 1, 0)  # the shell is not counted
        # The bash inside cannot be begun, could not do it, or is the agent's own: the engine ends all, files stay.
        await self._call(lambda: self._api.restart(self._id, timeout=0))
        if await self._call(self._processes):
            raise SandboxError("a process could not be ended", self._id)
        return max(len(others) - 1, 0)

    async def _close(self) -> None:
        if self._shell is not None:
            self._shell.close()
        await asyncio.gather(*self._threads, return_exceptions=True)
        if self._api is not None:
            await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        from docker.errors import NotFound

        with _told(self._id), contextlib.suppress(NotFound):
            self._api.remove_container(self._id, force=True, v=True)
        if self._options.snapshot is not None:
            forget(self._api, self._options.snapshot.digest)

    def _live_shell(self) -> Shell:
        if self._shell is None or self._closed:
            raise SandboxError("lost, closed or not started", self._id)
        return self._shell

    async def _call(self, function: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """A call to the engine, in a thread; its errors as SandboxError. `undo`: of what it gives to a caller that has gone."""

        def told() -> T:
            with _told(self._id):
                return function()

        # Known to `close` until the thread has done, also after a cancellation: it may make a container still.
        job = asyncio.ensure_future(asyncio.to_thread(told))
        self._threads.add(job)
        job.add_done_callback(self._threads.discard)

        def left_behind(done: asyncio.Future[T]) -> None:
            if not done.cancelled() and done.exception() is None:
                undo(done.result())

        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(left_behind)
            raise

    def _create(self) -> str:
        """Makes and starts the container; the directory in which its shell begins."""
        options, api = self._options, self._api
        image = options.image
        if options.snapshot is not None:
            image = options.snapshot.digest
            config = inspect(api, image)["Config"]
            labels = config.get("Labels") or {}
            if options.snapshot.backend != "docker" or STATE_LABEL not in labels:
                raise SandboxError("is not a snapshot of this backend", options.snapshot.id)
            self._state = base64.b64decode(labels[STATE_LABEL])
        else:
            config = inspect(api, image)["Config"]
        given = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
        workdir = options.workdir or config.get("WorkingDir") or "/app"
        limits: dict[str, object] = {"nano_cpus": int(options.cpus * 1e9)} if options.cpus is not None else {}
        api.create_container(
            image,
            command=[],
            entrypoint=["/bin/bash", "-c", KEEPER],
            name=self._id,
            hostname="sandbox",
            user="0",
            environment=ENVIRONMENT | given | dict(options.env),
            working_dir=workdir,
            labels={LABEL: self._id, HOST_LABEL: socket.gethostname(), STATE_LABEL: ""},
            host_config=api.create_host_config(
                mem_limit=f"{options.memory_mb}m",
                memswap_limit=f"{options.memory_mb}m",
                pids_limit=options.pids,
                network_mode="default" if options.network else "none",
                cap_drop=["NET_RAW", "MKNOD", "SYS_CHROOT"],
                security_opt=["no-new-privileges"],
                ulimits=[{"Name": "nofile", "Soft": 4096, "Hard": 4096}, {"Name": "core", "Soft": 0, "Hard": 0}],
                **limits,
            ),
        )
        api.start(self._id)
        if options.snapshot is None:
            _send_archive(api, self._id, [(f"logs/{name}", None) for name in ("agent", "verifier", "artifacts")], mode=0o777)
        return workdir

    async def _attach(self, argv: list[str], cwd: str) -> "_Stream":
        def attach() -> _Stream:
            made = self._api.exec_create(self._id, argv, stdin=True, workdir=cwd, user="0")["Id"]
            return _Stream(self._api, made, self._api.exec_start(made, socket=True))

        return await self._call(attach, undo=_Stream.close)

    async def _exec(self, script: str, *arguments: str) -> tuple[int, str]:
        """Runs a script of built-ins with the container's bash; its exit code and output."""

        def run() -> tuple[int, str]:
            argv = ["/bin/bash", "--norc", "--noprofile", "-c", script, "termrsi", *arguments]
            made = self._api.exec_create(self._id, argv, user="0")["Id"]
            output = self._api.exec_start(made)
            code = self._api.exec_inspect(made)["ExitCode"]
            return code if code is not None else 1, output.decode(errors="replace").strip()

        return await self._call(run)

    def _processes(self) -> list[str]:
        """Command lines of all processes but process 1, as the engine's host sees them."""
        rows = self._api.top(self._id, ps_args="-eo pid,args")["Processes"] or []
        first = str(self._api.inspect_container(self._id)["State"]["Pid"])
        return [row[1] for row in rows if row[0] != first]

    def _commit(self, snapshot_id: str, state: bytes) -> Snapshot:
        api = self._api
        api.pause(self._id)
        try:
            names = self._processes()
            labels = {STATE_LABEL: base64.b64encode(state).decode(), LABEL: snapshot_id, HOST_LABEL: socket.gethostname()}
            tag = snapshot_id.lower()
            image = api.commit(self._id, repository=SNAPSHOTS, tag=tag, pause=False, conf={"Labels": labels})["Id"]
        finally:
            api.unpause(self._id)
        lost = tuple(name for name in names if not name.endswith(f" /dev/fd/{SCRIPT_FD}"))  # the shell itself goes on
        return Snapshot(snapshot_id, "docker", f"{SNAPSHOTS}:{tag}", image, lost, inspect(api, image)["Size"])

    def _put(self, source: Path, target: PurePosixPath) -> None:
        kind = self._kind(str(target))
        entries: list[tuple[str, Path | None]] = []
        if source.is_dir():
            if kind != "directory":
                entries.append((str(target), None))
            entries += [(str(target / path.relative_to(source)), path) for path in sorted(source.rglob("*"))]
        elif source.exists():
            entries.append((str(target / source.name if kind == "directory" else target), source))
        else:
            raise SandboxError(f"no such file: {source}", self._id)
        _send_archive(self._api, self._id, entries)

    def _kind(self, path: str) -> str:
        """What stands at a path inside, links followed: "directory", "file", or "" for nothing."""
        for _ in range(2):
            with contextlib.closing(self._archive("HEAD", path)) as response:
                if response.status_code == 404:
                    return ""
                info = _stat_of(response)
            if not info["linkTarget"]:
                return "directory" if info["mode"] & 1 << 31 else "file"
            path = info["linkTarget"]
        return "file"

    def _get(self, source: str, target: Path) -> None:
        with contextlib.closing(self._archive("HEAD", source)) as response:
            source = _stat_of(response)["linkTarget"] or source
        with contextlib.closing(self._archive("GET", source)) as response:
            chunks = response.iter_content(READ_BYTES)
            with tarfile.open(fileobj=_Reader(chunks), mode="r|") as archive:
                if _stat_of(response)["mode"] & 1 << 31:
                    target.mkdir(parents=True, exist_ok=True)
                elif target.is_dir():
                    target = target / PurePosixPath(source).name
                files.unpack(archive, target, largest_bytes=self._options.disk_mb << 20)

    def _archive(self, method: str, path: str) -> "requests.Response":
        """To be closed. docker-py's own `get_archive` cannot be: what is not read to its end keeps its connection."""
        api = self._api
        url = f"{api.base_url}/v{api.api_version}/containers/{self._id}/archive"
        return api.request(method, url, params={"path": path}, stream=True, timeout=CALL_S)


def _stat_of(response: "requests.Response") -> dict[str, Any]:
    """What the engine says of a path. Raises SandboxError if there is none."""
    said = response.headers.get("x-docker-container-path-stat")
    if said is None:
        raise SandboxError(f"not there: {response.text.strip() or response.reason}", response.url)
    return json.loads(base64.b64decode(said))


class _Stream:
    """Implements `stream_wire.Stream` over an attached exec: frames of eight bytes' header and a payload."""

    def __init__(self, api: Any, exec_id: str, raw: Any) -> None:  # Any: docker-py is not typed
        self._api = api
        self._exec_id = exec_id
        self._raw = raw  # kept: it holds the connection's response
        self._sock: socket.socket = getattr(raw, "_sock", raw)
        self._sock.setblocking(False)
        self._header = b""
        self._left = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def read(self) -> bytes | None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if not data:
            return b""
        payload = bytearray()
        while data:
            if self._left:
                payload += data[: self._left]
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
                continue
            need = 8 - len(self._header)
            self._header += data[:need]
            data = data[need:]
            if len(self._header) == 8:
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""
        return bytes(payload) or None

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def status(self) -> int:
        """The exec's; 137 if the engine cannot say, as for a container that is gone."""

        def ask() -> int:
            with contextlib.suppress(SandboxError), _told(self._exec_id):
                code = self._api.exec_inspect(self._exec_id)["ExitCode"]
                return 137 if code is None else int(code)
            return 137

        return await asyncio.to_thread(ask)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._raw.close()
        with contextlib.suppress(OSError):
            self._sock.close()


class _Reader(io.RawIOBase):
    """A file to read from an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # Any: a writable buffer, which typing names only from 3.12 on
        while not self._rest:
            try:
                self._rest = next(self._chunks)
            except StopIteration:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """The engine's and the connection's errors as SandboxError."""
    import requests
    from docker.errors import DockerException, NotFound

    try:
        yield
    except NotFound as error:
        raise SandboxError(f"not there: {error.explanation or error}", where) from error
    except (DockerException, requests.RequestException, tarfile.TarError, OSError) as error:
        raise SandboxError(f"{type(error).__name__}: {getattr(error, 'explanation', None) or error}", where) from error


def inspect(api: Any, image: str) -> dict[str, Any]:
    """What the engine knows of an image. Raises SandboxError if it has none of that name."""
    from docker.errors import ImageNotFound

    try:
        return api.inspect_image(image)
    except ImageNotFound as error:
        raise SandboxError("no such image", image, "docker pull it, or build it first") from error


def _send_archive(api: Any, container: str, entries: list[tuple[str, Path | None]], mode: int = 0o755) -> None:
    """Files, links and directories (None: a new one) by their paths inside, owner root. The engine makes missing parents."""
    with tempfile.SpooledTemporaryFile(max_size=1 << 24) as spool:
        with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
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
        spool.seek(0)
        api.put_archive(container, "/", spool)


def forget(api: Any, image: str) -> None:
    """Removes a snapshot's image once it has no name and no container."""
    from docker.errors import APIError

    with contextlib.suppress(SandboxError, APIError):  # in use, or gone: another is the last
        if not inspect(api, image)["RepoTags"]:
            api.remove_image(image)


def discard(snapshot: Snapshot, engine: str = "") -> None:
    """Frees what a snapshot holds; containers made from it live on. A second time does nothing."""
    from docker.errors import ImageNotFound

    with _told(snapshot.id), contextlib.suppress(ImageNotFound):
        client(engine).remove_image(snapshot.handle, force=True)


def reap(owner: str | None = None, engine: str = "", *, snapshots: bool = False) -> list[str]:
    """Removes containers of dead processes of `owner` (None: of any) on this host, and, if asked, their snapshots."""
    api = client(engine)
    removed = []
    here = {"label": [LABEL, f"{HOST_LABEL}={socket.gethostname()}"]}
    with _told("reap"):
        for container in api.containers(all=True, filters=here):
            if layers.is_left_over(container["Labels"][LABEL], owner):
                api.remove_container(container["Id"], force=True, v=True)
                removed.append(f"container {container['Labels'][LABEL]}")
        for image in api.images(filters=here) if snapshots else []:
            if layers.is_left_over(image["Labels"][LABEL], owner):
                api.remove_image(image["Id"], force=True)
                removed.append(f"image {image['Labels'][LABEL]}")
    return removed


def build(context: Path, dockerfile: str, key: str, timeout_s: float, engine: str = "") -> str:
    """The image of a Dockerfile, built once per content `key`. Raises TaskError with the engine's words, SandboxError."""
    from docker.errors import ImageNotFound

    api = client(engine)
    name = f"termrsi-image:{key[:32]}"
    with _told(str(context)):
        try:
            api.inspect_image(name)
            return name
        except ImageNotFound:
            pass
        said, error = [], ""
        for line in api.build(
            path=str(context), dockerfile=dockerfile, tag=name, rm=True, forcerm=True, decode=True, timeout=int(timeout_s),
            labels={BUILD_LABEL: key},
        ):  # fmt: skip
            said.append(str(line.get("stream", "")))
            error = str(line.get("error", error))  # the stream is read to its end: only then is its connection given back
        if error:
            raise TaskError(f"{error.strip()} {''.join(said)[-1000:].strip()}", str(context / dockerfile))
    return name
