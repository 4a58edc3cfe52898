"""Rollouts ahead of the learner: groups enter the buffer as slots allow, run, and come out in batches, oldest first.

Two sides. The filler waits for a free slot (the learner's `trained`, or a dropped group, ends that wait) and starts the next
group's episodes; `batch` waits for the oldest groups (their last episode ends that wait). How far ahead rollouts run is the
buffer's `max_staleness`; with 0 a batch is sampled whole by the weights that it updates.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from termrsi.errors import StageError
from termrsi.records import EpisodeSpec, FinishedGroup, ScoredRollout
from termrsi.stages.base import Context

Draw = Callable[[int], Awaitable[Sequence[EpisodeSpec]]]  # the episodes of slot number 0, 1, ...
Accept = Callable[[Sequence[ScoredRollout]], bool]
PATIENCE = 10  # batches of groups in a row that may be refused


class Sampler:
    """Use as `async with`: on leaving, what still runs is cancelled and its clean-up waited for.

    `draw` is called in order, once a slot is free, so that it sees what the learner has done until then. A group none of whose
    episodes survived the machine is replaced by the next one; `batch_groups` of them in a row raise StageError, because the next
    would fare no better. So is a group that `accept` refuses; `PATIENCE` batches of them in a row raise StageError. `batches`: how
    many will be asked for; nothing is sampled beyond.
    """

    def __init__(
        self,
        ctx: Context,
        draw: Draw,
        *,
        batches: int,
        batch_groups: int,
        max_staleness: int,
        batch_episodes: int,
        accept: Accept | None = None,
    ) -> None:
        self._ctx = ctx
        self._draw = draw
        self._batches, self._batch_groups, self._max_staleness = batches, batch_groups, max_staleness
        self._batch_episodes = batch_episodes  # for the progress bar alone
        self._running: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None]
        self._next_slot = asyncio.Lock()
        self._slots = 0
        self._lost_in_a_row = 0
        self._accept, self._refused_in_a_row = accept, 0
        self._bar = False
        self._ahead = 0  # episodes that finished while no batch was waited for

    async def __aenter__(self) -> "Sampler":
        await self._ctx.groups.reset(self._batch_groups, self._max_staleness)
        self._failed = asyncio.get_running_loop().create_future()
        self._start(self._fill())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # seen: whoever waited for a batch raised it, or another error is on its way
        self._failed.cancel()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ctx.groups.reset(1, 0)

    async def batch(self, what: str) -> list[FinishedGroup]:
        """The next `batch_groups` groups in the order they were admitted. Raises what stopped the sampling."""
        ctx, start_s = self._ctx, time.monotonic()
        ctx.progress.begin(what, self._batch_episodes)
        self._bar = True
        for _ in range(self._ahead):
            ctx.progress.advance()
        self._ahead = 0
        taking = asyncio.ensure_future(ctx.groups.take())
        try:
            await asyncio.wait([taking, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await taking
        finally:
            taking.cancel()
            self._bar = False
            ctx.progress.end()
            ctx.costs.rollout_s += time.monotonic() - start_s

    async def trained(self) -> None:
        """The learner is done with the last batch and the generator serves the new weights."""
        await self._ctx.groups.trained()

    def _start(self, job: Awaitable[None]) -> None:
        task = asyncio.ensure_future(job)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = StageError("sampling was cancelled", self._ctx.name) if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():  # `__aexit__` has ended the future before it cancels
            self._failed.set_exception(error)

    async def _fill(self) -> None:
        for _ in range(self._batches * self._batch_groups):
            await self._begin_next()

    async def _begin_next(self) -> None:
        async with self._next_slot:
            number = self._slots
            self._slots += 1
            slot = f"{self._ctx.name}/{number}"
            await self._ctx.groups.admit(slot)
            specs = await self._draw(number)
        self._start(self._run(slot, specs))

    async def _run(self, slot: str, specs: Sequence[EpisodeSpec]) -> None:
        scored = await self._ctx.episodes(specs, slot, advance=self._advance)
        if scored:
            self._lost_in_a_row = 0
            if self._accept is None or self._accept(scored):
                self._refused_in_a_row = 0
                await self._ctx.groups.put(slot, scored)
                return
            self._refuse()
        else:
            self._lose()
        await self._ctx.groups.drop(slot)
        await self._begin_next()

    def _lose(self) -> None:
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= self._batch_groups:
            raise StageError(
                f"no rollout of {self._lost_in_a_row} groups in a row survived",
                self._ctx.name,
                "see the dropped episodes in rollouts.jsonl",
            )

    def _refuse(self) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= PATIENCE * self._batch_groups:
            raise StageError(
                f"{self._refused_in_a_row} groups in a row had equal rewards",
                self._ctx.name,
                "tasks that sometimes work, larger groups, or only_contrast=false",
            )

    def _advance(self, note: str) -> None:
        if self._bar:
            self._ctx.progress.advance(note)
        else:
            self._ahead += 1


def rollouts_of(groups: Sequence[FinishedGroup]) -> list[ScoredRollout]:
    return [rollout for group in groups for rollout in group.rollouts]
