"""Sampler: what is drawn when, in which order it comes out, what a lost group and an error do. Episodes end by hand here."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from termrsi.errors import EngineError, StageError
from termrsi.queues.store import GroupStore
from termrsi.records import EpisodeSpec, FinishedBatch, Flow, Rollout, ScoredRollout, StopReason, Verdict
from termrsi.report import logs
from termrsi.stages.base import Progress
from termrsi.stages.sampler import Accept, Sampler, rollouts_of


def scored(name: str) -> ScoredRollout:
    return ScoredRollout(Rollout(name, name, "task", "files", "react", (), (), StopReason.done), Verdict(True, 1.0))


class Bench:
    """A context whose groups run until `end` is called with what became of them."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self.cancelled: list[str] = []
        self.since: dict[str, int] = {}
        self.logged: dict[str, logs.Ids] = {}
        self.open: dict[str, asyncio.Future[list[ScoredRollout]]] = {}
        self.opened = asyncio.Event()
        self.ctx: Any = SimpleNamespace(
            name="rpr",
            groups=GroupStore(),
            progress=Progress(),
            costs=SimpleNamespace(rollout_s=0.0),
            episodes=self._episodes,
            version=7,
            clock=time.monotonic,
        )

    async def draw(self, number: int) -> Sequence[EpisodeSpec]:
        self.drawn.append(number)
        return []

    async def _episodes(
        self, specs: Sequence[EpisodeSpec], what: str, *, advance: Callable[[str], None], since: int
    ) -> list[ScoredRollout]:
        self.since[what] = since
        self.logged[what] = logs.current()
        self.open[what] = asyncio.get_running_loop().create_future()
        self.opened.set()
        try:
            found = await self.open[what]
        except asyncio.CancelledError:
            self.cancelled.append(what)
            raise
        for _ in found:
            advance("")
        return found

    def sampler(
        self,
        batches: int = 3,
        batch_groups: int = 2,
        max_staleness: int = 0,
        accept: Accept | None = None,
        **flow: Any,  # Any: of Flow
    ) -> Sampler:
        made = Flow(batch_groups, max_staleness, batches=batches, **flow)
        return Sampler(self.ctx, self.draw, made, batch_episodes=batch_groups, accept=accept)

    async def until_open(self, n: int) -> None:
        async with asyncio.timeout(10):
            while len(self.open) < n:
                self.opened.clear()
                await self.opened.wait()

    async def settle(self) -> None:
        """Everything that can run without another event has run."""
        for _ in range(50):
            await asyncio.sleep(0)

    def end(self, number: int, ok: bool = True) -> None:
        self.open[f"rpr/{number}"].set_result([scored(f"r{number}")] if ok else [])


def ids(batch: FinishedBatch) -> list[str]:
    return [s.rollout.id for s in rollouts_of(batch.groups)]


async def test_on_policy_the_next_batch_is_drawn_when_the_last_is_trained() -> None:
    bench = Bench()
    async with bench.sampler(batches=2) as sampler:
        await bench.until_open(2)
        bench.end(1)
        bench.end(0)
        assert ids(await sampler.batch("step 1")) == ["r0", "r1"]
        await bench.settle()
        assert bench.drawn == [0, 1]
        await sampler.trained()
        await bench.until_open(4)
        bench.end(2)
        bench.end(3)
        batch = await sampler.batch("step 2")
        assert ids(batch) == ["r2", "r3"]
        assert [g.staleness for g in batch.groups] == [0, 0]
        await sampler.trained()
        await bench.settle()
        assert bench.drawn == [0, 1, 2, 3]  # nothing beyond the batches that were asked for
    assert [bench.logged[f"rpr/{number}"]["step"] for number in range(4)] == [1, 1, 2, 2], "what its episodes log is of that step"


async def test_one_update_ahead_the_next_batch_runs_while_the_last_is_trained() -> None:
    bench = Bench()
    async with bench.sampler(max_staleness=1) as sampler:
        await bench.until_open(4)
        for number in (3, 2, 1, 0):
            bench.end(number)
        assert ids(await sampler.batch("step 1")) == ["r0", "r1"]
        await bench.settle()
        assert bench.drawn == [0, 1, 2, 3]
        await sampler.trained()
        assert [g.staleness for g in (await sampler.batch("step 2")).groups] == [1, 1]
        await bench.until_open(6)
    assert sorted(bench.cancelled) == ["rpr/4", "rpr/5"]  # leaving ends what still runs


