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


async def execute(ctx: Context, config: RsrConfig, runbook: Runbook) -> list[tuple[int, ScoredRollout]]:
    """The runbook's number with every execution of it that the machine did not lose."""
    specs = task_group(
        runbook.task,
        config.executions,
        label=f"{ctx.name}/execute{runbook.number}",
        harness=config.execute_harness,
        sampling=ctx.sampling(config.execute_temperature),
        limits=ctx.limits(),
        seed=ctx.config.seed,
        guidance=runbook.text,
    )
    results = await ctx.episodes(specs, f"{ctx.name}: execute", advance=lambda note: None)
    return [(runbook.number, result) for result in results]
