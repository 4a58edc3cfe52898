"""RSR 1, discover: every harness on every task; verifier-passing trajectories are the sources of the rewrite."""

from dataclasses import dataclass

from termrsi.config.stages import RsrConfig
from termrsi.harness.group import task_group
from termrsi.records import ScoredRollout, TaskSpec
from termrsi.stages.base import Context


@dataclass(frozen=True, slots=True)
class Source:
    """A solved task with one verified trajectory: the commands that did it."""

    task: TaskSpec
    rollout_id: str
    harness: str
    commands: tuple[str, ...]


async def discover(ctx: Context, config: RsrConfig) -> tuple[list[Source], dict[str, int]]:
    """One source per solved task (the shortest), and solve counts: per harness and jointly."""
    tasks = ctx.tasks.train[: config.tasks or None]
    specs = [
        spec
        for harness in config.harnesses
        for task in tasks
        for spec in task_group(
            task,
            config.attempts,
            label=f"{ctx.name}/{harness}",
            harness=harness,
            sampling=ctx.sampling(config.discover_temperature),
            limits=ctx.limits(),
            seed=ctx.config.seed,
        )
    ]
    results = await ctx.episodes(specs, f"{ctx.name}: discover")
    solved: dict[str, list[ScoredRollout]] = {}
    counts = {"tasks": len(tasks), "attempts": len(specs)} | {f"solved_by_{h}": 0 for h in config.harnesses}
    for harness in config.harnesses:
        counts[f"solved_by_{harness}"] = len(
            {r.rollout.task_id for r in results if r.verdict.strict and r.rollout.harness == harness}
        )
    for result in results:
        if result.verdict.strict and commands_of(result):
            solved.setdefault(result.rollout.task_id, []).append(result)
    counts["solved_jointly"] = len(solved)
    sources = []
    for task in tasks:
        if task.id in solved:
            best = min(solved[task.id], key=lambda r: (len(commands_of(r)), r.rollout.completion_tokens))
            sources.append(Source(task, best.rollout.id, best.rollout.harness, commands_of(best)))
    return sources, counts


def commands_of(result: ScoredRollout) -> tuple[str, ...]:
    """What was executed, in order."""
    return tuple(turn.command for turn in result.rollout.turns if turn.command)
