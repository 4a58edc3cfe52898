"""RPR: joint actor-critic PPO with turn-boundary credit and shaped rewards (Terminal-RSI, arXiv 2610.22192; machine ours).

    HANDOFF     critic weights of an earlier stage, fresh optimizer; actor weights of `policy`
                with `refit_value_head` the value head is fitted to the new scale of rewards on the first batch
    CALIBRATE   exactly `critic_only_updates` critic updates on rollouts of the present actor; the actor is bit-identical after
    JOINT       per step: values kept from before the update; critic update; actor update with the kept values and, as old
                log-probabilities, those of the actor before the step's first update
    RETAIN      the best candidate by validation; actor and critic of the same step (`phase`)

The batch of the first step serves calibration and the first joint update: the actor that sampled it is still the present one.
Rollouts come through the buffer: at most `max_staleness` updates older than the actor they update, 0 by default.
"""

from typing import Any

from termrsi.config.choices import RefitValueHead
from termrsi.config.stages import RprConfig
from termrsi.errors import StageError
from termrsi.ports import Critic
from termrsi.records import FinishedBatch
from termrsi.stages import credit, monitors, phase
from termrsi.stages.anchor import learn
from termrsi.stages.base import Context, Rewarder, StageResult
from termrsi.stages.rollin import GroupDraw
from termrsi.stages.sampler import Sampler, rollouts_of


async def run(ctx: Context, config: RprConfig) -> StageResult:
    """Writes `policy/`, `critic/` (retained) and `retention.json`."""
    if ctx.critic is None:
        raise StageError("no critic host", ctx.name)
    own = _Phase(ctx, config, ctx.critic)
    keeper = await phase.play(ctx, own, steps=config.steps, retention=config.retention, checkpoint_every=config.checkpoint_every)
    told: phase.Summary = {"reward_first": own.rewards[0], "reward_last": own.rewards[-1], "ev_last": own.evs[-1]}
    return phase.result(ctx, keeper, config.steps, told, "policy", "critic")


class _Phase:
    """The steps of one phase."""

    def __init__(self, ctx: Context, config: RprConfig, critic: Critic) -> None:
        self._ctx = ctx
        self._config = config
        self._critic = critic
        self._rewarder = Rewarder(ctx, config.reward)
        self._draw = GroupDraw(ctx, config.tasks_per_step, config.samples_per_task, config.optim.temperature)
        self.rewards: list[float] = []
        self.evs: list[float | None] = []

    def sampler(self) -> Sampler:
        """One slot per task of a step."""
        config = self._config
        flow = config.flow(config.tasks_per_step, config.steps)
        return Sampler(self._ctx, self._draw, flow, batch_episodes=config.tasks_per_step * config.samples_per_task)

    async def state(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "evs": list(self.evs)}

    async def restore(self, state: dict[str, Any]) -> None:
        self.rewards, self.evs = state["rewards"], state["evs"]

    async def let_go(self, step: int) -> None:
        """Nothing is held for it."""

    async def step(self, step: int, taken: FinishedBatch) -> None:
        ctx, config, groups = self._ctx, self._config, taken.groups
        scored = rollouts_of(groups)
        batch = credit.batch_of(scored, self._rewarder, config.optim.temperature, config.credit)
        if step == 1:
            if config.refit_value_head is RefitValueHead.affine:
                await self._refit(batch)
            await self._calibrate(batch)
        values = await credit.valued(self._critic, batch)
        samples = credit.with_values(batch, values, config.credit)
        ev, ev_first = credit.explained(batch, values, config.credit)
        critic = await self._critic.update(samples, config.critic_lr, config.value_clip)
        ctx.costs.learn_s += critic.seconds
        told = credit.with_contrast(samples, batch.rewards, config.credit) if config.only_contrast else samples
        actor = await learn(ctx, told, config.loss, config.optim, step)
        await ctx.sync()
        self.rewards.append(sum(batch.rewards.values()) / len(batch.rewards))
        self.evs.append(ev)
        strict = sum(s.verdict.strict for s in scored) / len(scored)
        report = {"step": step, "reward": self.rewards[-1], "strict": strict, "value_loss": critic.loss, **actor}
        report["learned_from"] = float(len(told))
        report |= monitors.batch(ctx, scored, told, self._rewarder.reward, asked=len(groups) * config.samples_per_task)
        report["staleness"] = sum(g.staleness for g in groups) / len(groups)
        ctx.log(ctx.name, report | {k: v for k, v in {"ev": ev, "ev_turn_first": ev_first}.items() if v is not None})

    async def _refit(self, batch: credit.Batch) -> None:
        """The inherited critic's values on the scale of this phase's rewards, before it learns from them."""
        scale, shift = credit.refit(batch, await credit.valued(self._critic, batch), self._config.credit)
        await self._critic.refit(scale, shift)
        self._ctx.log(self._ctx.name, {"refit_scale": scale, "refit_shift": shift})

    async def _calibrate(self, batch: credit.Batch) -> None:
        """Critic-only updates, once per phase. Raises StageError if the actor changed meanwhile."""
        before = await self._ctx.policy.checksum()
        for _ in range(self._config.critic_only_updates):
            samples = credit.with_values(batch, await credit.valued(self._critic, batch), self._config.credit)
            metrics = await self._critic.update(samples, self._config.critic_lr, self._config.value_clip)
            self._ctx.log(self._ctx.name, {"critic_only_loss": metrics.loss})
            self._ctx.costs.learn_s += metrics.seconds
        if await self._ctx.policy.checksum() != before:
            raise StageError("the actor changed during critic-only updates", self._ctx.name)
