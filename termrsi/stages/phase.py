"""The run of a stage that trains on rollouts: batches, steps, candidates, what was retained. What a step does is the stage's own.

The loop waits for a batch of the buffer, then for the step's hosts, then for a validation; each wait ends with that, or raises.
"""

from collections.abc import Awaitable, Callable

from termrsi.config.stages import RetentionConfig
from termrsi.records import FinishedGroup
from termrsi.stages import retain
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.sampler import Sampler

Step = Callable[[int, list[FinishedGroup]], Awaitable[None]]  # its number, from 1 on, and its batch
Summary = dict[str, float | int | str | None]


async def play(ctx: Context, sampler: Sampler, step: Step, *, steps: int, retention: RetentionConfig) -> retain.Keeper:
    """Writes `policy/` (retained), `critic/` where there is one, and `retention.json`.

    The weights that a phase begins with are its first incumbent. Validation runs beside the sampling of the next batch; with
    `retention.rollback` before it, so that a refused candidate samples nothing more.
    """
    keeper = retain.Keeper(ctx, retention, await retain.measure(ctx, 0, retention))
    await keeper.start()
    async with sampler:
        for number in range(1, steps + 1):
            async with ctx.step(number):
                await step(number, await sampler.batch(f"{ctx.name}: step {number}/{steps}"))
            if not retention.rollback:
                await sampler.trained()
            if number % retention.every == 0 or number == steps:
                kept = await keeper.offer(await retain.measure(ctx, number, retention))
                if retention.rollback and not kept and number < steps:
                    await keeper.roll_back()
            if retention.rollback:
                await sampler.trained()
    write_json(ctx.out / "retention.json", keeper.log)
    return keeper


def result(ctx: Context, keeper: retain.Keeper, steps: int, own: Summary, *outputs: str) -> StageResult:
    """`outputs`: the directories that later stages may read. `own`: what the stage tells beside its retention."""
    best = keeper.best
    verdict = f"retained step {best.step}" if best.step else "no candidate beat the starting policy: it is retained"
    told: Summary = {
        "steps": steps,
        "retained_step": best.step,
        "validation_before": keeper.before,
        "validation_after": best.mean,
    }
    return StageResult({name: str(ctx.out / name) for name in outputs}, told | own, verdict)
