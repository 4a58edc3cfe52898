"""The sandbox pool as an actor: sandboxes live where this actor lives, episodes hold handles.

Consumes leases and calls on leased sandboxes; a lease waits for a free slot, which a release frees. Verification runs here too,
beside the sandbox, so that a task's tests and reports do not cross the network.
"""

import asyncio
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from termrsi.actors.archives import pack, unpack
from termrsi.actors.busy import Busy
from termrsi.actors.metrics import RayMeter
from termrsi.errors import SandboxError, SandboxSpoiled, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, Snapshot, TaskSpec, Verdict

if TYPE_CHECKING:
    from termrsi.sandbox.machines import Machines

GONE = 1000  # requesters remembered
LEASE_LIMIT_S = 7200.0  # unless an episode may take longer
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
    keep: tuple[str, ...] = ()  # ids of snapshots that an earlier life of the run left, and that it goes on from
    lease_limit_s: float = LEASE_LIMIT_S  # the longest that an episode may take, and more: what is held beyond is closed


@dataclass(frozen=True, slots=True)
class Beat:
    """`where`: the node, for people. `life`: another one after each start of the actor. `forgetful`: it waits for `expect`."""

    where: str
    life: str
    forgetful: bool


@ray.remote
class SandboxActor:
    """Hosts one HostPool and the verifier. `parts`: makes others than the backend's machines and the tasks' verifier.

    Started again, on this node or on another, it has none of its sandboxes, and does not know what a verdict must come with: it
    leases nothing until its owner has told it with `expect`. What dead processes left on its node is removed at its start, see
    `reap.before`.
    """

    def __init__(
        self,
        options: SandboxOptions,
        parts: "Callable[[], tuple[Machines, Any]] | None" = None,  # Any: what has the methods of a TaskVerifier
    ) -> None:
        from termrsi.reward.verifiers import TaskVerifier
        from termrsi.sandbox import reap
        from termrsi.sandbox.host_pool import HostPool
        from termrsi.sandbox.machines import Limits, capacity

        machines, verifier = parts() if parts else (None, None)
        again = ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed
        for name in reap.before(
            options.owner,
            options.state_dir,
            docker=options.backend == "docker",
            cache_dir=options.cache_dir,
            keep=options.keep,
            snapshots=not again,
        ):
            _LOG.info("removed what a dead process left: %s", name)
        self._knows = asyncio.Event()
        if not again:
            self._knows.set()
        self._life = uuid.uuid4().hex
        self._pool = HostPool(
            machines=machines,
            size=options.concurrency,
            cache_dir=options.cache_dir,
            state_dir=options.state_dir,
            backend=options.backend,
            owner=options.owner,
            capacity=capacity(options.state_dir, options.host_share),
            spares=options.spares,
            lease_limit_s=options.lease_limit_s,
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

    async def beat(self) -> Beat:
        """That it answers, and from where."""
        context = ray.get_runtime_context()
        where = f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})"
        return Beat(where, self._life, not self._knows.is_set())

    async def lease(self, request: str, task: TaskSpec, snapshot: Snapshot | None) -> str:
        start_s = time.monotonic()
        asked = asyncio.ensure_future(self._lease(task, snapshot))
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

    async def _lease(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        await self._knows.wait()
        return await self._pool.lease(task, snapshot)

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

    async def forget(self, client: str, life: str = "") -> None:
        """Of a client that has died: all that it had asked for ends. `life`: but what this life of its has asked for."""
        now = f"{client}/{life}/"
        its = [one for one in (*self._asked, *self._granted) if one.startswith(f"{client}/")]
        dead = [request for request in its if not life or not request.startswith(now)]
        # One that cannot be closed is in doubt, told and counted by now: it keeps none of the others.
        for error in await asyncio.gather(*map(self.abandon, dead), return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, SandboxError):
                raise error

    async def release(self, sandbox_id: str) -> None:
        sandbox = self._leased.pop(sandbox_id, None)
        self._granted.pop(self._askers.pop(sandbox_id, ""), None)
        forks = list(self._forks.pop(sandbox_id, {}).values())  # a requester that was cancelled left them
        both = forks if sandbox is None else [*forks, sandbox]
        with self._faults("release"):  # each, whatever becomes of the others
            told = await asyncio.gather(*map(self._pool.release, both), return_exceptions=True)
            self._meter("sandboxes_leased", len(self._leased))
            if failed := [one for one in told if isinstance(one, BaseException)]:
                raise failed[0]

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
            await self._of(sandbox_id).put(unpack(tar, Path(folder)), target)

    async def get(self, sandbox_id: str, source: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix=f"termrsi-copy-{os.getpid()}-") as folder:
            target = Path(folder) / "got"
            await self._of(sandbox_id).get(source, target)
            return pack(target)

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
        self._knows.set()

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
