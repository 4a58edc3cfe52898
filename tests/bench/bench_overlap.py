"""Rollouts beside training where episodes have a heavy tail: who is at work, who waits, and whom a step sees.

`python -m tests.bench.bench_overlap [--steps N]` plays the sampler and the buffer of a run in virtual time: an episode is a draw
from a lognormal that holds one of the generator's slots, an update takes time in proportion to what it learns from. `--engine`:
episodes are turns on a real engine and the tiny model, with the tokens of the draw, and each step loads its weights anew; an update
is a wait, as long in proportion. All figures but those of lengths are of the steps after the first two.
"""

import argparse
import asyncio
import itertools
import random
import selectors
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from termrsi.actors.busy import Busy
from termrsi.queues.store import GroupStore
from termrsi.records import EpisodeSpec, FinishedBatch, Flow, Rollout, SamplingParams, ScoredRollout, StopReason, Verdict
from termrsi.sizing.simulation import Tail
from termrsi.stages.base import Progress
from termrsi.stages.sampler import Sampler

WARM_UP, EARLY = 2, 5  # steps
SECONDS = Tail(60.0, 1.0, 3600.0)
Play = Callable[[float], Awaitable[None]]  # an episode of that length


class _Selector(selectors.DefaultSelector):
    """Nothing is waited for: time goes on to the next event."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is left to wait for")
        self.now_s += 0.0 if ready else timeout or 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is its own."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


@dataclass(frozen=True, slots=True)
class Work:
    """`slots`: episodes at once. `learn`: seconds of an update, as a share of what its episodes take on all slots."""

    groups: int = 16
    group_size: int = 8
    slots: int = 32
    length: Tail = SECONDS
    learn: float = 0.6

    def lengths(self, group: int) -> list[float]:
        """Of the episodes of a group, whoever plays it."""
        source = random.Random(f"overlap/{group}")
        return [self.length.draw(source) for _ in range(self.group_size)]


@dataclass(slots=True)
class _Count:
    """Seconds of slots in use, since `begin_s`."""

    clock: Callable[[], float]
    running: int = 0
    total_s: float = 0.0
    at_s: float = 0.0
    begin_s: float = 0.0

    def change(self, by: int) -> None:
        now = self.clock()
        self.total_s += self.running * (now - self.at_s)
        self.running, self.at_s = self.running + by, now

    def restart(self) -> None:
        self.change(0)
        self.total_s, self.begin_s = 0.0, self.at_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of the time of the counted steps; `early`, `all`: mean length of what the first steps, and all, were trained on,
    against the same number of groups in the order of the stream. `late`: staleness of the longest tenth of the groups."""

    step_s: float
    slots: float
    learner: float
    waiting: float
    staleness: float
    oldest: int
    early: float
    all: float
    late: float


@dataclass(slots=True)
class _World:
    work: Work
    play: Play
    clock: Callable[[], float]
    used: _Count = field(init=False)
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.used, self.free = _Count(self.clock), asyncio.Semaphore(self.work.slots)

    async def draw(self, number: int) -> Sequence[EpisodeSpec]:
        return []

    async def episodes(self, specs: Sequence[EpisodeSpec], slot: str, **_: object) -> list[ScoredRollout]:
        lengths = self.work.lengths(int(slot.rpartition("/")[2]))
        await asyncio.gather(*(self._episode(length) for length in lengths))
        return [_scored(slot, place, length) for place, length in enumerate(lengths)]

    async def _episode(self, length: float) -> None:
        async with self.free:
            self.used.change(1)
            try:
                await self.play(length)
            finally:
                self.used.change(-1)


async def measure(
    work: Work, flow: Flow, *, steps: int, play: Play = asyncio.sleep, load: Callable[[int], Awaitable[None]] | None = None
) -> Outcome:
    """`steps` updates behind the first two. `load`: has the generator take new weights, at the end of an update."""
    clock = asyncio.get_running_loop().time
    world = _World(work, play, clock)
    ctx: Any = SimpleNamespace(  # Any: what a sampler asks of a Context
        name="overlap", groups=GroupStore(), progress=Progress(), costs=SimpleNamespace(rollout_s=0.0), episodes=world.episodes,
        version=0, clock=clock,
    )  # fmt: skip
    taken: list[FinishedBatch] = []
    learner, waited_s = Busy(clock), 0.0
    async with Sampler(ctx, world.draw, flow, batch_episodes=work.groups * work.group_size) as sampler:
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                world.used.restart()
                learner, waited_s = Busy(clock), ctx.costs.rollout_s
            batch = await sampler.batch("")
            taken.append(batch)
            with learner:
                await asyncio.sleep(work.learn * sum(_lengths([batch])) / work.slots)
            if load is not None:
                await load(step)
            await sampler.trained()
        world.used.change(0)
        wall_s = clock() - world.used.begin_s
    return _outcome(taken, work, steps, wall_s, world.used.total_s, learner.seconds, ctx.costs.rollout_s - waited_s)


