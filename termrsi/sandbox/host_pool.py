"""`ports.SandboxPool` of one host: drives `pool.Pool`, has sandboxes made by a backend (`machines.py`), starts and closes them."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from termrsi.errors import SandboxError, TaskError
from termrsi.ports import Sandbox
from termrsi.records import Snapshot, TaskSpec
from termrsi.sandbox import machines
from termrsi.sandbox.machines import Limits, Machines
from termrsi.sandbox.pool import Close, Command, Grant, Late, Pool, Start, State

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    task: TaskSpec
    snapshot: Snapshot | None
    granted: "asyncio.Future[Sandbox]"
    sandbox: Sandbox | None = None
    starting: "asyncio.Task[None] | None" = None


@dataclass(slots=True, kw_only=True)
class HostPool:
    """Leases at most `size` sandboxes at a time. One event loop owns it; `close` ends everything.

    A lease longer than `lease_limit_s` is logged with its task and closed: its holder then meets SandboxError.
    """

    size: int
    cache_dir: Path | str
    state_dir: Path | str | None = None
    owner: str = "none"
    backend: str = "local"
    limits: Limits = field(default_factory=Limits)
    lease_limit_s: float = 7200.0
    start_limit_s: float = 900.0  # image build included
    tick_s: float = 5.0
    _machines: Machines = field(init=False)
    _pool: Pool = field(init=False)
    _requests: dict[int, _Request] = field(default_factory=dict, init=False)
    _ids: dict[str, int] = field(default_factory=dict, init=False)  # sandbox name -> number in the pool
    _jobs: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)
    _watchdog: "asyncio.Task[None] | None" = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._machines = machines.of(
            self.backend, self.limits, owner=self.owner, cache_dir=self.cache_dir, state_dir=self.state_dir
        )
        self._pool = Pool(self.size, {State.STARTING: self.start_limit_s, State.LEASED: self.lease_limit_s, State.CLOSING: 60.0})

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        """Waits for a place, in turn, and for the sandbox's start. Raises SandboxError, or TaskError for its Dockerfile."""
        if self._closed:
            raise SandboxError("the pool is closed", task.id)
        if self._watchdog is None:
            self._watchdog = asyncio.create_task(self._watch())
        granted: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        number, commands = self._pool.request(snapshot.id if snapshot else task.id, time.monotonic())
        self._requests[number] = _Request(task, snapshot, granted)
        self._do(commands)
        try:
            return await granted
        except asyncio.CancelledError:
            self._withdraw(number, "its requester gave up")
            raise

    async def release(self, sandbox: Sandbox) -> None:
        """Closed on return; a second release does nothing."""
        number = self._ids.pop(sandbox.id, None)
        if number is not None:
            self._do(self._pool.release(number, "released", time.monotonic()))
        await sandbox.close()

    async def discard(self, snapshot: Snapshot) -> None:
        """See `ports.SandboxPool`. A second time does nothing."""
        await self._machines.discard(snapshot)

    async def close(self) -> None:
        """Ends every sandbox, also leased ones; those who wait for a lease get SandboxError."""
        if not self._closed:
            self._closed = True
            waiting = [request for request in self._requests.values() if not request.granted.done()]
            self._do(self._pool.stop(time.monotonic()))
            for request in waiting:
                if not request.granted.done():
                    request.granted.set_exception(SandboxError("the pool was closed", request.task.id))
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(sandbox_id=number):
                    request = self._requests[number]
                    request.starting = self._spawn(self._start(number, request))
                case Grant(sandbox_id=number):
                    request = self._requests[number]
                    assert request.sandbox is not None
                    self._ids[request.sandbox.id] = number
                    request.granted.set_result(request.sandbox)
                case Close(sandbox_id=number, reason=reason):
                    self._spawn(self._end(number, self._requests[number], reason))
                case Late(what=what, state=state, held_s=held_s):
                    LOG.warning("sandbox for %s has been %s for %.0f s", what, state.name, held_s)

    async def _start(self, number: int, request: _Request) -> None:
        try:
            sandbox = request.sandbox = await self._machines.make(request.task, request.snapshot)
            await sandbox.start()
        except (SandboxError, TaskError) as error:
            self._refuse(number, request, error)
            return
        except Exception as error:  # of whatever kind: the place is free again, and the requester hears why
            LOG.exception("a sandbox for %s could not start", request.task.id)
            self._refuse(number, request, SandboxError(f"could not start: {type(error).__name__}: {error}", request.task.id))
            return
        if request.granted.done():  # cancelled meanwhile
            self._withdraw(number, "its requester gave up")
        else:
            self._do(self._pool.started(number, time.monotonic()))

    def _refuse(self, number: int, request: _Request, error: Exception) -> None:
        if not request.granted.done():
            request.granted.set_exception(error)
        self._do(self._pool.release(number, "could not start", time.monotonic()))

    async def _end(self, number: int, request: _Request, reason: str) -> None:
        if request.starting is not None and not request.starting.done() and request.starting is not asyncio.current_task():
            request.starting.cancel()
            await asyncio.gather(request.starting, return_exceptions=True)
        if not request.granted.done():
            request.granted.set_exception(SandboxError(reason, request.task.id))
        try:
            if request.sandbox is not None:
                self._ids.pop(request.sandbox.id, None)
                await request.sandbox.close()
        finally:  # whatever went wrong: a place that is never free again would keep the next lease waiting for ever
            self._requests.pop(number, None)
            self._do(self._pool.closed(number, time.monotonic()))

    def _withdraw(self, number: int, reason: str) -> None:
        commands = self._pool.release(number, reason, time.monotonic())
        if not commands and number in self._requests and self._requests[number].starting is None:
            del self._requests[number]  # it had not begun
        self._do(commands)

    def _spawn(self, job: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def _watch(self) -> None:
        """Consumes the clock; names and closes what is late. Ends when `close` cancels it."""
        while True:
            await asyncio.sleep(self.tick_s)
            self._do(self._pool.tick(time.monotonic()))
