"""The `docker` backend: containers of a Docker Engine through docker-py, one attached stream per sandbox for its shell.

Process 1 waits; the agent's shell is another one, so that its end does not end the container. Processes are ended from
inside by a script of bash built-ins, and counted from outside by the engine: where the two differ the container is restarted.

What this backend cannot do, and `local` can, stands in `CANNOT`.
"""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import socket
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from termrsi import watched
from termrsi.errors import ConfigError, SandboxError, TaskError
from termrsi.records import Snapshot
from termrsi.sandbox import compose, files, layers
from termrsi.sandbox.base import Base
from termrsi.sandbox.docker_engine import (
    CALL_S,
    HOST_LABEL,
    LABEL,
    REPLACED_LABEL,
    STATE_LABEL,
    client,
    discard,
    forget,
    inspect,
    send_archive,
    told,
)
from termrsi.sandbox.docker_engine import (
    build as engine_build,
)
from termrsi.sandbox.image import key_of as image_key
from termrsi.sandbox.init import listening
from termrsi.sandbox.options import ENVIRONMENT, Options
from termrsi.sandbox.script import SCRIPT_FD
from termrsi.sandbox.shell import Shell
from termrsi.sandbox.stream_wire import READ_BYTES, StreamWire

if TYPE_CHECKING:
    import requests

