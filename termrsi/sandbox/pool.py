"""Sandbox pool as a state machine: facts in, commands out; no Ray, no sockets, no clock of its own.

The host does the I/O and brings the time. A request waits its turn, first come first served, until a place and its cost in memory
and disk are free; a spare of its kind, started ahead and never used, serves it at once. A sandbox is STARTING, SPARE or LEASED,
then CLOSING until its end has been seen. One whose end cannot be seen is IN_DOUBT: it keeps its place and its cost, and is closed
again on each tick, until it is given up. No sandbox is leased twice.

Starts that fail by the machine's fault are tried again, after a pause that doubles with each failure in a row.

A fork counts as a sandbox of its own as soon as it lives, also where there is no room: who forks holds a lease, and would wait for
others who hold theirs and wait as well.

Invariants: nothing is started beyond `size` sandboxes, nor beyond a cost of `capacity`, that are not gone; a request is answered
once (granted, refused, or withdrawn), in the order of requests among those of the same cost; facts about a sandbox that has left
are ignored.
"""

import enum
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field


class State(enum.Enum):
    STARTING = enum.auto()
    SPARE = enum.auto()
    LEASED = enum.auto()
    CLOSING = enum.auto()
    IN_DOUBT = enum.auto()


@dataclass(frozen=True, slots=True)
class Cost:
    """What one sandbox may come to use, or what a host has, in MiB."""

    memory_mb: float = 0
    disk_mb: float = 0


