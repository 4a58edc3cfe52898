"""Critic warm-up: the actor frozen, a value model fitted on its rollouts until explained variance is positive (rule ours).

Each step's rollouts are held-out data before they are training data: EV is taken on them first, then the critic learns from them.
"""

from termrsi.config.stages import WarmupCriticConfig
from termrsi.errors import StageError
from termrsi.stages import credit, monitors
from termrsi.stages.base import Context, Rewarder, StageResult
from termrsi.stages.rollin import TaskStream, specs_of


async def run(ctx: Context, config: WarmupCriticConfig) -> StageResult:
    """Writes `critic/`. Ends after `checks` positive EVs in a row, or after `max_steps`; says which."""
    critic = ctx.critic
    if critic is None:
        raise StageError("no critic host", ctx.name)
    rewarder, stream = Rewarder(ctx, config.reward), TaskStream(ctx.tasks.train, f"{ctx.config.seed}/{ctx.name}")
    history: list[float | None] = []
    for step in range(config.max_steps):
        async with ctx.step(step + 1):
            specs = specs_of(ctx, stream.take(config.tasks_per_step), step, 1, config.temperature)
            scored = await ctx.episodes(specs, f"{ctx.name}: step {step + 1}/{config.max_steps}")
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
        if len(history) >= config.checks and all(e is not None and e > 0 for e in history[-config.checks :]):
            break
    await critic.save(str(ctx.out / "critic"))
    positive = sum(1 for e in history if e is not None and e > 0)
    verdict = f"explained variance positive in {positive} of {len(history)} checks"
    summary: dict[str, float | int | str | None] = {"steps": len(history), "first_ev": history[0], "last_ev": history[-1]}
    return StageResult({"critic": str(ctx.out / "critic")}, summary, verdict)


def _ev(ev: float | None, ev_first: float | None) -> dict[str, float]:
    """An undefined explained variance is left out, never imputed."""
    return {k: v for k, v in {"ev": ev, "ev_turn_first": ev_first}.items() if v is not None}