async def test_a_lost_group_is_replaced_by_the_next() -> None:
    bench = Bench()
    async with bench.sampler(batches=1) as sampler:
        await bench.until_open(2)
        bench.end(0, ok=False)
        await bench.until_open(3)
        bench.end(2)
        bench.end(1)
        assert ids(await sampler.batch("step 1")) == ["r1", "r2"]
        assert bench.drawn == [0, 1, 2]


async def test_losses_with_a_success_between_them_do_not_end_the_run() -> None:
    bench = Bench()
    async with bench.sampler(batches=1) as sampler:
        await bench.until_open(2)
        for number, ok in ((0, False), (1, True), (2, False), (3, True)):
            await bench.until_open(number + 1)
            bench.end(number, ok=ok)
            await bench.settle()
        assert ids(await sampler.batch("step 1")) == ["r1", "r3"]


async def test_a_batch_of_lost_groups_in_a_row_is_an_error() -> None:
    bench = Bench()
    async with bench.sampler() as sampler:
        await bench.until_open(2)
        bench.end(0, ok=False)
        await bench.until_open(3)
        bench.end(1, ok=False)
        with pytest.raises(StageError, match="2 groups in a row"):
            await sampler.batch("step 1")
    assert bench.cancelled == ["rpr/2"]


async def test_a_refused_group_is_replaced_by_the_next() -> None:
    bench = Bench()
    async with bench.sampler(batches=1, replace=1, accept=lambda found: found[0].rollout.id != "r0") as sampler:
        for number in range(3):
            await bench.until_open(number + 1)
            bench.end(number)
            await bench.settle()
        assert ids(await sampler.batch("step 1")) == ["r1", "r2"]
    assert bench.drawn == [0, 1, 2]


async def test_ahead_of_the_learner_a_refused_group_is_replaced_at_once() -> None:
    """Two batches of two at once, the first and the third refused: the next two take their slots while nothing is trained."""
    bench = Bench()
    refused = {"r0", "r2"}
    async with bench.sampler(2, max_staleness=1, replace=2, accept=lambda found: found[0].rollout.id not in refused) as sampler:
        await bench.until_open(4)
        for number in range(4):
            bench.end(number)
        await bench.until_open(6)
        for number in (5, 4):
            bench.end(number)
        batch = await sampler.batch("step 1")
        assert ids(batch) == ["r1", "r3"]
        assert (batch.refused, batch.missing) == (("rpr/0", "rpr/2"), 0)
        await sampler.trained()
        batch = await sampler.batch("step 2")
        assert ids(batch) == ["r4", "r5"]
        assert [g.staleness for g in batch.groups] == [1, 1]
        await sampler.trained()
        await bench.settle()
        assert bench.drawn == [0, 1, 2, 3, 4, 5]


async def test_beyond_its_bound_a_step_goes_on_with_fewer_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    refused = {"r0", "r1", "r2"}
    async with bench.sampler(batches=2, batch_groups=3, replace=1, accept=lambda f: f[0].rollout.id not in refused) as sampler:
        for number in range(4):
            await bench.until_open(number + 1)
            bench.end(number)
            await bench.settle()
        assert bench.drawn == [0, 1, 2, 3]  # one was replaced
        with caplog.at_level(logging.WARNING):
            batch = await sampler.batch("step 1")
        assert ids(batch) == ["r3"]
        assert (batch.refused, batch.missing) == (("rpr/0", "rpr/1", "rpr/2"), 2)
        assert "a step of 1 groups instead of 3: all rewards of 3 others were equal" in caplog.text
        await sampler.trained()
        await bench.until_open(7)
        for number in (4, 5, 6):
            bench.end(number)
        assert ids(await sampler.batch("step 2")) == ["r4", "r5", "r6"]


async def test_a_step_without_a_group_ends_the_run() -> None:
    bench = Bench()
    async with bench.sampler(batch_groups=1, replace=2, accept=lambda _: False) as sampler:
        for number in range(3):
            await bench.until_open(number + 1)
            bench.end(number)
            await bench.settle()
        with pytest.raises(StageError, match="all 3 groups of a step had equal rewards") as caught:
            await sampler.batch("step 1")
    assert "replace_zero_variance" in caught.value.valid


async def test_extra_groups_run_while_the_oldest_is_waited_for_and_come_first_in_the_next_step() -> None:
    bench = Bench()
    async with bench.sampler(batches=2, max_staleness=1, extra=1) as sampler:
        await bench.until_open(3)
        bench.end(2)
        bench.end(1)
        waiting = asyncio.ensure_future(sampler.batch("step 1"))
        await bench.settle()
        assert not waiting.done()  # a long episode is not pushed out
        assert bench.drawn == [0, 1, 2]
        bench.end(0)
        assert ids(await waiting) == ["r0", "r1"]
        await sampler.trained()
        await bench.until_open(4)
        bench.end(3)
        batch = await sampler.batch("step 2")
        assert ids(batch) == ["r2", "r3"]
        assert [g.staleness for g in batch.groups] == [1, 0]


