"""Blocking work of one sandbox in threads, known until it has done: that of a cancelled caller may still make something."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from termrsi.ports import Sandbox

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


async def all_started(boxes: Sequence[Sandbox]) -> None:
    """Starts all at once. Whatever keeps one from it, a cancellation too, none is left."""
    starts = [asyncio.ensure_future(box.start()) for box in boxes]
    try:
        await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)
        raise


def failed(done: "asyncio.Future[Any]") -> bool:  # Any: whatever it was to give
    """Whether a future that is done has not done what it was for."""
    return done.cancelled() or done.exception() is not None
