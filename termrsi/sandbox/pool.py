"""Sandbox pool as a state machine: facts in, commands out; no Ray, no sockets, no clock of its own.

The host does the I/O and brings the time. A request for a task's machine or a snapshot waits its turn, first come first
served, until one of `size` places is free; then a sandbox is STARTING, LEASED, and CLOSING until its end has been seen.

Invariants: never more than `size` sandboxes that are not gone; an id closed is closed by exactly one command, and its place
is free after `closed`; a request is answered once (granted, failed, or withdrawn); facts about one that has left are ignored.
"""

import enum
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field


class State(enum.Enum):
    STARTING = enum.auto()
    LEASED = enum.auto()
    CLOSING = enum.auto()


@dataclass(frozen=True, slots=True)
class Start:
    """Start a sandbox for this request."""

    sandbox_id: int
    what: str  # the task or snapshot


@dataclass(frozen=True, slots=True)
class Grant:
    """The request's sandbox is ready: hand it over."""

    sandbox_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close this sandbox, then tell `closed`."""

    sandbox_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Late:
    """A lease held too long: named by the watchdog, closed by a `Close` beside it."""

    sandbox_id: int
    what: str
    state: State
    held_s: float


Command = Start | Grant | Close | Late


@dataclass(slots=True)
class Pool:
    """`limit_s`: the longest stay in a state; one that is absent has no limit."""

    size: int
    limit_s: Mapping[State, float] = field(default_factory=dict)
    _waiting: OrderedDict[int, str] = field(default_factory=OrderedDict, init=False)
    _live: dict[int, tuple[State, float, str]] = field(default_factory=dict, init=False)
    _next_id: int = field(default=0, init=False)
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

    def request(self, what: str, now_s: float) -> tuple[int, list[Command]]:
        """A new request; its id is the sandbox's. Raises ValueError once the pool has stopped."""
        if self._stopped:
            raise ValueError("the pool is closed")
        sandbox_id = self._next_id
        self._next_id += 1
        self._waiting[sandbox_id] = what
        return sandbox_id, self._fill(now_s)

    def started(self, sandbox_id: int, now_s: float) -> list[Command]:
        if sandbox_id not in self._live or self._live[sandbox_id][0] is State.CLOSING:
            return []
        state, _, what = self._live[sandbox_id]
        assert state is State.STARTING, f"sandbox {sandbox_id} started twice"
        self._live[sandbox_id] = (State.LEASED, now_s, what)
        return [Grant(sandbox_id)]

    def release(self, sandbox_id: int, reason: str, now_s: float) -> list[Command]:
        """Released, failed to start, lost, or its requester gave up: closed exactly once, or out of the queue."""
        self._waiting.pop(sandbox_id, None)
        if sandbox_id not in self._live or self._live[sandbox_id][0] is State.CLOSING:
            return []
        self._live[sandbox_id] = (State.CLOSING, now_s, self._live[sandbox_id][2])
        return [Close(sandbox_id, reason)]

    def closed(self, sandbox_id: int, now_s: float) -> list[Command]:
        """The end of a sandbox has been seen: its place is free."""
        self._live.pop(sandbox_id, None)
        return self._fill(now_s)

    def tick(self, now_s: float) -> list[Command]:
        """Names and closes what has been in a state too long; one that is slow to close is named again on each tick."""
        commands: list[Command] = []
        for sandbox_id, (state, since_s, what) in list(self._live.items()):
            held_s = now_s - since_s
            if held_s > self.limit_s.get(state, math.inf):
                commands.append(Late(sandbox_id, what, state, held_s))
                commands += self.release(sandbox_id, f"{state.name.lower()} too long", now_s)
        return commands

    def stop(self, now_s: float) -> list[Command]:
        """No request is taken or started any more; everything live is closed."""
        self._stopped = True
        self._waiting.clear()
        return [command for sandbox_id in list(self._live) for command in self.release(sandbox_id, "pool closed", now_s)]

    def _fill(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        while self._waiting and len(self._live) < self.size and not self._stopped:
            sandbox_id, what = self._waiting.popitem(last=False)
            self._live[sandbox_id] = (State.STARTING, now_s, what)
            commands.append(Start(sandbox_id, what))
        return commands
