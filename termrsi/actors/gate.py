"""A gate that requests pass, and for how long it was shut: what a request waited for is the machine's time, not an agent's."""

import asyncio
import time
from collections.abc import Callable


class Gate:
    """Open at first. `open` and `shut` twice are as once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passable = asyncio.Event()
        self._passable.set()
        self._since_s = 0.0
        self._shut_s = 0.0

    @property
    def shut_s(self) -> float:
        """Seconds in which it was shut so far, those until now included if it is."""
        return self._shut_s + (0.0 if self._passable.is_set() else self._clock() - self._since_s)

    async def passed(self) -> None:
        await self._passable.wait()

    def open(self) -> None:
        self._shut_s = self.shut_s
        self._passable.set()

    def shut(self) -> None:
        if self._passable.is_set():
            self._since_s = self._clock()
            self._passable.clear()
