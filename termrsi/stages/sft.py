"""SFT: cross-entropy on the sampled tokens of a data set, actor only. AdamW, linear warm-up and decay (Tmax Table 14)."""

import json
import random

from termrsi.config.schema import SftConfig
from termrsi.errors import StageError
from termrsi.records import Sample
from termrsi.stages.base import Context, StageResult


async def run(ctx: Context, config: SftConfig) -> StageResult:
    """Writes `policy/`. The order of samples is a seeded shuffle per epoch."""
    samples = read(ctx)[: config.max_samples or None]
    steps = config.epochs * -(-len(samples) // config.batch)
    ctx.progress.begin(f"{ctx.name}: {len(samples)} samples, {steps} steps", steps)
    losses: list[float] = []
    for epoch in range(config.epochs):
        order = samples[:]
        random.Random(f"{ctx.config.seed}/{ctx.name}/{epoch}").shuffle(order)
        for start in range(0, len(order), config.batch):
            lr = learning_rate(len(losses), steps, config.lr, config.warmup)
            metrics = await ctx.policy.fit(order[start : start + config.batch], lr)
            losses.append(metrics.loss)
            ctx.costs.trained_tokens += metrics.tokens
            ctx.costs.learn_s += metrics.seconds
            ctx.log(ctx.name, {"step": len(losses), "loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": lr})
            ctx.progress.advance(f"loss {metrics.loss:.3f}")
    ctx.progress.end()
    await ctx.policy.save(str(ctx.out / "policy"))
    summary: dict[str, float | int | str | None] = {
        "samples": len(samples),
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    return StageResult({"policy": str(ctx.out / "policy")}, summary)


def read(ctx: Context) -> list[Sample]:
    """The samples of the stage that `data` names. Raises StageError if there are none."""
    raw = json.loads(ctx.inputs["data"].read_text(encoding="utf-8"))
    samples = [
        Sample(tuple(row["ids"]), tuple(row["mask"]), tuple(row["turn_ids"]), row["rollout_id"], row["group_id"]) for row in raw
    ]
    if not samples:
        raise StageError("the data set is empty", str(ctx.inputs["data"]))
    return samples


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear up over the first share `warmup` of the steps, then linear down to 0 after the last."""
    rise = max(1, round(steps * warmup))
    return peak * min((step + 1) / rise, (steps - step) / max(1, steps - rise + 1))
