"""Group-relative policy gradient on outcomes, without a critic: GRPO and its kin by `loss`, as Tmax and River train.

Per step: `groups` tasks, `group_size` rollouts of each; advantages are relative inside a group, after them River's penalty on
repeated turns (arXiv 2608.22631); one batch, `optim.minibatches` updates. With `only_contrast` a group whose rewards are all equal,
which would teach nothing, is replaced by the next task's (Tmax, arXiv 2606.23321; DAPO, arXiv 2503.14476).
The loop waits for a batch of the buffer, then for the hosts; each wait ends with that, or raises.
"""

from collections.abc import Sequence

from termrsi.config.stages import GrpoConfig
from termrsi.records import FinishedGroup, ScoredRollout
from termrsi.stages import credit, monitors, retain
from termrsi.stages.anchor import learn
from termrsi.stages.base import Context, Rewarder, StageResult, write_json
from termrsi.stages.rollin import GroupDraw
from termrsi.stages.sampler import Sampler, rollouts_of


async def run(ctx: Context, config: GrpoConfig) -> StageResult:
    """Writes `policy/` (retained) and `retention.json`."""
    loop = _Loop(ctx, config)
    keeper = retain.Keeper(ctx, config.retention, await retain.measure(ctx, 0, config.retention))
    await keeper.start()
    async with loop.sampler() as sampler:
        for step in range(1, config.steps + 1):
            groups = await sampler.batch(f"{ctx.name}: step {step}/{config.steps}")
            await loop.step(step, groups)
            await sampler.trained()
            if step % config.retention.every == 0 or step == config.steps:
                await keeper.offer(await retain.measure(ctx, step, config.retention))
    write_json(ctx.out / "retention.json", keeper.log)
    verdict = f"retained step {keeper.best.step}" if keeper.best.step else "no candidate beat the starting policy: it is retained"
    summary: dict[str, float | int | str | None] = {
        "steps": config.steps,
        "retained_step": keeper.best.step,
        "validation_before": keeper.before,
        "validation_after": keeper.best.mean,
        "reward_first": loop.rewards[0],
        "reward_last": loop.rewards[-1],
        "groups_without_contrast": loop.refused,
    }
    return StageResult({"policy": str(ctx.out / "policy")}, summary, verdict)


class _Loop:
    def __init__(self, ctx: Context, config: GrpoConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._rewarder = Rewarder(ctx, config.reward)
        self._draw = GroupDraw(ctx, config.groups, config.group_size, config.optim.temperature)
        self.rewards: list[float] = []
        self.refused, self._told = 0, 0  # groups without contrast: all, and those of earlier steps

    def sampler(self) -> Sampler:
        config = self._config
        return Sampler(
            self._ctx,
            self._draw,
            batches=config.steps,
            batch_groups=config.groups,
            max_staleness=config.max_staleness,
            batch_episodes=config.groups * config.group_size,
            accept=self._teaches if config.only_contrast else None,
        )

    async def step(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        ctx, config = self._ctx, self._config
        scored = rollouts_of(groups)
        batch = credit.batch_of(scored, self._rewarder, config.optim.temperature)
        penalties = {s.rollout.id: self._penalties(s) for s in scored} if config.repetition_penalty > 0.0 else {}
        samples = credit.group_advantages(batch, normalise=config.normalise, penalties=penalties)
        report = await learn(ctx, samples, config.loss, config.optim, step)
        await ctx.sync()
        self.rewards.append(sum(batch.rewards.values()) / len(batch.rewards))
        report |= {"step": step, "reward": self.rewards[-1], "strict": sum(s.verdict.strict for s in scored) / len(scored)}
        report["staleness"] = sum(group.staleness for group in groups) / len(groups)
        if penalties:
            report["repeated_turns"] = float(sum(1 for turns in penalties.values() for turn in turns if turn < 0.0))
        report |= monitors.batch(ctx, scored, samples, self._rewarder.reward, asked=len(groups) * config.group_size)
        if config.only_contrast:  # what is logged here is of the groups that are left
            report["refused_groups"], self._told = float(self.refused - self._told), self.refused
        ctx.log(ctx.name, report)

    def _teaches(self, scored: Sequence[ScoredRollout]) -> bool:
        contrast = len({self._rewarder.reward(s) for s in scored}) > 1
        self.refused += not contrast
        return contrast

    def _penalties(self, scored: ScoredRollout) -> list[float]:
        config = self._config
        return credit.repetition(scored.rollout, threshold=config.repetition_threshold, penalty=config.repetition_penalty)
