"""Where each episode under way stands, for a watchdog to name what is late. One owner: the runner that plays them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Standing:
    """`turn`: the last one begun, from 1; 0: none yet. `sandbox`: its id; "": none yet. `held_s`: seconds in `what`."""

    episode: str
    attempt: int
    turn: int
    what: str
    sandbox: str = ""
    held_s: float = 0.0

    def told(self, node: str = "") -> str:
        """One line. `node`: where the sandbox stands."""
        turn = f", turn {self.turn}" if self.turn else ""
        place = f" in sandbox {self.sandbox}" + (f" on {node}" if node else "") if self.sandbox else ""
        return f"episode {self.episode} (attempt {self.attempt}{turn}) has been {self.what} for {self.held_s:.0f} s{place}"


class Progress:
    """A plain table of those under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._standing: dict[str, Standing] = {}
        self._since_s: dict[str, float] = {}

    def begin(self, episode: str, attempt: int) -> None:
        self._set(Standing(episode, attempt, 0, "waiting for a sandbox"))

    def at(self, episode: str, what: str, *, sandbox: str = "", turns: int = 0) -> None:
        """It does something else from now on, in this sandbox, so many turns further. One that is not under way: nothing."""
        if (one := self._standing.get(episode)) is not None:
            self._set(replace(one, what=what, turn=one.turn + turns, sandbox=sandbox or one.sandbox))

    def end(self, episode: str) -> None:
        self._standing.pop(episode, None)
        self._since_s.pop(episode, None)

    def late(self, limit_s: float) -> list[Standing]:
        """Those that have done one thing for longer, the longest first."""
        now_s = self._clock()
        held = [replace(one, held_s=now_s - self._since_s[name]) for name, one in self._standing.items()]
        return sorted((one for one in held if one.held_s > limit_s), key=lambda one: -one.held_s)

    def _set(self, standing: Standing) -> None:
        self._standing[standing.episode] = standing
        self._since_s[standing.episode] = self._clock()
