"""The `gvisor` backend: runsc with checkpoint and restore of the whole sandbox, running processes included.

The tree is the one of the `local` backend (the host's programs under an image's layers), mounted in a mount namespace of its own;
what the sandbox writes stays in its memory (`--overlay2=root:memory`) and so travels in its checkpoint. All of it runs in a process
namespace whose first process is ended with its owner. See `keeper.py` for process 1 inside.

What this backend cannot do, and `local` can, stands in `CANNOT`.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from termrsi import watched
from termrsi.errors import ConfigError, SandboxError, SandboxSpoiled
from termrsi.records import Snapshot
from termrsi.sandbox import cgroups, host, keeper, layers, tree
from termrsi.sandbox.base import Base
from termrsi.sandbox.image import Image
from termrsi.sandbox.keeper import Keeper, ShellStream
from termrsi.sandbox.options import ENVIRONMENT, Options
from termrsi.sandbox.runsc import CONTAINER, Runsc, link_busybox
from termrsi.sandbox.script import Places
from termrsi.sandbox.shell import Shell, Standing
from termrsi.sandbox.stream_wire import StreamWire

OVERHEAD_MB = 256  # gVisor's own, beside what the sandbox's processes use
# On the host, a process of the sandbox is one and a thread for each of gVisor's own threads that ever ran it; under load those of
# dead ones linger. A limit that a busy script could reach would end the whole sandbox.
HOST_PIDS, HOST_PIDS_PER_PROCESS = 1024, 16
END_SEEN_S = 1.0  # between the end of runsc's process as a call sees it, and as its owner does
KILL_S = 5.0  # what was killed is gone within this, or will not go
CLOSE_S = 60.0  # a killed namespace ends within this, or the machine is broken
CANNOT = {
    "disk limit": "what is written is kept in memory, and bounded with it",
    "life at its limits": "gVisor itself bounds neither memory nor processes: the kernel ends what exceeds them, the whole sandbox",
    "read-only switches": "what stands in its /proc/sys and /sys is gVisor's own, and may be written: no file of the host",
    "unkillable process 1": "gVisor lets a root process send SIGKILL to process 1: it is lost, as by a fault of the machine",
    "filter of calls": "user namespaces, keys and what is spared for want of memory are gVisor's own: none is of the host's kernel",
    "holes": "files leave as an archive, in full: `get` refuses one that is larger than the disk allowed",
    "hidden process 1": "process 1 is a root process of the sandbox, and has nothing of ours but its pipes",
    "coreutils' ls and stat": "gVisor of 2022 refuses a flag of theirs: where it does, BusyBox's stand in their place",
    "keys that signal": "a terminal of gVisor of 2022 sends no signal for C-c: a program that ignores the letter runs on",
    "work of an ordinary user": "runsc needs root",
}
PLACES = Places(f"{keeper.PLACE}/command", "/dev/shm/.termrsi-state", f"{keeper.PLACE}/library")
CAPABILITIES = [
    f"CAP_{name}"
    for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "SETFCAP")
]
# $1 where the tree goes, then "directory source" of its parts; after "--" the program that becomes the namespace's process 1. All
# is read-only to gVisor too: what is meant to be written lies in its memory. (A pipe may be written to all the same; were the
# mount read-only inside, gVisor would not allow it.)
MOUNTS = r"""set -e
for group in $TERMRSI_GROUPS; do echo 0 >"$group/cgroup.procs"; done
top=$1; shift
while [ "$1" != -- ]; do
  case $2 in
  lowerdir=*) mount -t overlay -o "ro,$2" termrsi "$top$1" ;;
  *) mount --bind "$2" "$top$1"; mount -o remount,bind,ro "$top$1" ;;
  esac
  shift 2
done
shift
exec "$@" """


T = TypeVar("T")

_REFERENCES: dict[tuple[object, ...], dict[str, str]] = {}  # by all that makes a tree: the first sandbox of an image looks


@dataclass(frozen=True, slots=True, kw_only=True)
class GvisorOptions(Options):
    """What a gVisor sandbox is made from, and its limits. It has no network: a checkpoint could not keep the host's."""

    image: Image | None = None
    state_dir: Path | str | None = None
    platform: str = "ptrace"  # of runsc: ptrace runs everywhere, kvm where /dev/kvm is

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # not super(): a dataclass with slots is a class made twice
        if self.network:
            raise ConfigError("has no network", "sandbox.gvisor", "network=False; the local and docker backends can have one")
        if self.image is not None and self.snapshot is not None:
            raise ConfigError("image and snapshot are both given", "sandbox.gvisor", "a snapshot brings its image's layers")


