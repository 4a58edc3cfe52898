"""ReTerm-GRPO (arXiv 2610.18484): original groups from a task's initial state, recovery groups from the policy's own failures.

Per step: M_O original groups and up to M_R recovery groups, taken from a queue, newest first; one update over both; then each
original group with a failure gives one restart point, drawn at a later step. Advantages are relative inside each group; the loss
is the mean over rollouts of token means, over all groups. What the paper leaves open follows our definitions (capacity; smaller M_R
when the queue is short) or is a setting: whether a point is drawn once (`pop`), whether failed recoveries become points
(`requeue_recovery_failures`), whether groups of equal rewards count (`zero_std_in_denominator`).
"""

import asyncio
import random
from collections.abc import Sequence

from termrsi.config.stages import RetermConfig
from termrsi.errors import StageError
from termrsi.harness.group import fits, recovery_group
from termrsi.records import EpisodeSpec, FinishedGroup, RecoveryPoint, ScoredRollout, TaskSpec
from termrsi.stages import credit, monitors, phase
from termrsi.stages.anchor import learn
from termrsi.stages.base import Context, Rewarder, StageResult, write_json
from termrsi.stages.points import is_start, point_of, reserve
from termrsi.stages.rollin import HARNESS, TaskStream, specs_of
from termrsi.stages.sampler import Sampler


async def run(ctx: Context, config: RetermConfig) -> StageResult:
    """Writes `policy/`, `retention.json` and `steps.json` (reward on original and recovery groups per step)."""
    if ctx.queue is None:
        raise StageError("no recovery queue", ctx.name)
    await ctx.rollouts.discard([p.snapshot for p in await ctx.queue.reset(config.capacity)])
    loop = _Loop(ctx, config)
    try:
        keeper = await phase.play(ctx, loop.sampler(), loop.step, steps=config.steps, retention=config.retention)
    finally:
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
        self._stream = TaskStream(ctx.tasks.train, f"{ctx.config.seed}/{ctx.name}")
        self._drawn: dict[int, tuple[list[TaskSpec], list[RecoveryPoint]]] = {}
        self._spent: dict[str, RecoveryPoint] = {}  # out of the queue for good, their snapshots not freed yet
        self._queueing = asyncio.Lock()  # what is pushed out between a look and its note in `_drawn` would be freed under it
        self.log: list[dict[str, float | None]] = []

    def sampler(self) -> Sampler:
        """One slot of the buffer holds a whole step: how many groups it has depends on the queue when it is drawn."""
        config = self._config
        episodes = (config.original_groups + config.recovery_groups) * config.group_size
        return Sampler(
            self._ctx, self._draw, batches=config.steps, batch_groups=1, max_staleness=config.max_staleness, batch_episodes=episodes
        )

    async def _draw(self, number: int) -> Sequence[EpisodeSpec]:
        ctx, config, step = self._ctx, self._config, number + 1
        assert ctx.queue is not None, "checked by run"
        tasks = self._stream.take(config.original_groups)
        async with self._queueing:
            points = await (ctx.queue.take if config.pop else ctx.queue.peek)(config.recovery_groups)
            self._drawn[step] = (tasks, points)  # a lost step ends the run, so slots and steps count alike
        original = specs_of(ctx, tasks, step, config.group_size, config.optim.temperature, keep_snapshot=True)
        return [*original, *(spec for point in points for spec in self._recovery(point, step))]

    async def step(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        (batch,) = groups
        scored, config = list(batch.rollouts), self._config
        tasks, points = self._drawn.pop(step)
        await self._free(points if config.pop else [])
        await self._learn(scored, step)
        starts = scored if config.requeue_recovery_failures else [s for s in scored if not s.rollout.recovery_id]
        await self._push(starts, {t.id: t for t in tasks}, {p.id: p.task for p in points}, step)
        self._report(scored, len(tasks), len(points), step)

    async def _free(self, points: Sequence[RecoveryPoint]) -> None:
        """The snapshots of points that nothing draws any more, once no step that is yet to be trained starts from them."""
        self._spent |= {point.id: point for point in points}
        held = {point.id for _, drawn in self._drawn.values() for point in drawn}
        free = [self._spent.pop(spent) for spent in [*self._spent] if spent not in held]
        await self._ctx.rollouts.discard([point.snapshot for point in free])

    async def discard_points(self) -> None:
        """Restart points that no step will take: still in the queue, or drawn and not trained."""
        assert self._ctx.queue is not None, "checked by run"
        left = await self._ctx.queue.take(self._config.capacity)
        drawn = [point for _, points in self._drawn.values() for point in points]
        self._drawn.clear()
        await self._free([*left, *drawn])

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
            await self._free(await ctx.queue.push(usable))
        kept = {p.snapshot.id for p in usable}
        spare = [s.rollout.snapshot for s in scored if s.rollout.snapshot and s.rollout.snapshot.id not in kept]
        await ctx.rollouts.discard(spare)

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


def _mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None
