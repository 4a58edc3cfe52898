"""The sandbox pool as an actor: sandboxes live where this actor lives, episodes hold handles.

Consumes leases and calls on leased sandboxes; a lease waits for a free slot, which a release frees. Verification runs here too,
beside the sandbox, so that a task's tests and reports do not cross the network.
"""

import asyncio
import io
import logging
import os
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from termrsi.actors.busy import Busy
from termrsi.actors.metrics import RayMeter
from termrsi.errors import SandboxError, SandboxSpoiled, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, Snapshot, TaskSpec, Verdict

if TYPE_CHECKING:
    from termrsi.sandbox.machines import Machines

GONE = 1000  # requesters remembered
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """Size of the pool, default limits of one sandbox, and where images and state lie."""

    backend: str
    concurrency: int
    memory_mb: int
    disk_mb: int
    pids: int
    network: bool
    cache_dir: str
    state_dir: str
    spares: int = 0
    host_share: float = 0.8
    owner: str = "none"  # the run, as what is left behind will bear it
    text_first: bool = False  # of a verifier's two rewards
    verifier_time: float = 1.0
    kit: str = ""  # of offline verification
    keep_bytes: int = 0  # of each verdict's files
    build_network: bool = False
    run: str = ""  # as metrics name it


@ray.remote(max_restarts=0)
class SandboxActor:
    """Hosts one HostPool and the verifier. `parts`: makes others than the backend's machines and the tasks' verifier."""

    def __init__(
        self,
        options: SandboxOptions,
        parts: "Callable[[], tuple[Machines, Any]] | None" = None,  # Any: what has the methods of a TaskVerifier
    ) -> None:
        from termrsi.reward.verifiers import TaskVerifier
        from termrsi.sandbox.host_pool import HostPool
        from termrsi.sandbox.machines import Limits, capacity

        machines, verifier = parts() if parts else (None, None)
        self._pool = HostPool(
            machines=machines,
            size=options.concurrency,
            cache_dir=options.cache_dir,
            state_dir=options.state_dir,
            backend=options.backend,
            owner=options.owner,
            capacity=capacity(options.state_dir, options.host_share),
            spares=options.spares,
            limits=Limits(
                memory_mb=options.memory_mb,
                disk_mb=options.disk_mb,
                pids=options.pids,
                network=options.network,
                build_network=options.build_network,
            ),
        )
        self._backend = options.backend
        self._commands, self._verifications = Busy(), Busy()
        self._meter = RayMeter(options.run)
        self._verifier = verifier or TaskVerifier(
            timeout_multiplier=options.verifier_time,
            text_first=options.text_first,
            kit=options.kit or None,
            beside=self._pool.beside,
            keep_bytes=options.keep_bytes,
        )
        self._asked: dict[str, asyncio.Future[Sandbox]] = {}  # by the requester's own id, while it waits
        self._granted: dict[str, str] = {}  # likewise, while it has a sandbox: that one's id
        self._askers: dict[str, str] = {}  # the same, by the sandbox
        self._gone: dict[str, None] = {}  # requesters that went away before their request came, or in the moment of its grant
        self._leased: dict[str, Sandbox] = {}
        self._forks: dict[str, dict[str, Sandbox]] = {}  # of which sandbox -> those of its forks that live

    async def ready(self) -> bool:
        """Raises SandboxError if sandboxes cannot be made on this node."""
        from termrsi.sandbox.check import probe

        if missing := await probe(backend=self._backend):
            raise SandboxError("; ".join(missing), "sandbox pool", "`termrsi doctor` on this node says more")
        return True

    async def lease(self, request: str, task: TaskSpec, snapshot: Snapshot | None) -> str:
        start_s = time.monotonic()
        asked = asyncio.ensure_future(self._pool.lease(task, snapshot))
        self._asked[request] = asked
        if request in self._gone:  # Ray keeps no order between calls of an asynchronous actor
            asked.cancel()
        try:
            with self._faults("lease"):
                sandbox = await asked
        except asyncio.CancelledError as error:
            self._gone.pop(request, None)
            raise SandboxError("its requester gave up", task.id) from error
        finally:
            del self._asked[request]
        if request in self._gone:
            del self._gone[request]
            await self._pool.release(sandbox)
            raise SandboxError("its requester gave up", task.id)
        self._leased[sandbox.id] = sandbox
        self._granted[request], self._askers[sandbox.id] = sandbox.id, request
        self._meter("sandbox_leases")
        self._meter("sandbox_lease_wait_seconds", time.monotonic() - start_s)
        self._meter("sandboxes_leased", len(self._leased))
        return sandbox.id

    async def abandon(self, request: str) -> None:
        """The requester has gone: whether its lease is still to come, waits or was granted, it ends."""
        if request in self._granted:
            await self.release(self._granted[request])
            return
        self._gone[request] = None
        if request in self._asked:
            self._asked[request].cancel()
        elif len(self._gone) > GONE:  # a lease that had failed before: it comes no more
            del self._gone[next(iter(self._gone))]

    async def release(self, sandbox_id: str) -> None:
        sandbox = self._leased.pop(sandbox_id, None)
        self._granted.pop(self._askers.pop(sandbox_id, ""), None)
        for fork in list(self._forks.pop(sandbox_id, {}).values()):  # a requester that was cancelled left them
            await self._pool.release(fork)
        if sandbox is not None:
            self._meter("sandboxes_leased", len(self._leased))
            with self._faults("release"):
                await self._pool.release(sandbox)

    async def close_fork(self, sandbox_id: str) -> None:
        found = [forks.pop(sandbox_id) for forks in self._forks.values() if sandbox_id in forks]
        for fork in found:
            await self._pool.release(fork)

    async def run(self, sandbox_id: str, command: str, timeout_s: float | None) -> CommandResult:
        with self._commands, self._faults("run"):
            return await self._of(sandbox_id).run(command, timeout_s)

    async def snapshot(self, sandbox_id: str) -> Snapshot:
        with self._faults("snapshot"):
            return await self._of(sandbox_id).snapshot()

    async def fork(self, sandbox_id: str, n: int) -> list[str]:
        with self._faults("fork"):
            forks = await self._pool.fork(self._of(sandbox_id), n)
        self._forks.setdefault(sandbox_id, {}).update({f.id: f for f in forks})
        return [f.id for f in forks]

    async def put(self, sandbox_id: str, tar: bytes, target: str) -> None:
        with tempfile.TemporaryDirectory(prefix=f"termrsi-copy-{os.getpid()}-") as folder:
            await self._of(sandbox_id).put(_unpack(tar, Path(folder)), target)

    async def get(self, sandbox_id: str, source: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix=f"termrsi-copy-{os.getpid()}-") as folder:
            target = Path(folder) / "got"
            await self._of(sandbox_id).get(source, target)
            return _pack(target)

    async def kill_processes(self, sandbox_id: str) -> int:
        return await self._of(sandbox_id).kill_processes()

    async def replaced(self, sandbox_id: str) -> list[str]:
        return await self._of(sandbox_id).replaced()

    async def verify(self, sandbox_id: str, task: TaskSpec) -> Verdict:
        with self._commands, self._verifications, self._faults("verify"):
            return await self._verifier.verify(self._of(sandbox_id), task)

    async def busy(self) -> dict[str, float]:
        """Seconds with a command running, of an agent or of a verifier; and with a verification under way."""
        return {"sandboxes": self._commands.seconds, "verifier": self._verifications.seconds}

    async def expect(self, checks: dict[str, tuple[str, ...]]) -> None:
        self._verifier.expect(checks)

    async def discard(self, snapshot: Snapshot) -> None:
        await self._pool.discard(snapshot)

    async def kept(self, snapshot: Snapshot) -> bool:
        return await self._pool.kept(snapshot)

    async def close(self) -> None:
        await self._pool.close()

    @contextmanager
    def _faults(self, call: str) -> Iterator[None]:
        """Counts and logs what goes through it, but for what the agent did."""
        try:
            yield
        except SandboxSpoiled:
            raise
        except (SandboxError, VerifierError) as error:
            self._meter("sandbox_faults", call=call)
            _LOG.warning("%s failed: %s", call, error)
            raise

    def _of(self, sandbox_id: str) -> Sandbox:
        if (found := self._leased.get(sandbox_id)) is not None:
            return found
        for forks in self._forks.values():
            if sandbox_id in forks:
                return forks[sandbox_id]
        raise SandboxError(f"sandbox {sandbox_id} is not leased", "sandbox pool")


