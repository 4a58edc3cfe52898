"""How long a part was at work: the time in which it had one job or more, however many at once."""

import time
from collections.abc import Callable
from types import TracebackType


class Busy:
    """Entered by each job. `seconds`: so far, the stretch that is under way included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs = 0
        self._since_s = 0.0
        self._done_s = 0.0

    @property
    def seconds(self) -> float:
        return self._done_s + (self._clock() - self._since_s if self._jobs else 0.0)

    def __enter__(self) -> None:
        if self._jobs == 0:
            self._since_s = self._clock()
        self._jobs += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._jobs -= 1
        if self._jobs == 0:
            self._done_s += self._clock() - self._since_s
