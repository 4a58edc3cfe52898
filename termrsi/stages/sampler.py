"""Rollouts ahead of the learner: groups enter the buffer as slots allow, run, and come out in batches, oldest first.

Two sides. The filler waits for a free slot (the learner's `trained`, a group of no use or a dropped one ends that wait) and starts
the next group's episodes; `batch` waits for its groups (their last episode ends that wait). How far ahead rollouts run is what the
`Flow` says; with a `max_staleness` of 0 a batch is sampled whole by the weights that it updates.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from termrsi.errors import StageError
from termrsi.records import EpisodeSpec, FinishedBatch, FinishedGroup, Flow, ScoredRollout
from termrsi.report import logs
from termrsi.stages.base import Context

Draw = Callable[[int], Awaitable[Sequence[EpisodeSpec]]]  # the episodes of slot number 0, 1, ...
Accept = Callable[[Sequence[ScoredRollout]], bool]
_LOG = logging.getLogger(__name__)


class Sampler:
    """Use as `async with`: on leaving, what still runs is cancelled and its clean-up waited for.

    `draw` is called in order, once a slot is free, so that it sees what the learner has done until then. A group none of whose
    episodes survived the machine is replaced by the next one; `batch_groups` of them in a row raise StageError, because the next
    would fare no better. A group that `accept` refuses is replaced as far as `flow.replace` goes; a batch of which none is left
    raises StageError. Nothing is begun that is of no batch: `flow.batches` says how many will be asked for.
    """

    def __init__(self, ctx: Context, draw: Draw, flow: Flow, *, batch_episodes: int, accept: Accept | None = None) -> None:
        self._ctx = ctx
        self._draw = draw
        self._flow = flow
        self._batch_episodes = batch_episodes  # for the progress bar alone
        self._running: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None]
        self._next = 0  # number of the slot that is admitted next
        # Not trained, not dropped: learner's and generator's version at admission, and whether the group was refused.
        self._open: dict[int, tuple[int, int, bool]] = {}
        self._training: list[int] = []
        self._trained = 0  # batches
        self._lost_in_a_row = 0
        self._accept = accept
        self._bar = False
        self._ahead = 0  # episodes that finished while no batch was waited for

    async def __aenter__(self) -> "Sampler":
        held = [(self._slot(number), born, refused) for number, (born, _, refused) in self._open.items()]
        await self._ctx.groups.reset(self._flow, self._trained, held)
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
        await self._ctx.groups.reset(Flow(1))

    async def batch(self, what: str) -> FinishedBatch:
        """The next batch, its groups in the order they were admitted. Raises what stopped the sampling."""
        ctx, start_s = self._ctx, self._ctx.clock()
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
            batch = await taking
            self._training = [_number(slot) for slot in (*batch.refused, *(group.group_id for group in batch.groups))]
            self._check(batch)
            return batch
        finally:
            taking.cancel()
            self._bar = False
            ctx.progress.end()
            ctx.costs.rollout_s += ctx.clock() - start_s

    async def trained(self) -> None:
        """The learner is done with the last batch and the generator serves the new weights."""
        for number in self._training:
            del self._open[number]
        self._training = []
        self._trained += 1
        await self._ctx.groups.trained()

    def state(self) -> dict[str, Any]:
        """JSON, for `restore`: as all stands once the batch that was handed out last is `trained`.

        Of a group that is sampled, or waits for its batch, no more than its slot: its episodes are found again where they were
        written, and those that had not finished are run again. One that was refused stays so.
        """
        waiting = [[number, *versions] for number, versions in self._open.items() if number not in self._training]
        return {
            "next": self._next,
            "trained": self._trained + bool(self._training),
            "open": waiting,
            "lost": self._lost_in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Before `async with`."""
        self._next, self._trained = state["next"], state["trained"]
        self._open = {number: (born, since, refused) for number, born, since, refused in state["open"]}
        self._lost_in_a_row = state["lost"]

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
        for number in [number for number, (_, _, refused) in self._open.items() if not refused]:  # those that had a slot before
            self._start(self._run(number, await self._draw(number)))
        while True:  # what is of no batch waits until `__aexit__`
            number = self._next
            await self._ctx.groups.admit(self._slot(number))
            self._next += 1
            self._open[number] = (self._trained, self._ctx.version, False)
            self._start(self._run(number, await self._draw(number)))

    def _slot(self, number: int) -> str:
        return f"{self._ctx.name}/{number}"

    async def _run(self, number: int, specs: Sequence[EpisodeSpec]) -> None:
        slot, (born, since, _) = self._slot(number), self._open[number]
        with logs.ids(step=born + 1):  # that during which it began: the one that trains on it may be a later one
            scored = await self._ctx.episodes(specs, slot, advance=self._advance, since=since)
        if not scored:
            self._lose()
            del self._open[number]
            await self._ctx.groups.drop(slot)
            return
        self._lost_in_a_row = 0
        if self._accept is None or self._accept(scored):
            await self._ctx.groups.put(slot, scored)
            return
        self._open[number] = (born, since, True)  # at once with the verdict: a checkpoint has both or neither
        await self._ctx.groups.refuse(slot)

    def _lose(self) -> None:
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= self._flow.batch_groups:
            raise StageError(
                f"no rollout of {self._lost_in_a_row} groups in a row survived",
                self._ctx.name,
                "see the dropped episodes in rollouts.jsonl",
            )

    def _check(self, batch: FinishedBatch) -> None:
        if not batch.groups:
            raise StageError(
                f"all {len(batch.refused)} groups of a step had equal rewards",
                self._ctx.name,
                "tasks that sometimes work, larger groups, a larger replace_zero_variance, or 0",
            )
        if batch.missing:
            told = (self._ctx.name, len(batch.groups), self._flow.batch_groups, len(batch.refused))
            _LOG.warning("%s: a step of %d groups instead of %d: all rewards of %d others were equal", *told)

    def _advance(self, note: str) -> None:
        if self._bar:
            self._ctx.progress.advance(note)
        else:
            self._ahead += 1


def _number(slot: str) -> int:
    return int(slot.rpartition("/")[2])


def rollouts_of(groups: Sequence[FinishedGroup]) -> list[ScoredRollout]:
    return [rollout for group in groups for rollout in group.rollouts]