T = TypeVar("T")
SNAPSHOTS = "termrsi-snapshot"
DEFAULT_IMAGE = "debian:bookworm-slim"  # of a task that names none
ADDED = 1  # of a path in the difference to its image
DROPPED = ["NET_RAW", "MKNOD", "SYS_CHROOT"]
ULIMITS = {"nofile": 4096, "core": 0}
BUILD_S = 900.0
CANNOT = {
    "running processes": "a committed image holds files: the processes of a snapshot are named, and lost",
    "disk limit": "Docker limits a container's writable layer only on XFS with project quotas",
    "holes": "the engine's archives carry a sparse file in full: `get` refuses one that is larger than the disk allowed",
    "hidden process 1": "process 1 runs as the container's root, and has nothing of ours",
    "end with its owner": "a killed owner's containers are removed by the next `reap`",
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
class DockerOptions(Options):
    """What a container is made from, and its limits. `disk_mb` bounds what `get` takes: see CANNOT. With `network` it has the
    engine's default one. `engine`: "" is the environment's."""

    image: str = ""
    engine: str = ""
    main_image: str = ""  # with `compose`: of the agent's service, where the file names none
    compose: str = ""  # a task's compose file: its other services run beside; its main one, if a snapshot is given, from that

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # not super(): a dataclass with slots is a class made twice
        if bool(self.image) == (self.snapshot is not None) and not (self.compose and not self.image):
            raise ConfigError("needs an image or a snapshot, not both", "sandbox.docker", "image=NAME or snapshot=...")


def services(options: DockerOptions) -> tuple[dict[str, Any], str]:
    """A task's compose file as it is run, with its images built, and its main service. Raises TaskError, SandboxError."""
    file = Path(options.compose)
    if not compose.program():
        raise TaskError("the task has a compose file, and there is no compose program", str(file), "install the compose plug-in")
    variables = {"CPUS": str(options.cpus or 1), "MEMORY": f"{options.memory_mb}M", "CONTEXT_DIR": str(file.parent)}
    variables |= {"MAIN_IMAGE_NAME": options.main_image, "PREBUILT_IMAGE_NAME": options.main_image}

    def build(context: Path, name: str) -> str:
        return engine_build(context, name, image_key(context / name, context), BUILD_S, options.engine)

    variables |= {"TEST_DIR": "/tests"} | dict(options.env)
    return compose.read(file, variables, build, network=options.network, image=options.main_image, limits=_limits(options))


def _limits(options: DockerOptions) -> dict[str, object]:
    """Of each service, as compose calls them: the same as `_create_alone` says."""
    return {
        "mem_limit": f"{options.memory_mb}m",
        "memswap_limit": f"{options.memory_mb}m",
        "pids_limit": options.pids,
        "cap_drop": DROPPED,
        "security_opt": ["no-new-privileges"],
        "ulimits": dict(ULIMITS),
        **({"cpus": options.cpus} if options.cpus is not None else {}),
    }


class DockerSandbox(Base[DockerOptions]):
    """Implements `ports.Sandbox`."""

    def __init__(self, options: DockerOptions) -> None:
        super().__init__(options)
        self._api: Any = None  # Any: docker-py is not typed
        self._state = b""
        self._before: list[str] = []  # watched paths that differ from the first image, in a restored one
        self._project: compose.Project | None = None

    async def snapshot(self) -> Snapshot:
        """Names the agent's processes with the container frozen, commits it, ends them, and starts a fresh shell.

        The shell's state travels in a label of the image. Raises SandboxError.
        """
        shell = self._live_shell()
        state = await shell.dump()
        snapshot_id = layers.label(self._options.owner)
        snapshot = await self._call(lambda: self._commit(snapshot_id, state), undo=self._discard)
        try:
            await self.kill_all()
            await shell.restart(state)
        except BaseException:
            await asyncio.to_thread(self._discard, snapshot)
            raise
        return snapshot

    async def put(self, source: Path | str, target: str) -> None:
        """See `ports.Sandbox`. Raises SandboxError with the engine's reason."""
        self._live_shell().check()
        await self._call(lambda: self._put(Path(source), PurePosixPath("/", target)))

    async def get(self, source: str, target: Path | str) -> None:
        """See `ports.Sandbox`. Pipes, sockets and devices are left out. Raises SandboxError with the engine's reason."""
        self._live_shell().check()
        await self._call(lambda: self._get(source, Path(target)))

    async def replaced(self) -> list[str]:
        """See `ports.Sandbox`: what the engine says differs from the image, and what a snapshot says did so before it."""
        self._live_shell()
        return sorted(await self._call(self._replaced))

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

    async def _start(self) -> None:
        self._api = await asyncio.to_thread(client, self._options.engine)
        workdir = await self._call(self._create)
        self._shell = Shell(self, StreamWire(self._attach), workdir, self._options.output_limit_bytes)
        await self._shell.start(self._state)

    async def _close(self) -> None:
        if self._api is not None:
            await asyncio.to_thread(self._remove)

    def _restored(self, snapshot: Snapshot) -> "DockerSandbox":
        return DockerSandbox(dataclasses.replace(self._options, image="", snapshot=snapshot))

    def _discard(self, snapshot: Snapshot) -> None:
        discard(snapshot, self._options.engine)

    def _remove(self) -> None:
        from docker.errors import NotFound

        with told(self._id), contextlib.suppress(NotFound):
            self._api.remove_container(self._id, force=True, v=True)
        if self._project is not None:
            self._project.down()
        if self._options.snapshot is not None:
            forget(self._api, self._options.snapshot.digest)

    async def _call(self, function: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """A call to the engine, in a thread; its errors as SandboxError. `undo`: of what it gives to a caller that has gone."""

        def call() -> T:
            with told(self._id):
                return function()

        return await self._jobs.run(call, undo)

    def _create(self) -> str:
        """Makes and starts the container; the directory in which its shell begins."""
        options, api = self._options, self._api
        image, content, main = options.image, {}, ""
        if options.compose:
            content, main = services(options)
            image = content["services"][main]["image"]
        if options.snapshot is not None:
            image = options.snapshot.digest
            try:
                config = inspect(api, image)["Config"]
            except TaskError as error:
                raise SandboxError("the snapshot is gone", options.snapshot.id) from error
            labels = config.get("Labels") or {}
            if options.snapshot.backend != "docker" or STATE_LABEL not in labels:
                raise SandboxError("is not a snapshot of this backend", options.snapshot.id)
            self._state = base64.b64decode(labels[STATE_LABEL])
            self._before = json.loads(labels[REPLACED_LABEL])
        else:
            config = inspect(api, image)["Config"]
        given = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
        said = content["services"][main].get("working_dir") if options.compose else None
        workdir = options.workdir or said or config.get("WorkingDir") or "/app"
        env = ENVIRONMENT | given | dict(options.env)
        labels = {LABEL: self._id, HOST_LABEL: socket.gethostname(), STATE_LABEL: "", REPLACED_LABEL: ""}
        if options.compose:
            self._project = compose.Project(self._id.lower().replace(".", "_"), options.engine, labels)
            content["services"][main] |= self._main_service(content["services"][main], image, env, workdir)
            self._project.up(content, options.start_timeout_s)
        else:
            self._create_alone(image, env, workdir, labels)
        if options.snapshot is None:
            send_archive(api, self._id, [(f"logs/{name}", None) for name in ("agent", "verifier", "artifacts")], mode=0o777)
        return workdir

    def _create_alone(self, image: str, env: dict[str, str], workdir: str, labels: dict[str, str]) -> None:
        options, api = self._options, self._api
        limits: dict[str, object] = {"nano_cpus": int(options.cpus * 1e9)} if options.cpus is not None else {}
        api.create_container(
            image,
            command=[],
            entrypoint=["/bin/bash", "-c", KEEPER],
            name=self._id,
            hostname="sandbox",
            user="0",
            environment=env,
            working_dir=workdir,
            labels=labels,
            host_config=api.create_host_config(
                mem_limit=f"{options.memory_mb}m",
                memswap_limit=f"{options.memory_mb}m",
                pids_limit=options.pids,
                network_mode="default" if options.network else "none",
                cap_drop=DROPPED,
                security_opt=["no-new-privileges"],
                ulimits=[{"Name": name, "Soft": value, "Hard": value} for name, value in ULIMITS.items()],
                **limits,
            ),
        )
        api.start(self._id)

    def _main_service(self, given: dict[str, Any], image: str, env: dict[str, str], workdir: str) -> dict[str, Any]:
        """What compose is told of the agent's own service beside what the file says."""
        own = given.get("environment") or {}
        if isinstance(own, list):
            own = {name: value for name, _, value in (str(entry).partition("=") for entry in own)}
        return {
            "image": image,
            "command": [],
            "entrypoint": ["/bin/bash", "-c", KEEPER],
            "container_name": self._id,
            "hostname": "sandbox",
            "user": "0",
            "environment": env | {str(name): str(value) for name, value in own.items()} | dict(self._options.env),
            "working_dir": workdir,
        }

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
        """Command lines, and ports, of all processes but process 1, as the engine's host sees them."""
        rows = self._api.top(self._id, ps_args="-eo pid,args")["Processes"] or []
        first = str(self._api.inspect_container(self._id)["State"]["Pid"])
        return [row[1] + _listening(int(row[0]), row[1]) for row in rows if row[0] != first]

    def _replaced(self) -> set[str]:
        entries = {entry["Path"]: entry["Kind"] for entry in self._api.diff(self._id) or []}
        # A link in place of a directory, or another one in place of a link, stands for all that is found through it.
        found = {name for name in watched.DIRECTORIES if name in entries and self._link(name)}
        for path, kind in entries.items():
            target = self._link(path) if kind == ADDED and watched.watched(path) else ""
            if watched.watched(path) and not (target and target not in entries):  # a new name for a file of the image
                found.add(path)
        return found | set(self._before)

    def _commit(self, snapshot_id: str, state: bytes) -> Snapshot:
        api = self._api
        api.pause(self._id)
        try:
            names = self._processes()
            labels = {
                STATE_LABEL: base64.b64encode(state).decode(),
                REPLACED_LABEL: json.dumps(sorted(self._replaced())),
                LABEL: snapshot_id,
                HOST_LABEL: socket.gethostname(),
            }
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
        send_archive(self._api, self._id, entries)

    def _link(self, path: str) -> str:
        """What a link leads to, "" for anything else."""
        with contextlib.closing(self._archive("HEAD", path)) as response:
            return "" if response.status_code == 404 else _stat_of(response)["linkTarget"]

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


def _listening(pid: int, line: str) -> str:
    """Ports are seen where the engine is this host's, and we may look into its processes."""
    with contextlib.suppress(OSError):
        if " ".join(Path("/proc", str(pid), "cmdline").read_text().split("\0")).strip() == line.strip():
            return listening(pid)
    return ""


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
            with contextlib.suppress(SandboxError), told(self._exec_id):
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