def _outcome(
    taken: list[FinishedBatch], work: Work, steps: int, wall_s: float, used_s: float, learned_s: float, waited_s: float
) -> Outcome:
    groups = [group for batch in taken[WARM_UP:] for group in batch.groups]
    by_length = sorted(groups, key=lambda group: max(r.rollout.wall_s for r in group.rollouts))
    longest = by_length[-max(1, len(groups) // 10) :]
    return Outcome(
        wall_s / steps, used_s / wall_s / work.slots, learned_s / wall_s, waited_s / wall_s,
        sum(group.staleness for group in groups) / len(groups), max(group.staleness for group in groups),
        _against_order(taken[:EARLY], work), _against_order(taken, work), sum(group.staleness for group in longest) / len(longest),
    )  # fmt: skip


def _against_order(taken: list[FinishedBatch], work: Work) -> float:
    in_order = [length for group in range(sum(len(batch.groups) for batch in taken)) for length in work.lengths(group)]
    trained = _lengths(taken)
    return (sum(trained) / len(trained)) / (sum(in_order) / len(in_order))


def _lengths(taken: Sequence[FinishedBatch]) -> list[float]:
    return [r.rollout.wall_s for batch in taken for group in batch.groups for r in group.rollouts]


def _scored(slot: str, place: int, length: float) -> ScoredRollout:
    return ScoredRollout(
        Rollout(f"{slot}/{place}", slot, "task", "drawn", "react", (), (), StopReason.done, wall_s=length), Verdict(True, 1.0)
    )


def arms(groups: int, staleness: Sequence[int] = (0, 1, 2)) -> Iterator[tuple[str, Flow]]:
    """All that each staleness allows; a quarter and a half of a batch beyond the step's own, in order and as they finish."""
    for most in staleness:
        yield f"{most}", Flow(groups, most)
        for extra, first in itertools.product((groups // 4, groups // 2), (False, True)) if most else ():
            yield f"{most}, {extra} more, {'first' if first else 'fair'}", Flow(groups, most, extra, first=first)


def simulated(work: Work, flow: Flow, steps: int) -> Outcome:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measure(work, flow, steps=steps))


COLUMNS = (
    "max_staleness", "s per step", "ratio", "slots busy", "learner busy", "learner waits", "versions old: mean, most",
    "of the longest tenth", "length trained: first 5 steps, all",
)  # fmt: skip


def header() -> str:
    return f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def row(name: str, one: Outcome, first_s: float) -> str:
    cells = (
        name, f"{one.step_s:.0f}" if one.step_s >= 100 else f"{one.step_s:.1f}", f"{one.step_s / first_s:.2f}", f"{one.slots:.0%}",
        f"{one.learner:.0%}", f"{one.waiting:.0%}", f"{one.staleness:.2f}, {one.oldest}", f"{one.late:.2f}",
        f"{one.early:.2f}, {one.all:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


class Turns:
    """Episodes on an engine: turns of up to `turn` tokens on a history that grows, until the episode has its length in tokens."""

    def __init__(self, engine: Any, turn: int) -> None:  # Any: an `actors.generator.Engine`, of a process with vLLM alone
        self._engine, self._turn, self._episodes = engine, turn, itertools.count()

    async def __call__(self, length: float) -> None:
        number, wanted = next(self._episodes), max(1, round(length))
        history = [5 + (7 * number + k) % 200 for k in range(32)]
        beginning = len(history)
        while (left := wanted - (len(history) - beginning)) > 0:
            said = await self._engine.generate(history, SamplingParams(max_tokens=min(left, self._turn), seed=number))
            history += said.ids


async def on_an_engine(work: Work, flows: Sequence[tuple[str, Flow]], steps: int) -> None:
    from termrsi.actors.generator import Engine, EngineOptions
    from termrsi.model.checkpoint import tiny_model

    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_model(Path(folder) / "tiny")
        options = EngineOptions(max_model_len=2048, max_num_seqs=work.slots, kv_cache_gib=1, enforce_eager=True, threads=1)
        engine = Engine(str(tiny), options)
        try:
            play, versions = Turns(engine, 128), itertools.count(1)
            seconds = await _pace(work, play)
            paced = replace(work, learn=work.learn * seconds)

            async def load(_: int) -> None:
                await engine.load_directory(str(tiny), next(versions))

            first_s = 0.0
            for name, flow in flows:
                before = dict(engine.stats)
                one = await measure(paced, flow, steps=steps, play=play, load=load)
                first_s = first_s or one.step_s
                spent = {kind: total - before[kind] for kind, total in engine.stats.items()}
                cached = spent["cached_tokens"] / spent["prompt_tokens"]
                say(f"{row(name, one, first_s)} {spent['completion_tokens']:.0f} tokens, {cached:.0%} of prompts cached")
        finally:
            engine.close()


async def _pace(work: Work, play: Play) -> float:
    """Seconds that a token takes in a slot when all are in use."""
    start_s = time.monotonic()
    await asyncio.gather(*(play(64.0) for _ in range(work.slots)))
    return (time.monotonic() - start_s) / 64.0


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 what a benchmark is for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    given = parser.parse_args()
    say(header())
    if given.engine:
        work = Work(4, 4, 8, Tail(48.0, 1.0, 1200.0))
        flows = [(name, flow) for name, flow in arms(work.groups) if flow.extra in (-1, 2)]
        asyncio.run(on_an_engine(work, flows, given.steps or 6))
        return
    work, first_s = Work(), 0.0
    for name, flow in arms(work.groups):
        one = simulated(work, flow, given.steps or 60)
        first_s = first_s or one.step_s
        say(row(name, one, first_s))


if __name__ == "__main__":
    main()
