"""RSR 1, discover: every harness on every task; verifier-passing trajectories are the sources of the rewrite."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from termrsi.config.stages import RsrConfig
from termrsi.harness.group import task_group
from termrsi.records import ScoredRollout, TaskSpec
from termrsi.stages.base import Context

Found = dict[str, Any]  # Any: JSON; what `discover` says of one task


@dataclass(frozen=True, slots=True)
class Source:
    """A solved task with one verified trajectory: the commands that did it."""

    task: TaskSpec
    rollout_id: str
    harness: str
    commands: tuple[str, ...]


async def discover(ctx: Context, config: RsrConfig, task: TaskSpec) -> list[ScoredRollout]:
    """Every harness on one task."""
    specs = [
        spec
        for harness in config.harnesses
        for spec in task_group(
            task,
            config.attempts,
            label=f"{ctx.name}/{harness}",
            harness=harness,
            sampling=ctx.sampling(config.discover_temperature),
            limits=ctx.limits(),
            seed=ctx.config.seed,
            model=ctx.player("solver"),
        )
    ]
    return await ctx.episodes(specs, f"{ctx.name}: discover", advance=lambda note: None)


def told(results: Sequence[ScoredRollout]) -> Found:
    """Of one task's attempts: who solved it, and its shortest verified trajectory."""
    verified = [r for r in results if r.verdict.strict and commands_of(r)]
    best = min(verified, key=lambda r: (len(commands_of(r)), r.rollout.completion_tokens, r.rollout.id), default=None)
    return {
        "attempts": len(results),
        "solved_by": sorted({r.rollout.harness for r in results if r.verdict.strict}),
        "source": None if best is None else [best.rollout.id, best.rollout.harness, list(commands_of(best))],
    }


def counted(config: RsrConfig, found: Iterable[Found]) -> dict[str, int]:
    """Of all tasks: attempts, tasks solved by each harness and by any."""
    counts = Counter({"tasks": 0, "attempts": 0} | {f"solved_by_{h}": 0 for h in config.harnesses} | {"solved_jointly": 0})
    for one in found:
        counts.update({"tasks": 1, "attempts": one["attempts"], "solved_jointly": int(bool(one["solved_by"]))})
        counts.update(f"solved_by_{harness}" for harness in one["solved_by"])
    return dict(counts)


def source_of(task: TaskSpec, found: Found) -> Source:
    rollout_id, harness, commands = found["source"]
    return Source(task, rollout_id, harness, tuple(commands))


def commands_of(result: ScoredRollout) -> tuple[str, ...]:
    """What was executed, in order."""
    return tuple(turn.command for turn in result.rollout.turns if turn.command)
