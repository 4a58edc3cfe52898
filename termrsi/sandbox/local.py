"""The `local` backend: Linux namespaces, overlayfs and cgroups, no daemon. See `init.py` for what runs inside.

The writable layer is a tmpfs of `disk_mb` inside the sandbox's own mount namespace: it is bounded, fast, and gone with the
last process, however that ends. It counts as memory: the memory group allows `memory_mb + disk_mb`. A snapshot copies it to
`state_dir` as one more read-only layer, which any number of restored sandboxes share.
"""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from termrsi import watched
from termrsi.errors import ConfigError, SandboxError, SandboxSpoiled
from termrsi.records import Snapshot
from termrsi.sandbox import cgroups, files, host, layers, tree
from termrsi.sandbox.base import Base
from termrsi.sandbox.fd_wire import FdWire
from termrsi.sandbox.image import Image
from termrsi.sandbox.launcher import Control, shared
from termrsi.sandbox.options import ENVIRONMENT, Options
from termrsi.sandbox.shell import Shell

GET_BYTES = 4 << 30  # a `get` may take so much at least: what an image holds may be more than its sandbox may write
CLOSE_S = 5.0
KILLED_S = 60.0  # a killed process ends within this, or the machine is broken
LOG = logging.getLogger(__name__)
_REFERENCES: dict[tuple[object, ...], dict[str, str]] = {}  # by all that makes a tree: the first sandbox of an image looks
CANNOT = {  # what another backend can, and this one cannot
    "running processes": "a snapshot holds files and the shell's state: its processes are named, and lost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions(Options):
    """What a local sandbox is made from, and its limits. With `network` it has the host's, not isolated."""

    image: Image | None = None
    state_dir: Path | str | None = None  # None: $XDG_RUNTIME_DIR/termrsi, or /tmp/termrsi-<uid>
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # not super(): a dataclass with slots is a class made twice
        if self.image is not None and self.snapshot is not None:
            raise ConfigError("image and snapshot are both given", "sandbox.local", "a snapshot brings its image's layers")


class LocalSandbox(Base[LocalOptions]):
    """Implements `ports.Sandbox`."""

    def __init__(self, options: LocalOptions, *, trusted_digest: bool = False) -> None:
        super().__init__(options)
        self._trusted = trusted_digest  # a fork of a snapshot that this process made a moment ago
        self._state_dir = layers.state_dir(options.state_dir)
        self._layers: list[Path] = []
        self._root = ""
        self._env: dict[str, str] = {}
        self._workdir = ""
        self._groups: list[Path] = []
        self._control: Control | None = None
        self._root_fd = self._upper_fd = self._process_fd = -1
        self._restored_state = b""
        self._reference: dict[str, str] = {}  # of the watched files, as the image has them

    async def snapshot(self) -> Snapshot:
        """Ends the agent's processes (named in `lost_processes`), copies the writable layer, and starts a fresh shell.

        The fresh shell has the old one's state. Raises SandboxError.
        """
        shell = self._live_shell()
        state = await shell.dump()
        names = (await self._ask("list"))["processes"]
        assert isinstance(names, list)
        await self.kill_all()
        snapshot_id = layers.label(self._options.owner)
        try:
            saved = tuple(str(name) for name in names)
            snapshot = await self._jobs.run(lambda: self._save(snapshot_id, state, saved), undo=self._discard)
        except (OSError, SandboxError) as error:
            await asyncio.to_thread(layers.discard, self._state_dir, snapshot_id)
            raise self._failed("snapshot failed", error) from error
        try:
            await shell.restart(state)
        except BaseException:
            await asyncio.to_thread(self._discard, snapshot)
            raise
        return snapshot

    async def put(self, source: Path | str, target: str) -> None:
        """See `ports.Sandbox`. Raises SandboxError with the system's reason."""
        self._live_control()
        self._live_shell().check()
        try:
            await self._jobs.run(lambda: files.put(self._root_fd, Path(source), target))
        except OSError as error:
            raise self._failed(f"put {source} -> {target}", error) from error

    async def get(self, source: str, target: Path | str) -> None:
        """See `ports.Sandbox`. Pipes, sockets and devices are left out. Raises SandboxError with the system's reason."""
        self._live_control()
        self._live_shell().check()
        try:
            largest = max(self._options.disk_mb << 20, GET_BYTES)
            await self._jobs.run(lambda: files.get(self._root_fd, source, Path(target), largest_bytes=largest))
        except OSError as error:
            raise self._failed(f"get {source} -> {target}", error) from error

    async def replaced(self) -> list[str]:
        """See `ports.Sandbox`: by the kernel's own record of each file, read from outside."""
        self._live_control()
        found = await self._jobs.run(lambda: files.signatures(self._root_fd))
        return watched.differing(self._reference, found)

    async def _close(self) -> None:
        """Waits for process 1, and with it for every other process and mount of the sandbox."""
        if self._control is not None:
            if self._process_fd < 0:  # cancelled while it was being built: its process must be known to be seen to end
                with contextlib.suppress(SandboxError, TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        self._root_fd, self._upper_fd, self._process_fd = await self._control.ready()
            self._control.close()
        for fd in (self._root_fd, self._upper_fd):
            if fd >= 0:
                os.close(fd)
        self._root_fd = self._upper_fd = -1
        if self._process_fd >= 0:
            await _ended(self._process_fd)
            os.close(self._process_fd)
            self._process_fd = -1
        await cgroups.dissolve(self._groups)
        await asyncio.to_thread(layers.release, self._state_dir, self._layers, self._id)

    async def copy_layer(self, target: Path) -> None:
        """Copies the writable layer to the new directory `target`, for an image. No process may run. Raises OSError."""
        target.parent.mkdir(parents=True)
        await self._jobs.run(lambda: tree.copy(f"/proc/self/fd/{self._upper_fd}", str(target)))

    async def _start_bash(self, argv: list[str], cwd: str, numbers: list[int], fds: list[int]) -> None:
        await self._ask("shell", fds, argv=argv, env=self._env, cwd=cwd, numbers=numbers)

    async def kill_since(self, last_pid: int, tick: int, give_up_s: float, signal: int = 0) -> bool:
        """For `shell.Shell`."""
        if signal:
            await self._ask("signal", signal=signal)
        # Without a last pid (a kernel that does not tell it) the tick decides alone.
        reply = await self._ask("kill_since", last=last_pid or 1 << 30, tick=tick, give_up_s=give_up_s)
        return bool(reply["gone"])

    async def kill_all(self) -> int:
        """For `shell.Shell`. Raises SandboxError if a process would not die."""
        reply = await self._ask("kill_all")
        if not reply["gone"]:
            raise SandboxError("a process could not be ended", self._id)
        return int(str(reply["killed"]))

    async def _start(self) -> None:
        options = self._options
        base = await self._jobs.run(self._prepare)
        request = {
            "id": self._id,
            "base": str(layers.mount_point(self._state_dir)),
            "parts": [
                {"name": part.name, "target": part.target, "lowers": [*self._above(part.name), *part.lowers]}
                for part in (host.unpacked(base, self._root) if self._root else host.parts(base))
            ],
            "overlay_options": "" if os.geteuid() == 0 else ",userxattr",
            "cgroups": [str(group) for group in self._groups],
            "limited": sorted(cgroups.limited(self._groups)),
            "disk_mb": options.disk_mb,
            "memory_mb": options.memory_mb,
            "pids": options.pids,
            "network": options.network,
        }
        self._control = Control(shared.launch(request))
        self._root_fd, self._upper_fd, self._process_fd = await self._control.ready()
        if options.snapshot is None:
            key = (base, self._root, *self._layers, *host.changed())
            if key not in _REFERENCES:
                _REFERENCES[key] = await self._jobs.run(lambda: files.signatures(self._root_fd))
            self._reference = _REFERENCES[key]
        if options.snapshot is None or options.workdir:  # else it was made, and what became of it is the snapshot's
            await self._jobs.run(lambda: os.close(files.make_dirs(self._root_fd, self._workdir)))
        self._shell = Shell(self, FdWire(self._start_bash), self._workdir, options.output_limit_bytes)
        self._control.on_exit = self._shell.ended
        self._control.on_lost = self._lose
        await self._shell.start(self._restored_state)

    def _lose(self) -> None:
        """Process 1 has ended. It is spared where memory is short, but what it asks of the kernel may be refused: then it was the
        agent's doing."""
        limits = cgroups.exceeded(self._groups)
        self._live_shell().lose(f"process 1 has ended{'; out of memory' if 'memory' in limits else ''}", spoiled="memory" in limits)

    def _prepare(self) -> Path:
        """What needs the disk: the base tree, the layers with a reference to each, the groups."""
        options = self._options
        base = layers.base(self._state_dir)
        image_env: Mapping[str, str] = {}
        workdir = "/app"
        if options.snapshot is not None:
            saved = layers.restore(self._state_dir, options.snapshot, self._id, verify=not self._trusted)
            self._layers, image_env, workdir, self._restored_state = saved.layers, saved.env, saved.workdir, saved.state
            self._reference, self._root = saved.reference, saved.root
        elif options.image is not None:
            self._layers = [Path(layer) for layer in options.image.layers]
            for layer in self._layers:
                if not layer.is_dir():
                    raise SandboxError(f"a layer of the image is gone: {layer}", self._id)
            image_env, workdir, self._root = options.image.env, options.image.workdir or workdir, options.image.root
        self._env = ENVIRONMENT | dict(image_env) | dict(options.env)
        self._groups = cgroups.create(self._id, memory_mb=options.memory_mb + options.disk_mb, pids=options.pids, cpus=options.cpus)
        self._workdir = options.workdir or workdir
        return base

    def _above(self, name: str) -> list[str]:
        return [str(layer / name) for layer in self._layers if (layer / name).is_dir()]

    def _save(self, snapshot_id: str, state: bytes, lost: tuple[str, ...]) -> Snapshot:
        return layers.save(
            self._state_dir,
            snapshot_id,
            upper=f"/proc/self/fd/{self._upper_fd}",
            below=self._layers,
            env=self._env,
            workdir=self._workdir,
            state=state,
            lost=lost,
            reference=self._reference,
            root=self._root,
        )

    def _restored(self, snapshot: Snapshot) -> "LocalSandbox":
        return LocalSandbox(dataclasses.replace(self._options, image=None, snapshot=snapshot), trusted_digest=True)

    def _discard(self, snapshot: Snapshot) -> None:
        layers.discard(self._state_dir, snapshot.id)

    async def _ask(self, op: str, fds: Sequence[int] = (), **arguments: object) -> dict[str, object]:
        """Of process 1. Raises SandboxError, or SandboxSpoiled if process 1 has ended by what runs in the sandbox."""
        control = self._live_control()
        try:
            return await control.request(op, fds, **arguments)
        except SandboxError:
            if self._shell is not None:
                self._shell.check()
            raise

    def _failed(self, what: str, error: OSError | SandboxError) -> SandboxError:
        """The agent's doing if its disk is full, for the writable layer is the sandbox's alone, or its tree too deep to be read."""
        agents = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EFBIG)
        return (SandboxSpoiled if agents else SandboxError)(f"{what}: {error}", self._id)

    def _live_control(self) -> Control:
        if self._control is None or self._closed or self._control.lost:
            if self._shell is not None and not self._closed:
                self._shell.check()  # it knows why
            raise SandboxError("lost, closed or not started", self._id)
        return self._control


async def _ended(process_fd: int) -> None:
    """Waits for the end of a process; the kernel makes its descriptor readable once its whole namespace is gone."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.add_reader(process_fd, lambda: done.done() or done.set_result(None))
    try:
        # asyncio.wait leaves the future as it is when the time is over; a time-out around it would cancel it for the next wait.
        for limit_s in (CLOSE_S, KILLED_S):
            if (await asyncio.wait([done], timeout=limit_s))[0]:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process_fd, signal.SIGKILL)
        raise SandboxError(f"process 1 has not ended {KILLED_S:.0f} s after its SIGKILL", "sandbox.local")
    finally:
        loop.remove_reader(process_fd)


def discard(snapshot: Snapshot, state_dir: Path | str | None = None) -> None:
    """Frees what a snapshot holds; layers that others still use stay."""
    layers.discard(layers.state_dir(state_dir), snapshot.id)


def reap(
    owner: str | None = None,
    state_dir: Path | str | None = None,
    *,
    snapshots: bool = False,
    keep: Collection[str] = frozenset(),
) -> list[str]:
    """Removes what dead processes of `owner` (None: of any) left; names of what was removed.

    Processes and mounts end with their owner by themselves; what is left are groups, references and half-made
    directories. Snapshots are a run's data, and kept for its resumption unless `snapshots` is set; those of the ids `keep` are
    kept then, too.
    """
    removed = []
    for parent in cgroups.parents():
        for group in sorted(parent.glob("*-*-*-*")) if parent.is_dir() else []:
            if layers.is_left_over(group.name, owner) and cgroups.end([group]):
                removed.append(str(group))
    return removed + layers.reap(layers.state_dir(state_dir), owner, snapshots=snapshots, keep=keep)
