"""RSR 4 and 5, execute and verify: each surviving runbook M times, general harness, fresh sandbox from the task's own image."""

from dataclasses import dataclass

from termrsi.config.stages import RsrConfig
from termrsi.harness.group import task_group
from termrsi.records import ScoredRollout, TaskSpec
from termrsi.stages.base import Context


@dataclass(frozen=True, slots=True)
class Runbook:
    """A screened runbook of one task; `number` tells the runbooks of a task apart."""

    task: TaskSpec
    number: int
    text: str


async def execute(ctx: Context, config: RsrConfig, runbooks: list[Runbook]) -> list[tuple[Runbook, ScoredRollout]]:
    """Every execution that the machine did not lose, with the runbook it followed."""
    of_spec: dict[str, Runbook] = {}
    specs = []
    for runbook in runbooks:
        group = task_group(
            runbook.task,
            config.executions,
            label=f"{ctx.name}/execute{runbook.number}",
            harness=config.execute_harness,
            sampling=ctx.sampling(config.execute_temperature),
            limits=ctx.limits(),
            seed=ctx.config.seed,
            guidance=runbook.text,
        )
        of_spec |= dict.fromkeys((s.id for s in group), runbook)
        specs += group
    results = await ctx.episodes(specs, f"{ctx.name}: execute")
    return [(of_spec[r.rollout.id], r) for r in results]
