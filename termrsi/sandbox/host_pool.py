"""`ports.SandboxPool` of one host: drives `pool.Pool`, has sandboxes made by a backend (`machines.py`), starts and closes them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from termrsi.errors import SandboxError, TaskError
from termrsi.furnish import furnish
from termrsi.ports import Sandbox
from termrsi.records import Snapshot, TaskSpec
from termrsi.sandbox import machines
from termrsi.sandbox.machines import Limits, Machines
from termrsi.sandbox.pool import UNLIMITED, Assign, Close, Command, Cost, Grant, Late, Pool, Refuse, Start, State, Wake

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """A lease that was asked for; kept as long as a spare may be started as it asked."""

    task: TaskSpec
    snapshot: Snapshot | None
    granted: "asyncio.Future[Sandbox]"
    error: Exception | None = None  # of its last start


@dataclass(slots=True)
class _Place:
    request: _Request
    sandbox: Sandbox | None = None
    starting: "asyncio.Task[None] | None" = None
    ending: "asyncio.Task[None] | None" = None


@dataclass(slots=True, kw_only=True)
class HostPool:
    """Leases at most `size` sandboxes at a time, and no more memory and disk than `capacity`. One event loop owns it.

    A lease longer than `lease_limit_s` is logged with its task and closed: its holder then meets SandboxError. `spares` sandboxes
    are started ahead, for the tasks asked for last. `close` ends everything.
    """

    size: int
    cache_dir: Path | str
    state_dir: Path | str | None = None
    owner: str = "none"
    backend: str = "local"
    limits: Limits = field(default_factory=Limits)
    capacity: Cost = UNLIMITED
    spares: int = 0
    lease_limit_s: float = 7200.0
    start_limit_s: float = 900.0  # image build included
    spare_limit_s: float = 600.0
    doubt_limit_s: float = 600.0
    tick_s: float = 5.0
    first_pause_s: float = 0.5  # after a start that failed; doubles with each in a row
    machines: Machines | None = None  # None: of `backend`
    _machines: Machines = field(init=False)
    _pool: Pool = field(init=False)
    _requests: dict[int, _Request] = field(default_factory=dict, init=False)
    _kept: list[int] = field(default_factory=list, init=False)  # requests answered whose task a spare may still need
    _places: dict[int, _Place] = field(default_factory=dict, init=False)
    _ids: dict[str, int] = field(default_factory=dict, init=False)  # sandbox name -> number in the pool
    _jobs: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)
    _watchdog: "asyncio.Task[None] | None" = field(default=None, init=False)
    _alarm: "asyncio.TimerHandle | None" = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._machines = self.machines or machines.of(
            self.backend, self.limits, owner=self.owner, cache_dir=self.cache_dir, state_dir=self.state_dir
        )
        limits_s = {
            State.STARTING: self.start_limit_s,
            State.LEASED: self.lease_limit_s,
            State.CLOSING: 60.0,
            State.SPARE: self.spare_limit_s,
            State.IN_DOUBT: self.doubt_limit_s,
        }
        self._pool = Pool(self.size, limits_s, self.capacity, self.spares, first_pause_s=self.first_pause_s)

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        """Waits for a place, in turn, and for the sandbox's start, which is tried again where the machine failed.

        Raises SandboxError, or TaskError for the task's Dockerfile and for limits that this host cannot meet.
        """
        if self._closed:
            raise SandboxError("the pool is closed", task.id)
        if self._watchdog is None:
            self._watchdog = asyncio.create_task(self._watch())
        granted: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        try:
            number, commands = self._pool.request(
                snapshot.id if snapshot else task.id,
                time.monotonic(),
                kind="" if snapshot else task.path,
                cost=self._machines.cost(task),
            )
        except ValueError as error:
            raise TaskError(str(error), task.id) from error
        self._requests[number] = _Request(task, snapshot, granted)
        self._do(commands)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:  # granted in the same moment
                self._spawn(self.release(granted.result()))
            else:
                self._do(self._pool.withdraw(number, "its requester gave up", time.monotonic()))
            raise
        finally:
            # The task of a request whose kind has spares is needed as long as they are started.
            self._kept.append(number)
            for one in [one for one in self._kept if one not in self._pool.wanted]:
                self._kept.remove(one)
                self._requests.pop(one, None)

    async def fork(self, sandbox: Sandbox, n: int) -> list[Sandbox]:
        """`Sandbox.fork` of a leased one. Each copy counts against the pool until it is released, and is closed with the pool.

        It does not wait for a place: see `pool`. Raises SandboxError, leaving none.
        """
        number = self._ids.get(sandbox.id)
        if number is None:
            raise SandboxError("is not leased", sandbox.id)
        request = self._places[number].request
        forks = await sandbox.fork(n)
        try:
            numbers = [self._pool.forked(number, time.monotonic()) for _ in forks]
        except ValueError as error:  # released, or its time was over, meanwhile
            await asyncio.gather(*(fork.close() for fork in forks))
            raise SandboxError(str(error), sandbox.id) from error
        for fork, its_number in zip(forks, numbers, strict=True):
            self._places[its_number] = _Place(request, fork)
            self._ids[fork.id] = its_number
        return forks

    @contextlib.asynccontextmanager
    async def beside(self, sandbox: Sandbox, task: TaskSpec) -> AsyncIterator[Sandbox]:
        """A started sandbox of another environment beside a leased one, as long as the context is open: for its verifier.

        As a fork it does not wait for a place: who holds one and waits for another may wait for ever.

        Raises SandboxError, TaskError.
        """
        number = self._ids.get(sandbox.id)
        if number is None:
            raise SandboxError("is not leased", sandbox.id)
        other = await self._machines.make(task, None)
        try:
            its_number = self._pool.forked(number, time.monotonic())
        except ValueError as error:
            raise SandboxError(str(error), sandbox.id) from error
        self._places[its_number] = _Place(self._places[number].request, other)
        self._ids[other.id] = its_number
        try:
            await other.start()
            await furnish(other, task.environment)
            yield other
        finally:
            await self.release(other)

    async def release(self, sandbox: Sandbox) -> None:
        """Closed on return; a second release does nothing. Raises SandboxError if it could not be closed: then it is in doubt."""
        number = self._ids.pop(sandbox.id, None)
        if number is None:
            await sandbox.close()
            return
        place = self._places.get(number)
        self._do(self._pool.release(number, "released", time.monotonic()))
        if place is not None and place.ending is not None:
            await asyncio.shield(place.ending)

    async def discard(self, snapshot: Snapshot) -> None:
        """See `ports.SandboxPool`. A second time does nothing."""
        await self._machines.discard(snapshot)

    async def kept(self, snapshot: Snapshot) -> bool:
        """See `ports.SandboxPool`."""
        return await self._machines.kept(snapshot)

    async def close(self) -> None:
        """Ends every sandbox, also leased ones; those who wait for a lease get SandboxError."""
        if not self._closed:
            self._closed = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._do(self._pool.stop(time.monotonic()))
            for request in self._requests.values():
                if not request.granted.done():
                    request.granted.set_exception(SandboxError("the pool was closed", request.task.id))
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)
        # In doubt: once more, and then it is the next reaper's.
        await asyncio.gather(
            *(self._spawn(self._end(number, place, "pool closed")) for number, place in list(self._places.items())),
            return_exceptions=True,
        )

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(sandbox_id=number, request_id=asked_by):
                    place = self._places[number] = _Place(self._requests[asked_by])
                    place.starting = self._spawn(self._start(number, place))
                case Assign(sandbox_id=number, request_id=request_id):
                    self._places[number].request = self._requests[request_id]
                case Grant(sandbox_id=number, request_id=request_id):
                    self._grant(number, self._requests[request_id])
                case Refuse(request_id=request_id):
                    request = self._requests[request_id]
                    if not request.granted.done():
                        request.granted.set_exception(request.error or SandboxError("could not start", request.task.id))
                case Close(sandbox_id=number, reason=reason):
                    place = self._places[number]
                    if place.ending is None or place.ending.done():
                        place.ending = self._spawn(self._end(number, place, reason))
                case Late(sandbox_id=number, what=what, state=state, held_s=held_s):
                    LOG.warning("sandbox for %s has been %s for %.0f s", what, state.name, held_s)
                    if state is State.IN_DOUBT:
                        LOG.error("sandbox for %s is given up: its place is free, what is left of it is the next reaper's", what)
                        self._places.pop(number, None)
                case Wake(at_s=at_s):
                    if self._alarm is not None:
                        self._alarm.cancel()
                    self._alarm = asyncio.get_running_loop().call_later(max(at_s - time.monotonic(), 0.0) + 0.001, self._tick)

    def _grant(self, number: int, request: _Request) -> None:
        place = self._places[number]
        assert place.sandbox is not None
        place.request = request
        if request.granted.done():  # cancelled meanwhile, and not yet withdrawn
            self._do(self._pool.release(number, "its requester gave up", time.monotonic()))
            return
        self._ids[place.sandbox.id] = number
        request.granted.set_result(place.sandbox)

    async def _start(self, number: int, place: _Place) -> None:
        asked = place.request  # a spare may be meant for another by the time it has started, or has not
        another_may = asked.snapshot is None  # a damaged snapshot stays so
        try:
            place.sandbox = await self._machines.make(asked.task, asked.snapshot)
            await place.sandbox.start()
            another_may = False  # what fails from here on is the task's: starts are as well as ever
            if asked.snapshot is None:
                await furnish(place.sandbox, asked.task.environment)
        except (SandboxError, TaskError) as error:
            place.request.error = error
        except Exception as error:  # of whatever kind: the place is free again, and the requester hears why
            LOG.exception("a sandbox for %s could not start", asked.task.id)
            place.request.error = SandboxError(f"could not start: {type(error).__name__}: {error}", asked.task.id)
        else:
            self._do(self._pool.started(number, time.monotonic()))
            return
        again = isinstance(place.request.error, SandboxError) and another_may
        self._do(self._pool.failed(number, time.monotonic(), again=again))

    async def _end(self, number: int, place: _Place, reason: str) -> None:
        if place.starting is not None and not place.starting.done() and place.starting is not asyncio.current_task():
            place.starting.cancel()
            await asyncio.gather(place.starting, return_exceptions=True)
            if not place.request.granted.done():  # it took too long
                place.request.granted.set_exception(SandboxError(reason, place.request.task.id))
        try:
            if place.sandbox is not None:
                self._ids.pop(place.sandbox.id, None)
                await place.sandbox.close()
        except BaseException as error:
            # A place that is free while something still uses its memory would be too many: in doubt until a close succeeds.
            LOG.error("sandbox for %s could not be closed (%s): %s", place.request.task.id, reason, error)
            self._pool.doubt(number, time.monotonic())
            raise
        self._places.pop(number, None)
        self._do(self._pool.closed(number, time.monotonic()))

    def _spawn(self, job: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: told above
        return task

    def _tick(self) -> None:
        if not self._closed:
            self._do(self._pool.tick(time.monotonic()))

    async def _watch(self) -> None:
        """Consumes the clock; names and closes what is late. Ends when `close` cancels it."""
        while True:
            await asyncio.sleep(self.tick_s)
            self._tick()
