"""Group-relative policy gradient on outcomes, without a critic: GRPO and its kin by `loss`, as Tmax and River train.

Per step: `groups` tasks, `group_size` rollouts of each; advantages are relative inside a group, after them River's penalty on
repeated turns (arXiv 2608.22631); one batch, `optim.minibatches` updates. With `replace_zero_variance` groups whose rewards are all
equal, which would teach nothing, are replaced by the next tasks' (Tmax, arXiv 2606.23321; DAPO, arXiv 2503.14476), so many in a
step at most (ours); with `overlong` length costs (DAPO), before the advantages are made and in no reward that is logged.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from termrsi.config.stages import GrpoConfig
from termrsi.records import FinishedBatch, ScoredRollout
from termrsi.stages import credit, monitors, phase
from termrsi.stages.anchor import learn
from termrsi.stages.base import Context, Rewarder, StageResult
from termrsi.stages.rollin import GroupDraw
from termrsi.stages.sampler import Sampler, rollouts_of


async def run(ctx: Context, config: GrpoConfig) -> StageResult:
    """Writes `policy/` (retained) and `retention.json`."""
    loop = _Loop(ctx, config)
    keeper = await phase.play(ctx, loop, steps=config.steps, retention=config.retention, checkpoint_every=config.checkpoint_every)
    own: phase.Summary = {
        "reward_first": loop.rewards[0],
        "reward_last": loop.rewards[-1],
        "groups_without_contrast": loop.refused,
        "groups_missing": loop.missing,
    }
    return phase.result(ctx, keeper, config.steps, own, "policy")


class _Loop:
    def __init__(self, ctx: Context, config: GrpoConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._rewarder = Rewarder(ctx, config.reward)
        self._draw = GroupDraw(ctx, config.groups, config.group_size, config.optim.temperature)
        self.rewards: list[float] = []
        self.refused, self.missing = 0, 0  # groups without contrast, and those of them that were not replaced

    def sampler(self) -> Sampler:
        config = self._config
        flow = config.flow(config.groups, config.steps, replace=config.replace_zero_variance)
        accept = self._teaches if config.replace_zero_variance else None
        return Sampler(self._ctx, self._draw, flow, batch_episodes=config.groups * config.group_size, accept=accept)

    async def state(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "refused": self.refused, "missing": self.missing}

    async def restore(self, state: dict[str, Any]) -> None:
        self.rewards, self.refused, self.missing = state["rewards"], state["refused"], state["missing"]

    async def let_go(self, step: int) -> None:
        """Nothing is held for it."""

    async def step(self, step: int, taken: FinishedBatch) -> None:
        ctx, config, groups = self._ctx, self._config, taken.groups
        scored = rollouts_of(groups)
        batch = credit.batch_of(scored, self._rewarder, config.optim.temperature)
        penalties = {s.rollout.id: self._penalties(s) for s in scored} if config.repetition_penalty > 0.0 else {}
        lengths = self._lengths(batch)
        paid = replace(batch, rewards={rollout: reward + lengths.get(rollout, 0.0) for rollout, reward in batch.rewards.items()})
        samples = credit.group_advantages(paid, normalise=config.normalise, penalties=penalties)
        report = await learn(ctx, samples, config.loss, config.optim, step)
        await ctx.sync()
        self.rewards.append(sum(batch.rewards.values()) / len(batch.rewards))
        report |= {"step": step, "reward": self.rewards[-1], "strict": sum(s.verdict.strict for s in scored) / len(scored)}
        report["staleness"] = sum(group.staleness for group in groups) / len(groups)
        if penalties:
            report["repeated_turns"] = float(sum(1 for turns in penalties.values() for turn in turns if turn < 0.0))
        if lengths:
            report["overlong"] = sum(1 for cost in lengths.values() if cost < 0.0) / len(lengths)
        report |= monitors.batch(ctx, scored, samples, self._rewarder.reward, asked=len(groups) * config.group_size)
        if config.replace_zero_variance:  # what is logged here is of the groups that are left
            self.refused, self.missing = self.refused + len(taken.refused), self.missing + taken.missing
            report["refused_groups"], report["missing_groups"] = float(len(taken.refused)), float(taken.missing)
            report["replaced"] = (len(taken.refused) - taken.missing) / (len(taken.refused) + len(groups))
        ctx.log(ctx.name, report)

    def _teaches(self, scored: Sequence[ScoredRollout]) -> bool:
        return len({self._rewarder.reward(s) for s in scored}) > 1

    def _lengths(self, batch: credit.Batch) -> dict[str, float]:
        """What each rollout's length costs."""
        ctx, config = self._ctx, self._config
        if config.overlong == 0:
            return {}
        longest = config.overlong_max or min(ctx.max_action_tokens(), ctx.config.limits.max_context_tokens)
        return credit.overlong(batch, longest=longest, cache=config.overlong)

    def _penalties(self, scored: ScoredRollout) -> list[float]:
        config = self._config
        return credit.repetition(scored.rollout, threshold=config.repetition_threshold, penalty=config.repetition_penalty)
