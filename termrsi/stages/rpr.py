"""RPR: joint actor-critic PPO with turn-boundary credit and shaped rewards (Terminal-RSI, arXiv 2610.22192; machine ours).

    HANDOFF     critic weights of an earlier stage, fresh optimizer; actor weights of `policy`
    CALIBRATE   exactly `critic_only_updates` critic updates on rollouts of the present actor; the actor is bit-identical after
    JOINT       per step: values kept from before the update; critic update; actor update with the kept values and, as old
                log-probabilities, those of the actor before the step's first update
    RETAIN      the best candidate by validation; actor and critic of the same step

The batch of the first step serves calibration and the first joint update: the actor that sampled it is still the present one.
Rollouts come through the buffer: at most `max_staleness` updates older than the actor they update, 0 by default.
The loop waits for a batch of the buffer, then for the hosts; each wait ends with that, or raises.
"""

import random
from collections.abc import Sequence

from termrsi.config.schema import RprConfig
from termrsi.errors import StageError
from termrsi.ports import Critic
from termrsi.records import EpisodeSpec, FinishedGroup, Sample
from termrsi.stages import credit, monitors, retain
from termrsi.stages.anchor import anchored, loss_arguments
from termrsi.stages.base import Context, Rewarder, StageResult, write_json
from termrsi.stages.rollin import TaskStream, specs_of
from termrsi.stages.sampler import Sampler, rollouts_of


async def run(ctx: Context, config: RprConfig) -> StageResult:
    """Writes `policy/`, `critic/` (retained) and `retention.json`."""
    if ctx.critic is None:
        raise StageError("no critic host", ctx.name)
    phase = _Phase(ctx, config, ctx.critic)
    keeper = retain.Keeper(ctx, config.retention, await retain.measure(ctx, 0, config.retention))
    await keeper.start()
    async with phase.sampler() as sampler:
        for step in range(1, config.steps + 1):
            groups = await sampler.batch(f"{ctx.name}: step {step}/{config.steps}")
            await phase.step(step, groups)
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
        "reward_first": phase.rewards[0],
        "reward_last": phase.rewards[-1],
        "ev_last": phase.evs[-1],
    }
    return StageResult({"policy": str(ctx.out / "policy"), "critic": str(ctx.out / "critic")}, summary, verdict)


class _Phase:
    """The steps of one phase."""

    def __init__(self, ctx: Context, config: RprConfig, critic: Critic) -> None:
        self._ctx = ctx
        self._config = config
        self._critic = critic
        self._rewarder = Rewarder(ctx, config.reward)
        self._stream = TaskStream(ctx.tasks.train, f"{ctx.config.seed}/{ctx.name}")
        self._specs: list[EpisodeSpec] = []  # of the step that is being drawn
        self.rewards: list[float] = []
        self.evs: list[float | None] = []

    def sampler(self) -> Sampler:
        """One slot per task of a step."""
        config = self._config
        return Sampler(
            self._ctx,
            self._draw,
            batches=config.steps,
            batch_groups=config.tasks_per_step,
            max_staleness=config.max_staleness,
            batch_episodes=config.tasks_per_step * config.samples_per_task,
        )

    async def _draw(self, number: int) -> Sequence[EpisodeSpec]:
        config = self._config
        step, place = divmod(number, config.tasks_per_step)
        if place == 0:
            tasks = self._stream.take(config.tasks_per_step)
            self._specs = specs_of(self._ctx, tasks, step + 1, config.samples_per_task, config.optim.temperature)
        return self._specs[place * config.samples_per_task : (place + 1) * config.samples_per_task]

    async def step(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        ctx, config = self._ctx, self._config
        scored = rollouts_of(groups)
        pairs = [
            (sample, self._rewarder.reward(s)) for s in scored for sample in credit.samples_of(s, config.optim.temperature)[-1:]
        ]
        samples, rewards = [p[0] for p in pairs], [p[1] for p in pairs]
        if step == 1:
            await self._calibrate(samples, rewards)
        batch = credit.with_values(samples, await self._critic.values(samples), rewards, config.credit)
        ev, ev_first = credit.explained(batch)
        critic = await self._critic.update(batch, config.critic_lr, config.value_clip)
        ctx.costs.learn_s += critic.seconds
        told = credit.with_contrast(batch, rewards) if config.only_contrast else batch
        actor = await self._update_actor(await anchored(ctx, told, config.loss, config.optim), step)
        await ctx.sync()
        self.rewards.append(sum(rewards) / len(rewards))
        self.evs.append(ev)
        strict = sum(s.verdict.strict for s in scored) / len(scored)
        report = {"step": step, "reward": self.rewards[-1], "strict": strict, "value_loss": critic.loss, **actor}
        report["learned_from"] = float(len(told))
        report |= monitors.batch(ctx, scored, told, self._rewarder.reward, asked=len(groups) * config.samples_per_task)
        report["staleness"] = sum(g.staleness for g in groups) / len(groups)
        ctx.log(ctx.name, report | {k: v for k, v in {"ev": ev, "ev_turn_first": ev_first}.items() if v is not None})

    async def _calibrate(self, samples: Sequence[Sample], rewards: Sequence[float]) -> None:
        """Critic-only updates, once per phase. Raises StageError if the actor changed meanwhile."""
        before = await self._ctx.policy.checksum()
        for _ in range(self._config.critic_only_updates):
            batch = credit.with_values(samples, await self._critic.values(samples), rewards, self._config.credit)
            metrics = await self._critic.update(batch, self._config.critic_lr, self._config.value_clip)
            self._ctx.log(self._ctx.name, {"critic_only_loss": metrics.loss})
            self._ctx.costs.learn_s += metrics.seconds
        if await self._ctx.policy.checksum() != before:
            raise StageError("the actor changed during critic-only updates", self._ctx.name)

    async def _update_actor(self, batch: list[Sample], step: int) -> dict[str, float]:
        ctx, optim = self._ctx, self._config.optim
        order = batch[:]
        random.Random(f"{ctx.config.seed}/{ctx.name}/minibatch/{step}").shuffle(order)
        size = max(1, -(-len(order) // optim.minibatches))
        loss = loss_arguments(self._config.loss, optim, ctx.max_action_tokens())
        report: dict[str, float] = {}
        for start in range(0, len(order), size):
            metrics = await ctx.policy.update(order[start : start + size], loss, optim.lr)
            ctx.costs.trained_tokens += metrics.tokens
            ctx.costs.learn_s += metrics.seconds
            report = {"loss": metrics.loss, "grad_norm": metrics.grad_norm, **metrics.extra}
        return report
