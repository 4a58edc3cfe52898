"""Strict success and progress of the weights that the generator serves now, on a list of tasks."""

from contextlib import aclosing

from termrsi.config.stages import EvaluateConfig, RewardConfig
from termrsi.harness.group import task_group
from termrsi.records import TaskSpec
from termrsi.stages.base import ROLLOUTS, Context, Rewarder


async def score(
    ctx: Context, tasks: list[TaskSpec], config: EvaluateConfig, *, label: str, file: str = ROLLOUTS
) -> dict[str, dict]:
    """k episodes per task. A task none of whose episodes survived the machine is left out, and counted as dropped.

    In a stage that goes on, what these very weights had played before the stop is not played again.
    """
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
    rewarder, places = Rewarder(ctx, RewardConfig()), {spec.id: place for place, spec in enumerate(specs)}
    runs: dict[str, list[tuple[int, int, float, str]]] = {}  # of each task, by place: what is kept of its episodes
    async with aclosing(ctx.stream(specs, f"{label}: {len(tasks)} tasks x {config.k}", file, since=ctx.version)) as results:
        async for scored in results:
            figures = (int(scored.verdict.strict), round(rewarder.progress(scored), 4), scored.rollout.stop.value)
            runs.setdefault(scored.rollout.task_id, []).append((places[scored.rollout.id], *figures))
    scores = {}
    for task in tasks:
        if task.id in runs:
            _, strict, progress, stop = (list(column) for column in zip(*sorted(runs[task.id]), strict=True))
            scores[task.id] = {"family": task.family, "strict": strict, "progress": progress, "stop": stop}
    return scores
