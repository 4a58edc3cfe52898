"""The run of a stage that trains on rollouts: batches, steps, candidates, what was retained. What a step does is the stage's own.

The loop waits for a batch of the buffer, then for the step's hosts, then for a validation; each wait ends with that, or raises.
"""

from typing import Any, Protocol

from termrsi.config.stages import RetentionConfig
from termrsi.records import FinishedBatch
from termrsi.stages import retain
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.checkpoints import Checkpoints, Host
from termrsi.stages.sampler import Sampler, rollouts_of

Summary = dict[str, float | int | str | None]


class Loop(Protocol):
    """The steps of one phase, and what they carry from one to the next."""

    def sampler(self) -> Sampler: ...

    async def step(self, step: int, taken: FinishedBatch) -> None:
        """Its number, from 1 on, and its batch. On return the generator serves the new weights."""
        ...

    async def state(self) -> dict[str, Any]:
        """JSON, for `restore`; asked between a step and the draws of those that wait for it."""
        ...

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def let_go(self, step: int) -> None:
        """The stage will not be taken back to before the end of `step`: what only that would need may go."""
        ...


async def play(ctx: Context, loop: Loop, *, steps: int, retention: RetentionConfig, checkpoint_every: int) -> retain.Keeper:
    """Writes `policy/` (retained), `critic/` where there is one, and `retention.json`.

    The weights that a phase begins with are its first incumbent. Validation runs beside the sampling of the next batch; with
    `retention.rollback` before it, so that a refused candidate samples nothing more. A checkpoint is of the end of a step, before
    its weights are judged as a candidate: a phase that goes on judges them first.
    """
    hosts: dict[str, Host] = {"policy": ctx.policy}
    if ctx.critic is not None:
        hosts["critic"] = ctx.critic
    sampler = loop.sampler()
    with Checkpoints(ctx, checkpoint_every, steps, hosts) as checkpoints:
        done, found = await checkpoints.take_up()
        if found is None:
            keeper = retain.Keeper(ctx, retention, await retain.measure(ctx, 0, retention))
            await keeper.start()
        else:
            keeper = retain.Keeper.restored(ctx, retention, found["keeper"])
            sampler.restore(found["sampler"])
            await loop.restore(found["loop"])
            await _judge(ctx, keeper, done, steps, retention)
        async with sampler:
            for number in range(done + 1, steps + 1):
                async with ctx.step(number):
                    batch = await sampler.batch(f"{ctx.name}: step {number}/{steps}")
                    await loop.step(number, batch)
                own = None
                if checkpoints.due(number):
                    own = {"keeper": keeper.state(), "sampler": sampler.state(), "loop": await loop.state()}
                if not retention.rollback:
                    await sampler.trained()
                trained = [rollout.rollout.id for rollout in rollouts_of(batch.groups)]
                await checkpoints.add(number, {"rollouts": trained, "refused": list(batch.refused)}, own)
                await loop.let_go(checkpoints.oldest(number))
                await _judge(ctx, keeper, number, steps, retention)
                if retention.rollback:
                    await sampler.trained()
    write_json(ctx.out / "retention.json", keeper.log)
    return keeper


async def _judge(ctx: Context, keeper: retain.Keeper, number: int, steps: int, retention: RetentionConfig) -> None:
    """The present weights, if this step makes them a candidate."""
    if number % retention.every == 0 or number == steps:
        kept = await keeper.offer(await retain.measure(ctx, number, retention))
        if retention.rollback and not kept and number < steps:
            await keeper.roll_back()


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
