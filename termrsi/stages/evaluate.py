"""Evaluate: Mean@k and pass@k on one split, with intervals, and task by task against an earlier evaluation.

Mean@k is the mean over tasks of passes ÷ k; pass@k the unbiased estimate of at least one pass in k. Intervals are bootstraps over
tasks (95 %): tasks are the sample, repeats of one task are not independent.
"""

import json

from termrsi.algo import metrics
from termrsi.config.stages import EvaluateConfig
from termrsi.errors import StageError
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.scoring import score


async def run(ctx: Context, config: EvaluateConfig) -> StageResult:
    """Writes `scores.json`: per task, strict success and progress of each run."""
    tasks = ctx.tasks.of(config.split)
    scores = await score(ctx, tasks, config, label=ctx.name)
    write_json(ctx.out / "scores.json", scores)
    summary = summarise(scores, config.k, seed=ctx.config.seed)
    if config.baseline:
        before = json.loads(ctx.inputs["baseline"].read_text())
        summary |= compare(before, scores, seed=ctx.config.seed)
    ctx.log(ctx.name, {k: v for k, v in summary.items() if isinstance(v, float)})
    return StageResult({"scores": str(ctx.out / "scores.json")}, summary)


def summarise(scores: dict[str, dict], k: int, *, seed: int) -> dict[str, float | int | str | None]:
    """Mean@k, pass@k and mean progress, the first two with 95 % intervals over tasks."""
    if not scores:
        raise StageError("no task could be scored", "evaluate", "see the dropped episodes in rollouts.jsonl")
    passes = [s["strict"] for s in scores.values()]
    progress = [sum(s["progress"]) / len(s["progress"]) for s in scores.values()]
    mean = metrics.bootstrap_interval(passes, seed=seed)
    at_k = metrics.bootstrap_interval([[metrics.pass_at_k(len(p), sum(p), min(k, len(p)))] for p in passes], seed=seed)
    return {
        "tasks": len(scores),
        "k": k,
        "mean_at_k": mean.estimate,
        "mean_low": mean.low,
        "mean_high": mean.high,
        "pass_at_k": at_k.estimate,
        "pass_low": at_k.low,
        "pass_high": at_k.high,
        "progress": sum(progress) / len(progress),
    }


def compare(before: dict[str, dict], after: dict[str, dict], *, seed: int) -> dict[str, float | int | str | None]:
    """Difference of Mean@k on the tasks both have, paired by task, with its 95 % interval."""
    both = [t for t in after if t in before]
    gain = metrics.paired_bootstrap_interval([before[t]["strict"] for t in both], [after[t]["strict"] for t in both], seed=seed)
    return {
        "baseline_mean": metrics.mean_at_k([before[t]["strict"] for t in both]),
        "gain": gain.estimate,
        "gain_low": gain.low,
        "gain_high": gain.high,
    }