class RemoteSandbox:
    """`ports.Sandbox` over a sandbox in a SandboxActor."""

    def __init__(self, actor: Any, sandbox_id: str, *, forked: bool = False) -> None:  # Any: Ray's actor handles are untyped
        self._actor = actor
        self._id = sandbox_id
        self._forked = forked

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        """A leased sandbox is started."""

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        return await _call(self._actor.run.remote(self._id, command, timeout_s))

    async def snapshot(self) -> Snapshot:
        return await _call(self._actor.snapshot.remote(self._id))

    async def fork(self, n: int) -> list[Sandbox]:
        return [RemoteSandbox(self._actor, i, forked=True) for i in await _call(self._actor.fork.remote(self._id, n))]

    async def put(self, source: Path | str, target: str) -> None:
        await _call(self._actor.put.remote(self._id, _pack(Path(source)), target))

    async def get(self, source: str, target: Path | str) -> None:
        tar = await _call(self._actor.get.remote(self._id, source))
        with tempfile.TemporaryDirectory(prefix=f"termrsi-copy-{os.getpid()}-") as folder:
            found = _unpack(tar, Path(folder))
            if found.is_dir() and not found.is_symlink():
                shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(found, target, follow_symlinks=False)

    async def kill_processes(self) -> int:
        return await _call(self._actor.kill_processes.remote(self._id))

    async def replaced(self) -> list[str]:
        return await _call(self._actor.replaced.remote(self._id))

    async def close(self) -> None:
        method = self._actor.close_fork if self._forked else self._actor.release
        await _call(method.remote(self._id))