async def test_the_first_to_finish_where_that_is_asked_for() -> None:
    bench = Bench()
    async with bench.sampler(batches=2, max_staleness=1, extra=1, first=True) as sampler:
        await bench.until_open(3)
        bench.end(2)
        bench.end(1)
        assert ids(await sampler.batch("step 1")) == ["r1", "r2"]
        await sampler.trained()
        await bench.until_open(4)
        bench.end(3)
        waiting = asyncio.ensure_future(sampler.batch("step 2"))
        await bench.settle()
        assert not waiting.done()  # the one left behind would be too old in step 3
        bench.end(0)
        assert ids(await waiting) == ["r0", "r3"]


async def test_a_refused_group_stays_refused_when_the_stage_goes_on() -> None:
    """Ahead of the learner: what was looked past is part of the next step, and is not run again."""
    first = Bench()
    async with first.sampler(batches=2, max_staleness=1, replace=1, accept=lambda f: f[0].rollout.id != "r2") as sampler:
        await first.until_open(4)
        for number in (2, 0, 1):
            first.end(number)
        assert ids(await sampler.batch("step 1")) == ["r0", "r1"]
        await first.until_open(5)
        state = sampler.state()
        assert [(number, refused) for number, _, _, refused in state["open"]] == [(2, True), (3, False), (4, False)]
    again = Bench()
    sampler = again.sampler(batches=2, max_staleness=1, replace=1)
    sampler.restore(state)
    async with sampler:
        await again.until_open(2)
        assert again.drawn == [3, 4]
        for number in (3, 4):
            again.end(number)
        batch = await sampler.batch("step 2")
        assert (ids(batch), batch.refused) == (["r3", "r4"], ("rpr/2",))


async def test_a_dead_engine_reaches_whoever_waits_for_the_batch() -> None:
    bench = Bench()
    async with bench.sampler() as sampler:
        await bench.until_open(2)
        waiting = asyncio.ensure_future(sampler.batch("step 1"))
        await bench.settle()
        bench.open["rpr/0"].set_exception(EngineError("died", "generator"))
        with pytest.raises(EngineError, match="died"):
            await waiting
    assert bench.cancelled == ["rpr/1"]


async def test_an_error_before_the_batch_is_asked_for_is_kept_for_it() -> None:
    bench = Bench()

    async def fails(number: int) -> Sequence[EpisodeSpec]:
        raise StageError("no queue", "draw")

    bench.draw = fails  # type: ignore[method-assign]
    async with bench.sampler() as sampler:
        await bench.settle()
        with pytest.raises(StageError, match="no queue"):
            await sampler.batch("step 1")


async def test_it_goes_on_with_the_slots_that_it_had() -> None:
    """One update ahead; after a batch of which a group was refused, with two groups under way."""
    first = Bench()
    async with first.sampler(batches=3, max_staleness=1, replace=2, accept=lambda found: found[0].rollout.id != "r1") as sampler:
        await first.until_open(4)
        for number in (0, 1, 2):
            first.end(number)
        assert ids(await sampler.batch("step 1")) == ["r0", "r2"]
        await first.until_open(5)
        first.ctx.version = 8
        state = sampler.state()
        assert state == {"next": 5, "trained": 1, "open": [[3, 0, 7, False], [4, 0, 7, False]], "lost": 0}
        await sampler.trained()
        await first.settle()
        assert {**sampler.state(), "open": sampler.state()["open"][:2]} == state | {"next": 7}
    again = Bench()
    again.ctx.version = 8
    sampler = again.sampler(batches=3, max_staleness=1)
    sampler.restore(state)
    async with sampler:
        await again.until_open(4)
        assert again.drawn == [3, 4, 5, 6]
        assert again.since == {"rpr/3": 7, "rpr/4": 7, "rpr/5": 8, "rpr/6": 8}
        for number in (6, 5, 4, 3):
            again.end(number)
        batch = await sampler.batch("step 2")
        assert ids(batch) == ["r3", "r4"]
        assert [(g.version, g.staleness) for g in batch.groups] == [(0, 1), (0, 1)]
        await sampler.trained()
        assert ids(await sampler.batch("step 3")) == ["r5", "r6"]
        await sampler.trained()
        await again.settle()
        assert again.drawn == [3, 4, 5, 6]
