"""ReTerm data (arXiv 2610.18484, sections on data and filters): failures of the policy, continued from the failure state.

The teacher is the policy, unless another is configured, with a workflow prompt that is used only here, and without a word from the
verifier; with an assisting `teacher_harness` it sees worked examples as turns, on the failed machine, without the failed history.
Kept examples pair the failed history (masked), the minimal recovery prompt, and the teacher's own tokens, of what passes the four
filters (`recovery_filters`).

An item is a task: its first attempts, and all that continues their failures. What they hold of machines ends with the item.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from termrsi import datasets
from termrsi.answers import REFUSED, TOO_LONG
from termrsi.config.choices import Workflow
from termrsi.config.stages import CollectRecoveryConfig
from termrsi.errors import StageError
from termrsi.harness import variants
from termrsi.harness.group import RECOVERY_PROMPT, fits, recovery_group, seed_of, task_group
from termrsi.harness.render import ChatFormat, restate
from termrsi.records import Message, RecoveryPoint, Sample, ScoredRollout, TaskSpec
from termrsi.stages import recovery_filters
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.journal import Journal, each
from termrsi.stages.points import is_start, point_of, reserve
from termrsi.stages.recovery_filters import FILTERS, Filtered

# What a capable teacher works by (the paper's four steps, in our words).
WORKFLOW_PROMPT = (
    "Your earlier attempt at this task failed, and nobody will tell you why. The machine was not reset: what you did is still "
    "there, and may be wrong. Before you change anything:\n"
    "1. Look at what you inherited. Call each part (files, settings, processes, results) trusted, partly trusted, broken or "
    "harmful.\n"
    "2. Read the task again and write down what it asks for, point by point, without regard to what you believed before.\n"
    "3. Say why the attempt failed: a wrong approach, a patch of a symptom, a spoiled state, a missing result, a misread "
    "requirement, a check too shallow, a time limit, an error of syntax or at run time. Write a new test of the result that stands "
    "on the task alone, not on your earlier tests or on what your present work puts out. If it fails, redesign.\n"
    "4. Decide for each part: keep, repair, isolate or discard. Then finish the task, and run your test.\n"
    "Task: {instruction}"
)

# What a small one can follow.
SHORT_PROMPT = (
    "Your earlier attempt at this task failed. The machine was not reset. Work like this: look at what is there; say to yourself "
    "what the task asks; keep what is right, repair or delete what is wrong; then check the result. One command per reply.\n"
    "Commands that solved other tasks:\n"
    + "\n".join(f"{task} `{command}`" for task, command in variants.get("fewshot").examples)
    + "\nTask: {instruction}"
)

# After worked examples as turns: a small model is led by the last words it reads, and those should be the task.
EXAMPLES_PROMPT = "{instruction}"

PROMPTS = {Workflow.full: WORKFLOW_PROMPT, Workflow.short: SHORT_PROMPT}
LATER = ("verified", "split_history", "more_than_one", "kept")
UNJUDGED = tuple(f"judge_{why}" for why in (TOO_LONG, REFUSED))  # what the judge was not asked, or refused to be
COUNTS = ("attempts", "failures", "too_long", "continuations", *(f"refused_{name}" for name in FILTERS), *UNJUDGED, *LATER)

Recovered = dict[str, Any]  # Any: JSON; what became of one task


async def run(ctx: Context, config: CollectRecoveryConfig) -> StageResult:
    """Writes `data.parquet`, `statistics.json`, `recovered.jsonl` with restart points. Raises StageError if nothing was kept."""
    tasks = ctx.tasks.train[: config.tasks or None]
    keys = [task.id for task in tasks]

    async def done(note: str) -> None:
        await ctx.keep_costs()
        ctx.progress.advance(note)

    made = await ctx.lineage(datasets.Kind.recovery)

    async def work(task: TaskSpec) -> Recovered | None:
        return await _recover(ctx, config, task, made)

    with Journal(ctx.out / "recovered.jsonl") as journal:
        async with ctx.phase("failures and recoveries", len(tasks)):
            items = ((task.id, task) for task in tasks)
            await each(journal, items, work, at_once=ctx.config.sandbox.concurrency, done=done)
        whole: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        for _, one in journal.values(keys):
            whole.update(one["counts"])
        counts = {"lost": len(tasks) - len(journal), **whole}
        ctx.log(ctx.name, {k: float(v) for k, v in counts.items()})
        if not counts["kept"]:
            raise StageError("no recovery was verified, so there is nothing to train on", ctx.name, f"counts: {counts}")
        write_json(ctx.out / "statistics.json", _statistics(one for _, one in journal.values(keys)))
        rows = (datasets.row_of(cells) for _, one in journal.values(keys) for cells in one["rows"])
        datasets.write(ctx.out / "data.parquet", rows)
    summary: dict[str, float | int | str | None] = {
        "failures": counts["failures"],
        "recoveries": counts["verified"],
        "kept": counts["kept"],
    }
    return StageResult({"data": str(ctx.out / "data.parquet")}, summary, counts=counts)


def _statistics(items: Iterable[Recovered]) -> dict[str, dict[str, float]]:
    """The funnel of all continuations; domains, tokens and turns of those in the data set."""
    every: list[Filtered] = []
    kept: set[str] = set()
    for one in items:
        every += [Filtered.of_line(line) for line in one["filtered"]]
        kept |= {cells["rollout_id"] for cells in one["rows"]}
    chosen = recovery_filters.statistics([one for one in every if one.rollout_id in kept])
    funnel = recovery_filters.statistics(every)
    return chosen | {name: funnel[name] for name in ("filters", "judge")}


async def _recover(ctx: Context, config: CollectRecoveryConfig, task: TaskSpec, made: datasets.Lineage) -> Recovered | None:
    """First attempts, continuations of the failures among them, and what is kept of these; None if the machine lost them all."""
    first = await ctx.episodes(_attempts(ctx, config, task), f"{ctx.name}: first attempts", advance=lambda note: None)
    if not first:
        return None
    try:
        points = [point_of(scored, task, 0) for scored in first if is_start(scored)]
        prompt = _prompt(config)
        usable = [p for p in points if fits(p, ctx.limits(), reserve_tokens=reserve(ctx, p, prompt))]
        teacher = [spec for point in usable for spec in _continuations(ctx, config, point)]
        results = await ctx.episodes(teacher, f"{ctx.name}: recovery", advance=lambda note: None)
    finally:
        await ctx.rollouts.discard([scored.rollout.snapshot for scored in first if scored.rollout.snapshot is not None])
    of_id = {point.id: point for point in usable}
    filtered = await asyncio.gather(*[_filtered(ctx, config, of_id[result.rollout.recovery_id], result) for result in results])
    samples, counts = keep(ctx.chat, of_id, results, filtered)
    rows = datasets.rows_of(samples, results, made)
    counts |= {f"judge_{why}": sum(why in one.faults for one in filtered) for why in (TOO_LONG, REFUSED)}
    counts |= {"attempts": len(first), "failures": len(points), "too_long": len(points) - len(usable)}
    return {
        "points": [{"id": p.id, "state": p.snapshot.digest, "history_ids": p.history_ids, "commands": p.commands} for p in usable],
        "filtered": [one.as_line() for one in filtered],
        "rows": [datasets.cells_of(row) for row in rows],
        "counts": counts,
    }


async def _filtered(ctx: Context, config: CollectRecoveryConfig, point: RecoveryPoint, result: ScoredRollout) -> Filtered:
    """The four filters. Without a judge, or where the question does not fit it, whatever the rules flag is uncertain."""
    longest = ctx.config.model.max_model_len
    sampling, room = ctx.sampling(0.0, max_tokens=config.answer_tokens(longest)), config.room(longest)
    found = await recovery_filters.judge(
        result,
        point,
        point.task.instruction,
        ctx.writer("judge") if config.judge else None,
        sampling=replace(sampling, seed=seed_of(ctx.config.seed, ctx.name, result.rollout.id)),
        judge_uncertain=config.judge_uncertain.value,
        fits=lambda messages: len(ctx.chat.prompt(messages)) <= room,
    )
    ctx.costs.prompt_tokens += found.prompt_tokens
    ctx.costs.completion_tokens += found.completion_tokens
    ctx.costs.cost += found.cost
    return found


def _attempts(ctx: Context, config: CollectRecoveryConfig, task: TaskSpec) -> list:
    return task_group(
        task,
        config.attempts,
        label=f"{ctx.name}/first",
        harness="react",
        sampling=ctx.sampling(config.temperature),
        limits=ctx.limits(),
        seed=ctx.config.seed,
        keep_snapshot=True,
    )


def _continuations(ctx: Context, config: CollectRecoveryConfig, point: RecoveryPoint) -> list:
    return recovery_group(
        point,
        config.teacher_attempts,
        label=f"{ctx.name}/teacher",
        harness=config.teacher_harness,
        sampling=ctx.sampling(config.teacher_temperature),
        limits=ctx.limits(),
        seed=ctx.config.seed,
        model=ctx.player("teacher"),
        prompt=_prompt(config),
    )


def _prompt(config: CollectRecoveryConfig) -> str:
    return EXAMPLES_PROMPT if variants.get(config.teacher_harness).assisting else PROMPTS[config.workflow]


def keep(
    chat: ChatFormat, points: dict[str, RecoveryPoint], results: Sequence[ScoredRollout], filtered: Sequence[Filtered]
) -> tuple[list[Sample], dict[str, int]]:
    """Continuations that passed the filters, restated under the minimal prompt; the shortest one per restart point."""
    counts = {"continuations": len(results)} | {f"refused_{name}": 0 for name in FILTERS} | dict.fromkeys(LATER, 0)
    refused = {one.rollout_id: one.refused_by for one in filtered}
    samples: dict[str, Sample] = {}
    for result in _shortest_first(results):
        rollout = result.rollout
        counts["verified"] += int(result.verdict.strict)
        if why := refused[rollout.id]:
            counts[f"refused_{why}"] += 1
        elif len(rollout.chunks) != 1:
            counts["split_history"] += 1
        elif rollout.recovery_id in samples:
            counts["more_than_one"] += 1
        else:
            samples[rollout.recovery_id] = _restated(chat, points[rollout.recovery_id], result)
            counts["kept"] += 1
    return list(samples.values()), counts


def _shortest_first(results: Iterable[ScoredRollout]) -> list[ScoredRollout]:
    return sorted(results, key=lambda r: (r.rollout.recovery_id, len(r.rollout.turns), r.rollout.id))


def _restated(chat: ChatFormat, point: RecoveryPoint, result: ScoredRollout) -> Sample:
    """The teacher's tokens after the failed history and the minimal prompt."""
    history = point.history_ids
    text = RECOVERY_PROMPT.format(instruction=point.task.instruction)
    prompt = [*history, *chat.bridge([Message("user", text)], ended=history[-1:] == (chat.end_of_turn,))]
    chunk = restate(result.rollout.chunks[0], prompt)
    return Sample(chunk.ids, chunk.mask, chunk.turn_ids, rollout_id=result.rollout.id, group_id=point.task.id)
