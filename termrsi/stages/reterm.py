"""ReTerm-GRPO (arXiv 2610.18484): original groups from a task's initial state, recovery groups from the policy's own failures.

Per step: M_O original groups and up to M_R recovery groups, taken from a queue, newest first; one update over both; then each
original group with a failure gives one restart point, drawn at a later step. Advantages are relative inside each group; the loss
is the mean over rollouts of token means, over all groups. What the paper leaves open follows our definitions (capacity, pop,
no requeue of recovery failures, smaller M_R when the queue is short).
"""

import random
from collections.abc import Sequence

from termrsi.config.stages import RetermConfig
from termrsi.errors import StageError
from termrsi.harness.group import fits, recovery_group
from termrsi.records import EpisodeSpec, FinishedGroup, RecoveryPoint, ScoredRollout, TaskSpec
from termrsi.stages import credit, monitors, retain
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
    keeper = retain.Keeper(ctx, config.retention, await retain.measure(ctx, 0, config.retention))
    await keeper.start()
    try:
        async with loop.sampler() as sampler:
            for step in range(1, config.steps + 1):
                (batch,) = await sampler.batch(f"{ctx.name}: step {step}/{config.steps}")
                await loop.step(step, batch)
                await sampler.trained()
                if step % config.retention.every == 0 or step == config.steps:
                    await keeper.offer(await retain.measure(ctx, step, config.retention))
    finally:
        await loop.discard_points()
    write_json(ctx.out / "retention.json", keeper.log)
    write_json(ctx.out / "steps.json", loop.log)
    verdict = f"retained step {keeper.best.step}" if keeper.best.step else "no candidate beat the starting policy: it is retained"
    summary: dict[str, float | int | str | None] = {
        "steps": config.steps,
        "retained_step": keeper.best.step,
        "validation_before": keeper.before,
        "validation_after": keeper.best.mean,
        "original_first": loop.log[0]["original"],
        "original_last": loop.log[-1]["original"],
        "recovery_groups": sum(int(entry["recovery_groups"] or 0) for entry in loop.log),
        "recovery_mean": _mean([e["recovery"] for e in loop.log if e["recovery"] is not None]),
    }
    return StageResult({"policy": str(ctx.out / "policy")}, summary, verdict)


class _Loop:
    def __init__(self, ctx: Context, config: RetermConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._rewarder = Rewarder(ctx, config.reward)
        self._stream = TaskStream(ctx.tasks.train, f"{ctx.config.seed}/{ctx.name}")
        self._drawn: dict[int, tuple[list[TaskSpec], list[RecoveryPoint]]] = {}
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
        points = await ctx.queue.take(config.recovery_groups)
        self._drawn[step] = (tasks, points)  # a lost step ends the run, so slots and steps count alike
        original = specs_of(ctx, tasks, step, config.group_size, config.optim.temperature, keep_snapshot=True)
        return [*original, *(spec for point in points for spec in self._recovery(point, step))]

    async def step(self, step: int, batch: FinishedGroup) -> None:
        ctx, scored = self._ctx, list(batch.rollouts)
        tasks, points = self._drawn.pop(step)
        await ctx.rollouts.discard([p.snapshot for p in points])
        await self._learn(scored, step)
        await self._push([s for s in scored if not s.rollout.recovery_id], {t.id: t for t in tasks}, step)
        self._report(scored, len(tasks), len(points), step)

    async def discard_points(self) -> None:
        """Restart points that no step will take: still in the queue, or drawn and not trained."""
        assert self._ctx.queue is not None, "checked by run"
        left = await self._ctx.queue.take(self._config.capacity)
        drawn = [point for _, points in self._drawn.values() for point in points]
        await self._ctx.rollouts.discard([p.snapshot for p in [*left, *drawn]])

    def _recovery(self, point: RecoveryPoint, step: int) -> list:
        return recovery_group(
            point,
            self._config.group_size,
            label=f"{self._ctx.name}/{step}",
            harness=HARNESS,
            sampling=self._ctx.sampling(self._config.optim.temperature),
            limits=self._ctx.limits(),
            seed=self._ctx.config.seed,
        )

    async def _learn(self, scored: list[ScoredRollout], step: int) -> None:
        ctx, optim = self._ctx, self._config.optim
        samples = credit.group_advantages(credit.batch_of(scored, self._rewarder, optim.temperature))
        learned = await learn(ctx, samples, self._config.loss, optim, step)
        ctx.log(ctx.name, {"step": step, **learned} | monitors.advantage_variance(scored, samples))
        await ctx.sync()

    async def _push(self, scored: list[ScoredRollout], tasks: dict[str, TaskSpec], step: int) -> None:
        """One failure per original group, drawn uniformly; the other snapshots, and what the queue pushes out, are freed."""
        ctx = self._ctx
        assert ctx.queue is not None, "checked by run"
        groups: dict[str, list[ScoredRollout]] = {}
        for s in scored:
            if is_start(s):
                groups.setdefault(s.rollout.group_id, []).append(s)
        draw = random.Random(f"{ctx.config.seed}/{ctx.name}/queue/{step}")
        chosen = [point_of(draw.choice(group), tasks[group[0].rollout.task_id], step) for group in groups.values()]
        usable = [p for p in chosen if fits(p, ctx.limits(), reserve_tokens=reserve(ctx, p))]
        evicted = await ctx.queue.push(usable)
        kept = {p.snapshot.id for p in usable}
        spare = [s.rollout.snapshot for s in scored if s.rollout.snapshot and s.rollout.snapshot.id not in kept]
        await ctx.rollouts.discard([*spare, *(p.snapshot for p in evicted)])

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