UNLIMITED = Cost(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Start:
    """Start a sandbox as this request asks for one: for it, or as a spare of its kind."""

    sandbox_id: int
    request_id: int


@dataclass(frozen=True, slots=True)
class Assign:
    """A sandbox that starts as a spare is meant for this request now."""

    sandbox_id: int
    request_id: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The sandbox is the request's: hand it over."""

    sandbox_id: int
    request_id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """No sandbox could be started for the request: tell it what its last start said."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close this sandbox, then tell `closed`, or `doubt`."""

    sandbox_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Late:
    """One held too long: named by the watchdog, closed by a `Close` beside it. IN_DOUBT: given up."""

    sandbox_id: int
    what: str
    state: State
    held_s: float


@dataclass(frozen=True, slots=True)
class Wake:
    """Call `tick` at this time: a start waits for it."""

    at_s: float


Command = Start | Assign | Grant | Refuse | Close | Late | Wake


@dataclass(slots=True)
class _Request:
    what: str
    kind: str  # sandboxes of one kind cost the same and can stand for each other; "": of none but this request's
    cost: Cost
    starts: int = 0


@dataclass(slots=True)
class _Sandbox:
    state: State
    since_s: float
    request: _Request
    granted_to: int | None  # STARTING: the request it is meant for


@dataclass(slots=True)
class Pool:
    """`limit_s`: the longest stay in a state, absent: any. `spares`: how many are started ahead, one of a kind."""

    size: int
    limit_s: Mapping[State, float] = field(default_factory=dict)
    capacity: Cost = UNLIMITED
    spares: int = 0
    max_starts: int = 3
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    _waiting: OrderedDict[int, _Request] = field(default_factory=OrderedDict, init=False)
    _live: dict[int, _Sandbox] = field(default_factory=dict, init=False)
    _unassigned: set[int] = field(default_factory=set, init=False)  # spares, ready or starting
    _meant_for: dict[int, int] = field(default_factory=dict, init=False)  # request -> the sandbox that starts for it
    _used: Cost = field(default=Cost(), init=False)
    _recent: "OrderedDict[str, tuple[int, _Request]]" = field(default_factory=OrderedDict, init=False)  # kinds, latest last
    _next_id: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)  # in a row
    _not_before_s: float = field(default=-math.inf, init=False)
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a pool of {self.size} places; at least 1 is needed")

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def count(self, state: State) -> int:
        return sum(one.state is state for one in self._live.values())

    @property
    def wanted(self) -> set[int]:
        """The requests as which spares are started."""
        return {request_id for request_id, _ in self._recent.values()} if self.spares else set()

    @property
    def in_use(self) -> Cost:
        """The cost of all that are not gone."""
        return self._used

    def request(self, what: str, now_s: float, *, kind: str = "", cost: Cost = Cost()) -> tuple[int, list[Command]]:
        """A new request, and its id. Raises ValueError once the pool has stopped, or if it asks for more than there is."""
        if self._stopped:
            raise ValueError("the pool is closed")
        if cost.memory_mb > self.capacity.memory_mb or cost.disk_mb > self.capacity.disk_mb:
            has = f"{self.capacity.memory_mb:.0f} MiB of memory and {self.capacity.disk_mb:.0f} MiB of disk"
            raise ValueError(f"asks for {cost.memory_mb:.0f} and {cost.disk_mb:.0f}; this host has {has} for sandboxes")
        request_id = self._new_id()
        self._waiting[request_id] = _Request(what, kind, cost)
        return request_id, self._fill(now_s)

    def withdraw(self, request_id: int, reason: str, now_s: float) -> list[Command]:
        """Its requester gave up: out of the queue, or closed, if it has not been granted yet."""
        if self._waiting.pop(request_id, None) is not None:
            return self._fill(now_s)
        sandbox_id = self._meant_for.pop(request_id, None)
        if sandbox_id is None:
            return []
        self._live[sandbox_id].granted_to = None
        return self.release(sandbox_id, reason, now_s)

    def started(self, sandbox_id: int, now_s: float) -> list[Command]:
        one = self._live.get(sandbox_id)
        if one is None or one.state in (State.CLOSING, State.IN_DOUBT):
            return []
        assert one.state is State.STARTING, f"sandbox {sandbox_id} started twice"
        self._failures, self._not_before_s = 0, -math.inf
        if one.granted_to is None:
            one.state, one.since_s = State.SPARE, now_s
            return self._fill(now_s)
        return [self._grant(sandbox_id, one, one.granted_to, now_s), *self._fill(now_s)]

    def forked(self, sandbox_id: int, now_s: float) -> int:
        """A copy of a leased sandbox, which costs the same: its id. Raises ValueError if the sandbox is leased no more."""
        one = self._live.get(sandbox_id)
        if one is None or one.state is not State.LEASED:
            raise ValueError("is not leased")
        fork_id = self._new_id()
        self._live[fork_id] = _Sandbox(State.LEASED, now_s, one.request, None)
        self._take(one.request.cost)
        return fork_id

    def failed(self, sandbox_id: int, now_s: float, *, again: bool) -> list[Command]:
        """It could not start. `again`: by the machine's fault, so that another start may succeed."""
        one = self._live.get(sandbox_id)
        if one is None or one.state is not State.STARTING:
            return []
        commands: list[Command] = []
        if again and now_s >= self._not_before_s:  # those that began together fail together: one step of the pause
            self._failures += 1
            pause_s = min(self.first_pause_s * 2.0 ** min(self._failures - 1, 30), self.longest_pause_s)
            self._not_before_s = now_s + pause_s
        if one.granted_to is not None:
            one.request.starts += 1
            if again and one.request.starts < self.max_starts:
                self._waiting[one.granted_to] = one.request
                self._waiting = OrderedDict(sorted(self._waiting.items()))  # ids are in the order of the requests
            else:
                commands.append(Refuse(one.granted_to))
            self._meant_for.pop(one.granted_to)
            one.granted_to = None
        else:
            self._recent.pop(one.request.kind, None)  # a spare that does not start is not wanted at once again
        return [*commands, *self.release(sandbox_id, "could not start", now_s)]

    def release(self, sandbox_id: int, reason: str, now_s: float) -> list[Command]:
        """Given back, lost, or not wanted any more: closed exactly once."""
        one = self._live.get(sandbox_id)
        if one is None or one.state in (State.CLOSING, State.IN_DOUBT):
            return []
        one.state, one.since_s = State.CLOSING, now_s
        self._unassigned.discard(sandbox_id)
        if one.granted_to is not None:
            self._meant_for.pop(one.granted_to, None)
        return [Close(sandbox_id, reason)]

    def closed(self, sandbox_id: int, now_s: float) -> list[Command]:
        """The end of a sandbox has been seen: its place is free."""
        self._forget(sandbox_id)
        return self._fill(now_s)

    def doubt(self, sandbox_id: int, now_s: float) -> None:
        """It could not be closed: something of it may be left."""
        one = self._live.get(sandbox_id)
        if one is not None and one.state is State.CLOSING:
            one.state, one.since_s = State.IN_DOUBT, now_s

    def tick(self, now_s: float) -> list[Command]:
        """Names and closes what has been in a state too long; closes again what is in doubt; starts what had to wait."""
        commands: list[Command] = []
        for sandbox_id, one in list(self._live.items()):
            held_s = now_s - one.since_s
            if held_s > self.limit_s.get(one.state, math.inf):
                if one.state is not State.SPARE:
                    commands.append(Late(sandbox_id, one.request.what, one.state, held_s))
                if one.state is State.IN_DOUBT:
                    self._forget(sandbox_id)
                    continue
                if one.state is State.CLOSING:
                    one.state, one.since_s = State.IN_DOUBT, now_s
                    continue
                commands += self.release(sandbox_id, f"{one.state.name.lower()} too long", now_s)
            elif one.state is State.IN_DOUBT:
                commands.append(Close(sandbox_id, "its end was not seen"))
        return commands + self._fill(now_s)

    def stop(self, now_s: float) -> list[Command]:
        """No request is taken or started any more; everything live is closed."""
        self._stopped = True
        self._waiting.clear()
        return [command for sandbox_id in list(self._live) for command in self.release(sandbox_id, "pool closed", now_s)]

    def _fill(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        while self._waiting and not self._stopped:
            request_id, request = next(iter(self._waiting.items()))
            spare = self._spare_of(request.kind)
            if spare is not None:
                del self._waiting[request_id]
                self._unassigned.discard(spare)
                one = self._live[spare]
                one.request = request
                if one.state is State.SPARE:
                    commands.append(self._grant(spare, one, request_id, now_s))
                else:
                    one.granted_to = request_id
                    self._meant_for[request_id] = spare
                    commands.append(Assign(spare, request_id))
                continue
            if now_s < self._not_before_s:
                return [*commands, Wake(self._not_before_s)]
            if not self._has_room(request.cost):
                # First come first served, also where a later one would fit: else one that asks for much would wait for ever.
                return commands + self._give_up_a_spare(now_s)
            del self._waiting[request_id]
            commands.append(self._start(request_id, request, request_id, now_s))
        return commands + self._ahead(now_s)

    def _ahead(self, now_s: float) -> list[Command]:
        """Starts of spares: one of each kind asked for lately, as long as no one waits and there is room."""
        commands: list[Command] = []
        for request_id, request in reversed(list(self._recent.values())) if self.spares else []:
            have = any(self._live[sandbox_id].request.kind == request.kind for sandbox_id in self._unassigned)
            many = len(self._unassigned) >= self.spares
            if not (have or many or self._stopped or now_s < self._not_before_s) and self._has_room(request.cost):
                commands.append(self._start(request_id, request, None, now_s))
        return commands

    def _give_up_a_spare(self, now_s: float) -> list[Command]:
        """One at a time: the next, if it is still needed, once the first has gone."""
        ready = [sandbox_id for sandbox_id in sorted(self._unassigned) if self._live[sandbox_id].state is State.SPARE]
        if not ready or any(one.state is State.CLOSING for one in self._live.values()):
            return []
        return self.release(ready[0], "its place is needed", now_s)

    def _start(self, asked_by: int, request: _Request, granted_to: int | None, now_s: float) -> Start:
        sandbox_id = self._new_id()
        self._live[sandbox_id] = _Sandbox(State.STARTING, now_s, request, granted_to)
        self._take(request.cost)
        if granted_to is None:
            self._unassigned.add(sandbox_id)
        else:
            self._meant_for[granted_to] = sandbox_id
        return Start(sandbox_id, asked_by)

    def _grant(self, sandbox_id: int, one: _Sandbox, request_id: int, now_s: float) -> Grant:
        one.state, one.since_s, one.granted_to = State.LEASED, now_s, None
        self._meant_for.pop(request_id, None)
        if one.request.kind:
            self._recent[one.request.kind] = (request_id, one.request)
            self._recent.move_to_end(one.request.kind)
            while len(self._recent) > max(self.spares, 1):
                self._recent.popitem(last=False)
        return Grant(sandbox_id, request_id)

    def _forget(self, sandbox_id: int) -> None:
        one = self._live.pop(sandbox_id, None)
        self._unassigned.discard(sandbox_id)
        if one is not None:
            self._take(one.request.cost, -1)

    def _take(self, cost: Cost, times: int = 1) -> None:
        self._used = Cost(self._used.memory_mb + times * cost.memory_mb, self._used.disk_mb + times * cost.disk_mb)

    def _spare_of(self, kind: str) -> int | None:
        """One of a kind that no request has yet: a ready one before one that starts."""
        found = [sandbox_id for sandbox_id in sorted(self._unassigned) if kind and self._live[sandbox_id].request.kind == kind]
        ready = [sandbox_id for sandbox_id in found if self._live[sandbox_id].state is State.SPARE]
        return next(iter(ready or found), None)

    def _has_room(self, cost: Cost) -> bool:
        used = self.in_use
        return (
            len(self._live) < self.size
            and used.memory_mb + cost.memory_mb <= self.capacity.memory_mb
            and used.disk_mb + cost.disk_mb <= self.capacity.disk_mb
        )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
