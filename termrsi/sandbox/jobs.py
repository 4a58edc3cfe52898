"""Blocking work of one sandbox in threads, known until it has done: that of a cancelled caller may still make something."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Jobs:
    """`asyncio.to_thread` whose threads `ended` waits for."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()  # Any: only waited for

    async def run(self, function: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """The function's result. `undo`: of what it gives to a caller that has gone."""
        job = asyncio.ensure_future(asyncio.to_thread(function))
        self._running.add(job)
        job.add_done_callback(self._running.discard)

        def left_behind(done: asyncio.Future[T]) -> None:
            if not done.cancelled() and done.exception() is None and undo is not None:
                undo(done.result())

        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(left_behind)
            raise

    async def ended(self) -> None:
        """Every thread has done, whatever became of it."""
        await asyncio.gather(*self._running, return_exceptions=True)
