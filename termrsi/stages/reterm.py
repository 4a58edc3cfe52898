"""ReTerm-GRPO (arXiv 2610.18484): original groups from a task's initial state, recovery groups from the policy's own failures.

Per step: M_O original groups and up to M_R recovery groups, taken from a queue, newest first; one update over both; then each
original group with a failure gives one restart point, drawn at a later step. Advantages are relative inside each group; the loss
is the mean over rollouts of token means, over all groups. What the paper leaves open follows our definitions (capacity; smaller M_R
when the queue is short) or is a setting: whether a point is drawn once (`pop`), whether failed recoveries become points
(`requeue_recovery_failures`), whether groups of equal rewards count (`zero_std_in_denominator`).
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from termrsi.config.stages import RetermConfig
from termrsi.errors import StageError
from termrsi.harness.group import fits, recovery_group
from termrsi.records import EpisodeSpec, FinishedBatch, Flow, RecoveryPoint, ScoredRollout, Snapshot, TaskSpec
from termrsi.stages import credit, monitors, phase
from termrsi.stages.anchor import learn
from termrsi.stages.base import Context, Rewarder, StageResult, write_json
from termrsi.stages.points import is_start, point_of, reserve
from termrsi.stages.rollin import HARNESS, StepTasks, specs_of
from termrsi.stages.sampler import Sampler

_LOG = logging.getLogger(__name__)


async def run(ctx: Context, config: RetermConfig) -> StageResult:
    """Writes `policy/`, `retention.json` and `steps.json` (reward on original and recovery groups per step)."""
    if ctx.queue is None:
        raise StageError("no recovery queue", ctx.name)
    await ctx.rollouts.discard([p.snapshot for p in await ctx.queue.reset(config.capacity)])
    loop = _Loop(ctx, config)
    try:
        keeper = await phase.play(
            ctx, loop, steps=config.steps, retention=config.retention, checkpoint_every=config.checkpoint_every
        )
    except BaseException:
        if not loop.goes_on:
            await loop.discard_points()
        raise
    await loop.discard_points()
    write_json(ctx.out / "steps.json", loop.log)
    own: phase.Summary = {
        "original_first": loop.log[0]["original"],
        "original_last": loop.log[-1]["original"],
        "recovery_groups": sum(int(entry["recovery_groups"] or 0) for entry in loop.log),
        "recovery_mean": _mean([e["recovery"] for e in loop.log if e["recovery"] is not None]),
    }
    return phase.result(ctx, keeper, config.steps, own, "policy")


class _Loop:
    def __init__(self, ctx: Context, config: RetermConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._rewarder = Rewarder(ctx, config.reward)
        self._tasks = StepTasks(ctx, config.original_groups)
        self._drawn: dict[int, tuple[list[TaskSpec], list[RecoveryPoint]]] = {}
        self._spent: dict[str, RecoveryPoint] = {}  # out of the queue for good, drawn by a step that is not trained
        self._free: list[tuple[int, Snapshot]] = []  # needed by nothing from this step on, but by a checkpoint before it
        self._queueing = asyncio.Lock()  # what is pushed out between a look and its note in `_drawn` would be freed under it
        self.log: list[dict[str, float | None]] = []
        self.goes_on = ctx.finished is not None and config.checkpoint_every > 0  # after a stop, with the states it left

    def sampler(self) -> Sampler:
        """One slot of the buffer holds a whole step: how many groups it has depends on the queue when it is drawn."""
        config = self._config
        episodes = (config.original_groups + config.recovery_groups) * config.group_size
        flow = Flow(1, config.max_staleness, batches=config.steps)
        return Sampler(self._ctx, self._draw, flow, batch_episodes=episodes)

    async def _draw(self, number: int) -> Sequence[EpisodeSpec]:
        ctx, config, step = self._ctx, self._config, number + 1
        assert ctx.queue is not None, "checked by run"
        tasks = self._tasks.of(step)
        async with self._queueing:
            if step not in self._drawn:  # else it was, before the stage was stopped
                await self._weed(config.recovery_groups)
                points = await (ctx.queue.take if config.pop else ctx.queue.peek)(config.recovery_groups)
                self._drawn[step] = (tasks, points)  # a lost step ends the run, so slots and steps count alike
        _, points = self._drawn[step]
        original = specs_of(ctx, tasks, step, config.group_size, config.optim.temperature, keep_snapshot=True)
        return [*original, *(spec for point in points for spec in self._recovery(point, step))]

    async def _weed(self, n: int) -> None:
        """Drops the points whose snapshots are gone, with a lost node, if any of those is among the next `n`; how many is told."""
        ctx = self._ctx
        assert ctx.queue is not None, "checked by run"
        coming = await ctx.queue.peek(n)
        if len(await self._kept(coming)) == len(coming):
            return
        queue = await ctx.queue.take(self._config.capacity)
        kept = await self._kept(queue)
        await ctx.queue.push(list(reversed(kept)))
        self._lost(len(queue) - len(kept), len(queue))

    async def _kept(self, points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        """Those that can still be started from."""
        kept = {snapshot.id for snapshot in await self._ctx.rollouts.kept([point.snapshot for point in points])}
        return [point for point in points if point.snapshot.id in kept]

    def _lost(self, lost: int, of: int) -> None:
        if lost:
            _LOG.warning("%s: %d of %d restart points are dropped: their snapshots are gone", self._ctx.name, lost, of)
        self._ctx.log(self._ctx.name, {"points_lost": float(lost)})

    async def step(self, step: int, taken: FinishedBatch) -> None:
        (whole,) = taken.groups
        scored, config = list(whole.rollouts), self._config
        tasks, points = self._drawn.pop(step)
        self._spend(points if config.pop else [], step)
        await self._learn(scored, step)
        starts = scored if config.requeue_recovery_failures else [s for s in scored if not s.rollout.recovery_id]
        await self._push(starts, {t.id: t for t in tasks}, {p.id: p.task for p in points}, step)
        self._report(scored, len(tasks), len(points), step)

    async def state(self) -> dict[str, Any]:
        assert self._ctx.queue is not None, "checked by run"
        async with self._queueing:
            queue = await self._ctx.queue.peek(self._config.capacity)
            drawn = [[step, [asdict(point) for point in points]] for step, (_, points) in self._drawn.items()]
        return {
            "queue": [asdict(point) for point in queue],
            "drawn": drawn,
            "spent": [asdict(point) for point in self._spent.values()],
            "free": [[step, asdict(snapshot)] for step, snapshot in self._free],
            "log": list(self.log),
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Points whose snapshot is gone are dropped; how many is told."""
        ctx = self._ctx
        assert ctx.queue is not None, "checked by run"
        self.log = state["log"]
        self._free = [(step, TypeAdapter(Snapshot).validate_python(snapshot)) for step, snapshot in state["free"]]
        queue, drawn = _points(state["queue"]), [(step, _points(points)) for step, points in state["drawn"]]
        asked = {point.snapshot.id: point.snapshot for point in [*queue, *(point for _, points in drawn for point in points)]}
        kept = {snapshot.id for snapshot in await ctx.rollouts.kept(list(asked.values()))}
        await ctx.queue.push([point for point in reversed(queue) if point.snapshot.id in kept])
        self._drawn = {step: (self._tasks_again(step), [p for p in points if p.snapshot.id in kept]) for step, points in drawn}
        self._spent = {point.id: point for point in _points(state["spent"])}
        self._lost(len(asked) - len(kept), len(asked))

    def _tasks_again(self, step: int) -> list[TaskSpec]:
        return StepTasks(self._ctx, self._config.original_groups).of(step)

    async def let_go(self, step: int) -> None:
        gone = [snapshot for freed, snapshot in self._free if freed <= step]
        self._free = [(freed, snapshot) for freed, snapshot in self._free if freed > step]
        await self._ctx.rollouts.discard(gone)

    def _spend(self, points: Sequence[RecoveryPoint], step: int) -> None:
        """The snapshots of points that nothing draws any more, once no step that is yet to be trained starts from them."""
        self._spent |= {point.id: point for point in points}
        held = {point.id for _, drawn in self._drawn.values() for point in drawn}
        self._free += [(step, self._spent.pop(spent).snapshot) for spent in [*self._spent] if spent not in held]

    async def discard_points(self) -> None:
        """Restart points that no step will take: still in the queue, or drawn and not trained; and what earlier lives left."""
        assert self._ctx.queue is not None, "checked by run"
        left = await self._ctx.queue.take(self._config.capacity)
        drawn = [point for _, points in self._drawn.values() for point in points]
        self._drawn.clear()
        self._spend([*left, *drawn], self._config.steps)
        await self.let_go(self._config.steps)
        if self._ctx.finished is not None:
            await self._ctx.rollouts.discard(list(self._ctx.finished.snapshots()))

    def _recovery(self, point: RecoveryPoint, step: int) -> list:
        return recovery_group(
            point,
            self._config.group_size,
            label=f"{self._ctx.name}/{step}",
            harness=HARNESS,
            sampling=self._ctx.sampling(self._config.optim.temperature),
            limits=self._ctx.limits(),
            seed=self._ctx.config.seed,
            keep_snapshot=self._config.requeue_recovery_failures,
        )

    async def _learn(self, scored: list[ScoredRollout], step: int) -> None:
        ctx, optim = self._ctx, self._config.optim
        batch = credit.batch_of(scored, self._rewarder, optim.temperature)
        samples = credit.group_advantages(batch)
        if not self._config.zero_std_in_denominator:
            samples = credit.of_contrast(samples, batch.rewards)
        learned = await learn(ctx, samples, self._config.loss, optim, step)
        ctx.log(ctx.name, {"step": step, **learned} | monitors.advantage_variance(scored, samples))
        await ctx.sync()

    async def _push(
        self, scored: list[ScoredRollout], tasks: dict[str, TaskSpec], of_points: dict[str, TaskSpec], step: int
    ) -> None:
        """One failure of each group, drawn uniformly; the other snapshots, and what the queue pushes out, are freed.

        `tasks`: of the original groups, by their id; `of_points`: those of the restart points, by the point's.
        """
        ctx = self._ctx
        assert ctx.queue is not None, "checked by run"
        groups: dict[str, list[ScoredRollout]] = {}
        for s in scored:
            if is_start(s):
                groups.setdefault(s.rollout.group_id, []).append(s)
        draw = random.Random(f"{ctx.config.seed}/{ctx.name}/queue/{step}")
        chosen = []
        for group in groups.values():
            first = group[0].rollout
            task = of_points[first.recovery_id] if first.recovery_id else tasks[first.task_id]
            chosen.append(point_of(draw.choice(group), task, step))
        usable = [p for p in chosen if fits(p, ctx.limits(), reserve_tokens=reserve(ctx, p))]
        async with self._queueing:
            self._spend(await ctx.queue.push(usable), step)
        kept = {p.snapshot.id for p in usable}
        spare = [s.rollout.snapshot for s in scored if s.rollout.snapshot and s.rollout.snapshot.id not in kept]
        self._free += [(step, snapshot) for snapshot in spare]

    def _report(self, scored: list[ScoredRollout], num_original: int, num_recovery: int, step: int) -> None:
        original = [self._rewarder.reward(s) for s in scored if not s.rollout.recovery_id]
        recovery = [self._rewarder.reward(s) for s in scored if s.rollout.recovery_id]
        entry: dict[str, float | None] = {
            "step": step,
            "original": _mean(original),
            "recovery": _mean(recovery),
            "original_groups": num_original,
            "recovery_groups": num_recovery,
        }
        self.log.append(entry)
        asked = (num_original + num_recovery) * self._config.group_size
        seen = monitors.rollouts(self._ctx, scored, self._rewarder.reward, asked=asked)
        self._ctx.log(self._ctx.name, {k: v for k, v in entry.items() if v is not None} | seen)


def _points(found: list) -> list[RecoveryPoint]:
    return TypeAdapter(list[RecoveryPoint]).validate_python(found)


def _mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None
