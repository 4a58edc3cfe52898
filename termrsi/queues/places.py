"""Several actors that can stand for each other (nodes of sandboxes, rollout workers): which gets the next job, which is left out.

One that is lost is left out for a pause that doubles with each loss in a row, then tried again: so what replaces it is taken up.
One that answers and cannot do its jobs is passed over for as long, but only while another can be had: with none it is all there is.
One that is gone comes back no more. The rule is ours.
"""

import math
from collections.abc import Set
from dataclasses import dataclass


@dataclass(slots=True)
class _Place:
    name: str
    jobs: int = 0  # begun and not ended
    begun: int = 0
    not_before_s: float = -math.inf
    losses: int = 0  # in a row
    lost_s: float | None = None  # since when; None: it answers
    gone: bool = False
    why: str = ""
    faults: int = 0  # jobs in a row that it could not do
    passed_until_s: float = -math.inf


class Places:
    """A plain state machine; who calls it brings the time."""

    def __init__(self, names: list[str], *, first_pause_s: float = 0.5, longest_pause_s: float = 30.0) -> None:
        """Raises ValueError without a place."""
        if not names:
            raise ValueError("no place to work at")
        self._places = [_Place(name) for name in names]
        self._first_s, self._longest_s = first_pause_s, longest_pause_s

    def begin(self, now_s: float, among: frozenset[int] | None = None) -> int | None:
        """The place for one more job, to be given back to `end`; None: all of them are left out. `among`: no others.

        The one with the fewest jobs, and of equals the one that was given fewest so far.
        """
        up = [i for i in self.open(now_s) if among is None or i in among]
        able = [i for i in up if now_s >= self._places[i].passed_until_s]
        if not up:
            return None
        found = min(able or up, key=lambda i: (self._places[i].jobs, self._places[i].begun, i))
        self._places[found].jobs += 1
        self._places[found].begun += 1
        return found

    def end(self, place: int) -> None:
        self._places[place].jobs -= 1

    def open(self, now_s: float) -> list[int]:
        """Those that are not left out."""
        return [i for i, one in enumerate(self._places) if not one.gone and now_s >= one.not_before_s]

    def up(self) -> list[int]:
        """Those that have answered since they were lost last, if they ever were."""
        return [i for i, one in enumerate(self._places) if not one.gone and one.lost_s is None]

    def lost(self, place: int, now_s: float, why: str) -> bool:
        """It could not be reached. Jobs that were lost together count once: False for all but the first of them."""
        one = self._places[place]
        if one.gone or now_s < one.not_before_s:
            return False
        one.losses += 1
        one.not_before_s = now_s + self._pause_s(one.losses)
        first = one.lost_s is None
        if first:
            one.lost_s = now_s
        one.why = why
        return first

    def failed(self, place: int, now_s: float) -> None:
        """It answers, and could not do its job. Jobs that failed together count once."""
        one = self._places[place]
        if now_s >= one.passed_until_s:
            one.faults += 1
            one.passed_until_s = now_s + self._pause_s(one.faults)

    def served(self, place: int) -> None:
        """It did a job."""
        one = self._places[place]
        one.faults, one.passed_until_s = 0, -math.inf

    def gone(self, place: int, now_s: float, why: str) -> bool:
        """It is lost for good; whether that is news."""
        one = self._places[place]
        known = one.gone
        self.lost(place, now_s, why)
        one.gone, one.why = True, why
        return not known

    def heard(self, place: int, name: str = "") -> bool:
        """It answers, and is called so from now on. Whether it had been lost."""
        one = self._places[place]
        was_lost = one.lost_s is not None
        if one.gone:
            return False
        one.name = name or one.name
        one.losses, one.not_before_s, one.lost_s, one.why = 0, -math.inf, None, ""
        return was_lost

    def name(self, place: int) -> str:
        return self._places[place].name

    def is_gone(self, place: int) -> bool:
        return self._places[place].gone

    def away(self, now_s: float, within_s: float = math.inf) -> list[int]:
        """Those that do not answer, are not gone, and were lost less than `within_s` ago."""
        return [
            i for i, one in enumerate(self._places) if not one.gone and one.lost_s is not None and now_s - one.lost_s < within_s
        ]

    def none_since_s(self, now_s: float) -> float:
        """For how long not one has answered; 0 if one does."""
        since = [one.lost_s for one in self._places]
        return 0.0 if None in since else now_s - max(one for one in since if one is not None)

    def none_left(self) -> bool:
        """All are gone."""
        return all(one.gone for one in self._places)

    def next_s(self, now_s: float, among: Set[int] | None = None) -> float:
        """Seconds until one that is left out is tried again; 0 if one is open, infinity if all are gone. `among`: no others."""
        asked = [one for i, one in enumerate(self._places) if among is None or i in among]
        return max(0.0, min((one.not_before_s for one in asked if not one.gone), default=math.inf) - now_s)

    def told(self, now_s: float) -> str:
        """Those that are lost, each with the time since and the reason."""
        lost = [one for one in self._places if one.lost_s is not None]
        return ", ".join(f"{one.name} for {now_s - (one.lost_s or 0.0):.0f} s ({one.why})" for one in lost)

    def _pause_s(self, times: int) -> float:
        return min(self._first_s * 2.0 ** min(times - 1, 30), self._longest_s)
