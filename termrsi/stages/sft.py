"""SFT: cross-entropy on the sampled tokens of a data set, actor only. AdamW, linear warm-up and decay (Tmax Table 14)."""

import random

from termrsi.config.stages import EvaluateConfig, SftConfig
from termrsi.datasets import DataSet
from termrsi.errors import StageError
from termrsi.stages.base import Context, StageResult
from termrsi.stages.checkpoints import Checkpoints
from termrsi.stages.scoring import score


async def run(ctx: Context, config: SftConfig) -> StageResult:
    """Writes `policy/`. The order of samples is a seeded shuffle per epoch. Validation, if asked for, changes nothing."""
    data = read(ctx)
    count = min(len(data), config.max_samples or len(data))
    rows = order(count, config, f"{ctx.config.seed}/{ctx.name}")
    losses: list[float] = []
    with Checkpoints(ctx, config.checkpoint_every, len(rows), {"policy": ctx.policy}) as checkpoints:
        _, found = await checkpoints.take_up()
        if found is None:
            before = await _validation(ctx, config, "before")
        else:
            losses, before = found["losses"], found["before"]
        ctx.progress.begin(f"{ctx.name}: {count} samples, {len(rows)} steps", len(rows))
        for _ in losses:
            ctx.progress.advance("finished before")
        for batch in rows[len(losses) :]:
            lr = learning_rate(len(losses), len(rows), config.lr, config.warmup)
            step = len(losses) + 1
            async with ctx.step(step):
                metrics = await ctx.policy.fit([data[i].sample for i in batch], lr)
                ctx.costs.trained_tokens += metrics.tokens
                ctx.costs.learn_s += metrics.seconds
            losses.append(metrics.loss)
            ctx.log(ctx.name, {"step": step, "loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": lr})
            ctx.progress.advance(f"loss {metrics.loss:.3f}")
            own = {"losses": losses, "before": before} if checkpoints.due(step) else None
            await checkpoints.add(step, {"rows": batch}, own)
        ctx.progress.end()
    data.close()
    await ctx.policy.save(str(ctx.out / "policy"))
    summary: dict[str, float | int | str | None] = {
        "samples": count,
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


def order(count: int, config: SftConfig, seed: str) -> list[list[int]]:
    """The rows of each step's batch: by the number of rows, the configuration and the seed alone."""
    batches: list[list[int]] = []
    for epoch in range(config.epochs):
        rows = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(rows)
        batches += [rows[start : start + config.batch] for start in range(0, count, config.batch)]
    return batches


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


def read(ctx: Context) -> DataSet:
    """The data set of the stage that `data` names. Raises StageError if it is empty."""
    data = DataSet(ctx.inputs["data"])
    if not len(data):
        raise StageError("the data set is empty", str(ctx.inputs["data"]))
    return data


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear up over the first share `warmup` of the steps, then linear down to 0 after the last."""
    rise = max(1, round(steps * warmup))
    return peak * min((step + 1) / rise, (steps - step) / max(1, steps - rise + 1))