class RemotePool:
    """`ports.SandboxPool` and `ports.Verifier` over a SandboxActor."""

    def __init__(self, actor: Any) -> None:  # Any: Ray's actor handles are untyped
        self.actor = actor

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        request = uuid.uuid4().hex
        try:
            return RemoteSandbox(self.actor, await _call(self.actor.lease.remote(request, task, snapshot)))
        except asyncio.CancelledError:
            self.actor.abandon.remote(request)
            raise

    async def release(self, sandbox: Sandbox) -> None:
        await _call(self.actor.release.remote(sandbox.id))

    async def discard(self, snapshot: Snapshot) -> None:
        await _call(self.actor.discard.remote(snapshot))

    async def kept(self, snapshot: Snapshot) -> bool:
        return await _call(self.actor.kept.remote(snapshot))

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        return await _call(self.actor.verify.remote(sandbox.id, task))

    async def busy(self) -> dict[str, float]:
        """As the actor counts them."""
        return await _call(self.actor.busy.remote())

    async def expect(self, checks: dict[str, tuple[str, ...]]) -> None:
        """See `reward.verifiers.TaskVerifier`."""
        await _call(self.actor.expect.remote(checks))


async def _call(reference: Any) -> Any:  # Any: an object reference, and what it resolves to
    """A dead pool is a lost sandbox; errors of ours arrive as what they are."""
    try:
        return await reference
    except RayActorError as error:
        raise SandboxError(f"the sandbox actor died: {error}", "sandbox pool") from error


def _pack(path: Path) -> bytes:
    """A tar that holds one member, the file or the tree at `path`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(path, arcname="content")
    return buffer.getvalue()


def _unpack(data: bytes, folder: Path) -> Path:
    """Where the packed file or tree lies now."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        # Python 3.11.4 brought filters; before, what they hold back is not in an archive that `_pack` made.
        if hasattr(tarfile, "tar_filter"):
            tar.extractall(folder, filter="tar")
        else:
            tar.extractall(folder)
    return folder / "content"
