"""Strict success and progress of the weights that the generator serves now, on a list of tasks."""

from termrsi.config.stages import EvaluateConfig, RewardConfig
from termrsi.harness.group import task_group
from termrsi.records import ScoredRollout, TaskSpec
from termrsi.stages.base import Context, Rewarder


async def score(
    ctx: Context, tasks: list[TaskSpec], config: EvaluateConfig, *, label: str, file: str = "rollouts.jsonl"
) -> dict[str, dict]:
    """k episodes per task. A task none of whose episodes survived the machine is left out, and counted as dropped."""
    specs = [
        spec
        for task in tasks
        for spec in task_group(
            task,
            config.k,
            label=label,
            harness=config.harness,
            sampling=ctx.sampling(config.temperature, config.top_p),
            limits=ctx.limits(),
            seed=ctx.config.seed,
        )
    ]
    rewarder = Rewarder(ctx, RewardConfig())
    by_task: dict[str, list[ScoredRollout]] = {}
    for scored in await ctx.episodes(specs, f"{label}: {len(tasks)} tasks x {config.k}", file):
        by_task.setdefault(scored.rollout.task_id, []).append(scored)
    families = {task.id: task.family for task in tasks}
    return {
        task_id: {
            "family": families[task_id],
            "strict": [int(s.verdict.strict) for s in runs],
            "progress": [round(rewarder.progress(s), 4) for s in runs],
            "stop": [s.rollout.stop.value for s in runs],
        }
        for task_id, runs in by_task.items()
    }
