"""Critic warm-up: the actor frozen, a value model fitted on its rollouts until explained variance is positive (rule ours).

Each step's rollouts are held-out data before they are training data: EV is taken on them first, then the critic learns from them.
"""

from termrsi.config.stages import WarmupCriticConfig
from termrsi.errors import StageError
from termrsi.ports import Critic
from termrsi.records import TaskSpec
from termrsi.stages import credit, monitors
from termrsi.stages.base import Context, Rewarder, StageResult
from termrsi.stages.checkpoints import Checkpoints
from termrsi.stages.rollin import StepTasks, specs_of


async def run(ctx: Context, config: WarmupCriticConfig) -> StageResult:
    """Writes `critic/`. Ends after `checks` positive EVs in a row, or after `max_steps`; says which."""
    critic = ctx.critic
    if critic is None:
        raise StageError("no critic host", ctx.name)
    history: list[float | None] = []
    with Checkpoints(ctx, config.checkpoint_every, config.max_steps, {"critic": critic}) as checkpoints:
        _, found = await checkpoints.take_up()
        history += found["history"] if found is not None else []
        tasks = StepTasks(ctx, config.tasks_per_step)
        while len(history) < config.max_steps and not settled(history, config.checks):
            step = len(history)
            async with ctx.step(step + 1):
                trained = await _step(ctx, config, critic, tasks.of(step + 1), history)
            own = {"history": history} if checkpoints.due(step + 1) or settled(history, config.checks) else None
            await checkpoints.add(step + 1, {"rollouts": trained}, own)
    await critic.save(str(ctx.out / "critic"))
    positive = sum(1 for e in history if e is not None and e > 0)
    verdict = f"explained variance positive in {positive} of {len(history)} checks"
    summary: dict[str, float | int | str | None] = {"steps": len(history), "first_ev": history[0], "last_ev": history[-1]}
    return StageResult({"critic": str(ctx.out / "critic")}, summary, verdict)


def settled(history: list[float | None], checks: int) -> bool:
    """So many positive EVs in a row."""
    return len(history) >= checks and all(e is not None and e > 0 for e in history[-checks:])


async def _step(
    ctx: Context, config: WarmupCriticConfig, critic: Critic, tasks: list[TaskSpec], history: list[float | None]
) -> list[str]:
    """Appends its EV to `history`; returns the ids of the rollouts that the critic learned from."""
    rewarder, step = Rewarder(ctx, config.reward), len(history)
    specs = specs_of(ctx, tasks, step, 1, config.temperature)
    scored = await ctx.episodes(specs, f"{ctx.name}: step {step + 1}/{config.max_steps}", since=ctx.version)
    batch = credit.batch_of(scored, rewarder, config.temperature, config.credit)
    if not batch.samples:
        raise StageError("no rollout of this step survived", ctx.name, "see the dropped episodes in rollouts.jsonl")
    values = await credit.valued(critic, batch)
    samples, rewards = credit.with_values(batch, values, config.credit), list(batch.rewards.values())
    ev, ev_first = credit.explained(batch, values, config.credit)
    history.append(ev)
    value_loss = 0.0
    for _ in range(config.updates):
        metrics = await critic.update(samples, config.lr, config.value_clip)
        ctx.costs.trained_tokens += metrics.tokens
        ctx.costs.learn_s += metrics.seconds
        value_loss = metrics.loss
    seen = _ev(ev, ev_first) | monitors.batch(ctx, scored, samples, rewarder.reward, asked=len(specs))
    ctx.log(ctx.name, {"step": step + 1, "value_loss": value_loss, "reward": sum(rewards) / len(rewards)} | seen)
    return [one.rollout.id for one in scored]


def _ev(ev: float | None, ev_first: float | None) -> dict[str, float]:
    """An undefined explained variance is left out, never imputed."""
    return {k: v for k, v in {"ev": ev, "ev_turn_first": ev_first}.items() if v is not None}
