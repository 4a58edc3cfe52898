"""SFT: cross-entropy on the sampled tokens of a data set, actor only. AdamW, linear warm-up and decay (Tmax Table 14)."""

import json
import random

from termrsi.config.stages import EvaluateConfig, SftConfig
from termrsi.errors import StageError
from termrsi.records import Sample
from termrsi.stages.base import Context, StageResult
from termrsi.stages.scoring import score


async def run(ctx: Context, config: SftConfig) -> StageResult:
    """Writes `policy/`. The order of samples is a seeded shuffle per epoch. Validation, if asked for, changes nothing."""
    samples = read(ctx)[: config.max_samples or None]
    steps = config.epochs * -(-len(samples) // config.batch)
    before = await _validation(ctx, config, "before")
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
    if before is not None:
        await ctx.sync()
        after = await _validation(ctx, config, "after")
        summary |= {"validation_before": before[0], "validation_after": after[0] if after else None}
        summary |= {"progress_before": before[1], "progress_after": after[1] if after else None}
    return StageResult({"policy": str(ctx.out / "policy")}, summary)


async def _validation(ctx: Context, config: SftConfig, when: str) -> tuple[float, float] | None:
    """Mean strict success and progress on the validation tasks of the weights that the generator serves; None if not asked for."""
    if config.validate_k == 0 or not ctx.tasks.validation:
        return None
    sampling = EvaluateConfig(k=config.validate_k, temperature=config.validate_temperature, top_p=config.validate_top_p)
    scores = await score(ctx, ctx.tasks.validation, sampling, label=f"{ctx.name}/validation", file=f"validation_{when}.jsonl")
    if not scores:
        return None
    strict, progress = ([sum(s[key]) / len(s[key]) for s in scores.values()] for key in ("strict", "progress"))
    return sum(strict) / len(strict), sum(progress) / len(progress)


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
