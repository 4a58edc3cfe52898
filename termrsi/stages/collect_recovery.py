"""ReTerm data (arXiv 2610.18484, sections on data and filters): failures of the policy, continued from the failure state.

The teacher is the policy, unless a model is configured for the role, with a workflow prompt and worked examples that are used only
here, and without a word from the verifier; with an assisting `teacher_harness` it sees the examples as turns, on the failed
machine, without the failed history.
Kept examples pair the failed history (masked), the minimal recovery prompt, and the teacher's own tokens. Of the paper's four
filters two need no model and run here: verifier and format; the judged ones (compliance, efficiency) do not run in this version,
and the counts say so.
"""

from dataclasses import asdict

from termrsi.config.stages import CollectRecoveryConfig
from termrsi.errors import StageError
from termrsi.harness import variants
from termrsi.harness.group import RECOVERY_PROMPT, fits, recovery_group, task_group
from termrsi.harness.render import ChatFormat, restate
from termrsi.records import Message, RecoveryPoint, Sample, ScoredRollout
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.points import is_start, point_of

WORKFLOW_PROMPT = (
    "Your earlier attempt at this task failed. The machine was not reset. Work like this: look at what is there; say to yourself "
    "what the task asks; keep what is right, repair or delete what is wrong; then check the result. One command per reply.\n"
    "Commands that solved other tasks:\n"
    + "\n".join(f"{task} `{command}`" for task, command in variants.get("fewshot").examples)
    + "\nTask: {instruction}"
)

# After worked examples as turns: a small model is led by the last words it reads, and those should be the task.
EXAMPLES_PROMPT = "{instruction}"


async def run(ctx: Context, config: CollectRecoveryConfig) -> StageResult:
    """Writes `data.json` and `points.json`."""
    tasks = ctx.tasks.train[: config.tasks or None]
    specs = [
        spec
        for task in tasks
        for spec in task_group(
            task,
            config.attempts,
            label=f"{ctx.name}/first",
            harness="react",
            sampling=ctx.sampling(config.temperature),
            limits=ctx.limits(),
            seed=ctx.config.seed,
            keep_snapshot=True,
        )
    ]
    first = await ctx.episodes(specs, f"{ctx.name}: first attempts")
    of_task = {task.id: task for task in tasks}
    failures = [s for s in first if is_start(s)]
    points = [point_of(s, of_task[s.rollout.task_id], 0) for s in failures]
    usable = [p for p in points if fits(p, ctx.limits(), reserve_tokens=2 * ctx.config.sampling.max_tokens)]
    write_json(ctx.out / "points.json", [{**asdict(p), "task": p.task.id} for p in usable])
    teacher = [
        spec
        for point in usable
        for spec in recovery_group(
            point,
            config.teacher_attempts,
            label=f"{ctx.name}/teacher",
            harness=config.teacher_harness,
            sampling=ctx.sampling(config.teacher_temperature),
            limits=ctx.limits(),
            seed=ctx.config.seed,
            model=ctx.player("teacher"),
            prompt=EXAMPLES_PROMPT if variants.get(config.teacher_harness).assisting else WORKFLOW_PROMPT,
        )
    ]
    recovered = await ctx.episodes(teacher, f"{ctx.name}: recovery")
    await ctx.rollouts.discard([s.rollout.snapshot for s in first if s.rollout.snapshot is not None])
    samples, counts = keep(ctx.chat, {p.id: p for p in usable}, recovered)
    counts |= {"attempts": len(first), "failures": len(failures), "too_long": len(points) - len(usable), "judged": 0}
    ctx.log(ctx.name, {k: float(v) for k, v in counts.items()})
    if not samples:
        raise StageError("no recovery was verified, so there is nothing to train on", ctx.name, f"counts: {counts}")
    write_json(ctx.out / "data.json", [asdict(sample) for sample in samples])
    summary: dict[str, float | int | str | None] = {
        "failures": len(failures),
        "recoveries": counts["verified"],
        "kept": len(samples),
    }
    return StageResult({"data": str(ctx.out / "data.json")}, summary, counts=counts)


def keep(chat: ChatFormat, points: dict[str, RecoveryPoint], results: list[ScoredRollout]) -> tuple[list[Sample], dict[str, int]]:
    """Verified, well-formed continuations, restated under the minimal prompt; the shortest one per restart point."""
    counts = {"continuations": len(results), "verified": 0, "bad_format": 0, "split_history": 0, "more_than_one": 0, "kept": 0}
    samples: dict[str, Sample] = {}
    for result in sorted(results, key=lambda r: (r.rollout.recovery_id, len(r.rollout.turns), r.rollout.id)):
        rollout = result.rollout
        if not result.verdict.strict:
            continue
        counts["verified"] += 1
        if any(turn.format_error for turn in rollout.turns):
            counts["bad_format"] += 1
        elif len(rollout.chunks) != 1:
            counts["split_history"] += 1
        elif rollout.recovery_id in samples:
            counts["more_than_one"] += 1
        else:
            point = points[rollout.recovery_id]
            history = point.history_ids
            text = RECOVERY_PROMPT.format(instruction=point.task.instruction)
            prompt = [*history, *chat.bridge([Message("user", text)], ended=history[-1:] == (chat.end_of_turn,))]
            chunk = restate(rollout.chunks[0], prompt)
            samples[rollout.recovery_id] = Sample(
                chunk.ids, chunk.mask, chunk.turn_ids, rollout_id=rollout.id, group_id=point.task.id
            )
            counts["kept"] += 1
    return list(samples.values()), counts