class GvisorSandbox(Base[GvisorOptions]):
    """Implements `ports.Sandbox`. Lives in the thread, too, that started it."""

    def __init__(self, options: GvisorOptions, *, trusted_digest: bool = False) -> None:
        super().__init__(options)
        self._trusted = trusted_digest  # a fork of a checkpoint that this process made a moment ago
        self._state = layers.state_dir(options.state_dir) / "gvisor"
        self._home = self._state / "live" / self._id
        self._runsc = Runsc(self._home, options.platform, self._id)
        self._generation = 0  # of the namespace: each checkpoint ends one
        self._reference: dict[str, str] = {}  # of the watched files, as the image has them
        self._saved: dict[str, object] = {}  # the manifest of the next checkpoint, but for the shell
        self._layers: list[Path] = []
        self._root = ""
        self._groups: list[Path] = []
        self._keeper: Keeper | None = None
        self._stream: ShellStream | None = None
        self._namespace: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def snapshot(self) -> Snapshot:
        """Everything between two commands: files, shell, running processes. This sandbox goes on from its own checkpoint.

        Raises SandboxError; one that comes after the checkpoint makes the sandbox lost.
        """
        shell = self._live_shell()
        snapshot_id = layers.label(self._options.owner)
        directory = self._state / "snapshots" / snapshot_id
        directory.mkdir(parents=True)
        try:
            async with shell.paused() as standing:
                self._generation += 1  # that this one ends is no loss
                try:
                    await self._jobs.run(lambda: self._runsc.call("checkpoint", "--image-path", str(directory), CONTAINER))
                    await self._ended()
                    snapshot = await self._jobs.run(lambda: self._save(snapshot_id, directory, standing))
                    await self._boot(directory)
                except BaseException as error:
                    shell.lose(f"snapshot failed: {error or type(error).__name__}")
                    raise
        except BaseException as error:
            await self._jobs.ended()  # what runsc still writes there comes first
            await asyncio.to_thread(tree.remove, directory)
            if isinstance(error, OSError):
                raise SandboxError(f"snapshot failed: {error}", self._id) from error
            raise
        return snapshot

    async def put(self, source: Path | str, target: str) -> None:
        """See `ports.Sandbox`. Raises SandboxError with the system's reason."""
        self._live_shell().check()
        await self._done(lambda: self._runsc.put(Path(source), str(PurePosixPath("/", target))))

    async def get(self, source: str, target: Path | str) -> None:
        """See `ports.Sandbox`. Pipes, sockets and devices are left out. Raises SandboxError with the system's reason."""
        self._live_shell().check()
        await self._done(lambda: self._runsc.get(source, Path(target), self._options.disk_mb << 20))

    async def replaced(self) -> list[str]:
        """See `ports.Sandbox`: by what gVisor says of each file, through a BusyBox that nothing inside can change."""
        self._live_shell()
        found = await self._done(self._runsc.signatures)
        return watched.differing(self._reference, found)

    async def kill_since(self, last_pid: int, tick: int, give_up_s: float, signal: int = 0) -> bool:
        """For `shell.Shell`. By number alone: the sandbox's clock is another than ours."""
        shell = self._live_shell().pid
        reply = await self._live_keeper().ask("some", shell=shell, last=last_pid, seconds=give_up_s, signal=signal)
        return reply == "gone"

    async def kill_all(self) -> int:
        """For `shell.Shell`. Raises SandboxError if a process would not die: gVisor says so itself, not what runs in it."""
        reply = await self._live_keeper().ask("all", shell=self._live_shell().pid, seconds=KILL_S)
        by = time.monotonic() + KILL_S
        while json.loads(said := await self._done(lambda: self._runsc.call("ps", "--format", "json", CONTAINER))) != [1]:
            if time.monotonic() > by:
                raise SandboxError(f"processes could not be ended: {said.strip()}", self._id)
            await self._live_keeper().ask("ping", shell=0)  # process 1 collects its dead first: until then they are counted
        return int(reply) if reply.isdigit() else 0

    async def _start(self) -> None:
        standing, nonce, workdir = await self._jobs.run(self._prepare)
        snapshot = self._options.snapshot
        self._keeper = Keeper(self._home / "io")
        await self._boot(Path(snapshot.handle) if snapshot is not None else None)
        wire = StreamWire(self._begin_shell, PLACES, self._home / "io")
        shell = self._shell = Shell(self, wire, standing.cwd if standing else workdir, self._options.output_limit_bytes)
        if standing is not None:
            self._stream = self._keeper.joined(nonce)
            wire.join(shell, self._stream)
            await shell.join(standing)
        else:
            key = (self._root, *self._layers, *host.changed())
            if key not in _REFERENCES:
                _REFERENCES[key] = await self._jobs.run(self._runsc.signatures)
            self._reference = _REFERENCES[key]
            await self._keeper.ask("mkdir", path=workdir)
            await shell.start(b"")

    async def _begin_shell(self, argv: list[str], cwd: str) -> ShellStream:
        """For `StreamWire`; `argv` is what process 1 begins by itself."""
        self._stream = self._live_keeper().begin_shell(cwd)
        return self._stream

    def _prepare(self) -> tuple[Standing | None, str, str]:
        """What needs the disk. Where the shell of a snapshot stands, its stream's nonce; the directory of a new one."""
        options = self._options
        (self._home / "io").mkdir(parents=True)
        (self._home / "root").mkdir()
        (self._home / "nothing").touch()
        for name in ("tree", "io", "place"):
            (self._state / name).mkdir(mode=0o755, exist_ok=True)
        (self._state / "place" / keeper.PLACE.lstrip("/")).mkdir(mode=0o755, exist_ok=True)  # nothing can be made in the tree
        layers.base(self._state.parent)
        link_busybox(self._home / "io" / "busybox")
        standing, nonce, env, workdir = None, "", {}, "/app"
        if options.snapshot is not None:
            manifest = read(options.snapshot, verify=not self._trusted)
            self._layers = [Path(layer) for layer in manifest["layers"]]
            env, workdir, nonce = manifest["env"], manifest["workdir"], manifest["nonce"]
            standing = Standing(**manifest["standing"])
            self._reference, self._root = manifest["reference"], manifest["root"]
        elif options.image is not None:
            self._layers = [Path(layer) for layer in options.image.layers]
            env, workdir, self._root = options.image.env, options.image.workdir or workdir, options.image.root
        for layer in self._layers:
            if not layer.is_dir():
                raise SandboxError(f"a layer of the image is gone: {layer}", self._id)
        env = ENVIRONMENT | dict(env) | dict(options.env)
        workdir = options.workdir or workdir
        self._saved = {"layers": [str(layer) for layer in self._layers], "root": self._root, "env": env, "workdir": workdir}
        (self._home / "config.json").write_text(json.dumps(self._config(env)))
        memory_mb = options.memory_mb + options.disk_mb + OVERHEAD_MB
        pids = HOST_PIDS + HOST_PIDS_PER_PROCESS * options.pids
        self._groups = cgroups.create(self._id, memory_mb=memory_mb, pids=pids, cpus=options.cpus)
        if cgroups.limited(self._groups) != {"memory", "pids"}:
            raise SandboxError("its memory and processes cannot be limited: no writable cgroup", self._id, "sandbox.backend=local")
        return standing, nonce, workdir

    def _config(self, env: dict[str, str]) -> dict[str, object]:
        """The OCI runtime's configuration."""
        limits = (("RLIMIT_NOFILE", 4096), ("RLIMIT_CORE", 0))
        return {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": [keeper.BUSYBOX, "sh", "-c", keeper.SCRIPT],
                "env": [f"{name}={value}" for name, value in env.items()],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
                "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in limits],
                "noNewPrivileges": True,
            },
            "root": {"path": str(self._state / "tree"), "readonly": False},
            "hostname": "sandbox",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "dev", "source": "tmpfs"},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
                {"destination": keeper.PLACE, "type": "bind", "source": str(self._state / "io"), "options": ["rbind"]},
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }

    async def _boot(self, checkpoint: Path | None) -> None:
        """A new namespace with runsc as its first process; process 1 of the sandbox answers on return. Raises SandboxError."""
        begin = ["restore", "--image-path", str(checkpoint)] if checkpoint is not None else ["run"]
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["--net"]  # runsc's control socket has a name that is one namespace's
        argv += [
            "--propagation",
            "private",
            "/bin/bash",
            "--norc",
            "--noprofile",
            "-c",
            MOUNTS,
            "termrsi",
            str(self._state / "tree"),
        ]
        base = layers.base(self._state.parent)
        for part in host.unpacked(base, self._root) if self._root else host.parts(base):
            lowers = [str(layer / part.name) for layer in self._layers if (layer / part.name).is_dir()]
            lowers += [*([] if part.target else [str(self._state / "place")]), *part.lowers]
            argv += [f"/{part.target}", f"lowerdir={':'.join(lowers)}" if len(lowers) > 1 else lowers[0]]
        argv += ["/../io", str(self._home / "io"), "--", *self._runsc.program(), *begin, "--bundle", str(self._home), CONTAINER]
        with (self._home / "log").open("wb") as log, self._runsc.nothing() as nothing:
            self._namespace = await asyncio.create_subprocess_exec(
                *argv,
                stdin=nothing,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", os.defpath), "TERMRSI_GROUPS": " ".join(str(group) for group in self._groups)},
            )
        self._runsc.pid = self._namespace.pid
        self._watch = asyncio.create_task(self._look_after(self._namespace, self._generation))
        asked = asyncio.create_task(self._live_keeper().ask("ping", timeout_s=self._options.start_timeout_s))
        try:
            await asyncio.wait([asked, self._watch], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise SandboxError(f"runsc ended: {self._last_words()}", self._id)
            await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _done(self, job: Callable[[], T]) -> T:
        """What a call into the sandbox gives. Raises SandboxError; where it failed because gVisor ended, what that came of."""
        try:
            return await self._jobs.run(job)
        except SandboxSpoiled:
            raise
        except SandboxError:
            if self._watch is not None:
                await asyncio.wait([self._watch], timeout=END_SEEN_S)
            self._live_shell().check()
            raise

    async def _look_after(self, namespace: asyncio.subprocess.Process, generation: int) -> None:
        await namespace.wait()
        if generation == self._generation:
            self._lose(f"runsc ended: {self._last_words()}")

    def _lose(self, why: str) -> None:
        """For good. Spoiled, if what ran inside came to the end of its memory or processes: see CANNOT."""
        limits = cgroups.exceeded(self._groups)
        why += f"; out of {' and '.join(sorted(limits))}" if limits else ""
        if self._shell is not None:
            self._shell.lose(why, spoiled=bool(limits))
        if self._keeper is not None:
            self._keeper.lose(why, spoiled=bool(limits))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self._home / "log").read_text(errors="replace")[-1000:].strip()
        return ""

    def _save(self, snapshot_id: str, directory: Path, standing: Standing) -> Snapshot:
        assert self._stream is not None
        manifest = {
            **self._saved,
            "reference": self._reference,
            "standing": dataclasses.asdict(standing),
            "nonce": self._stream.nonce,
        }
        text = json.dumps(manifest, sort_keys=True)
        (directory / "manifest.json").write_text(text)
        size = (directory / "checkpoint.img").stat().st_size
        return Snapshot(snapshot_id, "gvisor", str(directory), _digest(directory), (), size)

    async def _ended(self) -> None:
        if self._watch is not None:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._watch)

    def _stop(self) -> None:
        self._generation += 1
        if self._namespace is not None and self._namespace.returncode is None:
            # The first process of the namespace: the others end with it, and unshare, which waits for it, is the last.
            first: list[str] = []
            with contextlib.suppress(OSError):  # it may end by itself at this moment
                first = Path("/proc", str(self._namespace.pid), "task", str(self._namespace.pid), "children").read_text().split()
            for pid in first or [self._namespace.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    async def _close(self) -> None:
        await self._ended()
        if self._keeper is not None:
            self._keeper.close()
        await cgroups.dissolve(self._groups)
        await asyncio.to_thread(tree.remove, self._home)

    def _restored(self, snapshot: Snapshot) -> "GvisorSandbox":
        return GvisorSandbox(dataclasses.replace(self._options, image=None, snapshot=snapshot), trusted_digest=True)

    def _discard(self, snapshot: Snapshot) -> None:
        discard(snapshot)

    def _live_keeper(self) -> Keeper:
        if self._keeper is None or self._closed:
            raise SandboxError("lost, closed or not started", self._id)
        return self._keeper


def read(snapshot: Snapshot, *, verify: bool) -> dict[str, Any]:  # Any: JSON
    """A snapshot's manifest. Raises SandboxError if it is missing or not what was saved."""
    directory = Path(snapshot.handle)
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        damaged = verify and _digest(directory) != snapshot.digest
    except OSError as error:
        raise SandboxError(f"snapshot cannot be read: {error}", snapshot.id) from error
    if damaged:
        raise SandboxError("snapshot is damaged: its digest differs", snapshot.id)
    return manifest


def discard(snapshot: Snapshot) -> None:
    """Frees what a snapshot holds; sandboxes restored from it live on. A second time does nothing."""
    tree.remove(Path(snapshot.handle))


def reap(
    owner: str | None = None,
    state_dir: Path | str | None = None,
    *,
    snapshots: bool = False,
    keep: Collection[str] = frozenset(),
) -> list[str]:
    """Removes directories of dead processes of `owner` (None: any), and, if asked, their snapshots, but those of the ids `keep`.

    Their processes have ended with them; groups are found by `local.reap`.
    """
    top = layers.state_dir(state_dir) / "gvisor"
    removed = []
    for kind in ("live", "snapshots") if snapshots else ("live",):
        for home in sorted((top / kind).glob("*")):
            if layers.is_left_over(home.name, owner) and home.name not in keep:
                tree.remove(home)
                removed.append(str(home))
    return removed


def _digest(directory: Path) -> str:
    total = hashlib.sha256((directory / "manifest.json").read_bytes())
    with (directory / "checkpoint.img").open("rb") as image:
        while block := image.read(1 << 20):
            total.update(block)
    return total.hexdigest()
