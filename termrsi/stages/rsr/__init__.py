"""RSR, recursive self-rewrite (arXiv 2610.02826): discover, plan, screen, execute, verify, collect; one model plays every part,
unless others are configured for solver, planner or critic (`roles`); executions are always the policy's own.

Two passes, each item by item with no barrier between items: every task is discovered, then every source is planned, screened,
executed and collected by itself. A finished item is a line of a journal, and only the items under way are in memory.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from termrsi import datasets
from termrsi.config.stages import RsrConfig
from termrsi.errors import RequestRefused, StageError
from termrsi.harness.group import seed_of
from termrsi.records import TaskSpec
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.journal import Journal, each
from termrsi.stages.rsr.collect import collect, total
from termrsi.stages.rsr.discover import Found, Source, counted, discover, source_of, told
from termrsi.stages.rsr.execute import Runbook, execute
from termrsi.stages.rsr.plan import Planner
from termrsi.stages.rsr.screen import Screener

Rewritten = dict[str, Any]  # Any: JSON; what one source became


async def run(ctx: Context, config: RsrConfig) -> StageResult:
    """Writes `data.parquet` (the rewritten set), `source_data.parquet` (the sources as they were), and the journals of both passes.

    Raises StageError if no execution was verified.
    """
    tasks = ctx.tasks.train[: config.tasks or None]
    of_id = {task.id: task for task in tasks}
    with Journal(ctx.out / "discovered.jsonl") as discovered, Journal(ctx.out / "rewritten.jsonl") as rewritten:
        async with ctx.phase("discover", len(tasks)):
            made = await ctx.lineage(datasets.Kind.source)
            await _each(ctx, discovered, ((task.id, task) for task in tasks), lambda task: _discovered(ctx, config, task, made))
        counts = counted(config, (found for _, found in discovered.values(of_id)))
        solved = [task_id for task_id, found in discovered.values(of_id) if found["source"] is not None]
        chosen = solved[: config.sources or None]
        sources = (source_of(of_id[task_id], found) for task_id, found in discovered.values(chosen))
        rewriter = _Rewriter(ctx, config, replace(made, kind=datasets.Kind.rsr))
        async with ctx.phase("rewrite", len(chosen)):
            await _each(ctx, rewritten, ((s.task.id, s) for s in sources), rewriter.rewrite)
        refused: Counter[str] = Counter()
        for _, one in rewritten.values(chosen):
            refused.update(reason for draft in one["drafts"] for reason in draft["refused"])
        runbooks = [{"task": task_id, **book} for task_id, one in rewritten.values(chosen) for book in one["runbooks"]]
        collected = total(one["counts"] for _, one in rewritten.values(chosen))
        counts |= {"lost": len(tasks) - len(discovered) + len(chosen) - len(rewritten)}
        counts |= {"sources": len(chosen), "runbooks": len(runbooks)}
        counts |= {f"refused_{reason}": n for reason, n in sorted(refused.items())} | collected
        ctx.log(ctx.name, {k: float(v) for k, v in counts.items()})
        if not collected["kept"]:
            raise StageError("no execution was verified, so there is nothing to train on", ctx.name, f"counts: {counts}")
        write_json(ctx.out / "runbooks.json", runbooks)
        datasets.write(ctx.out / "data.parquet", _rows(one for _, one in rewritten.values(chosen)))
        num_sources = datasets.write(ctx.out / "source_data.parquet", _rows(one for _, one in discovered.values(chosen)))
    summary: dict[str, float | int | str | None] = {
        "solved": counts["solved_jointly"],
        "runbooks": len(runbooks),
        "verified": collected["verified"],
        "kept": collected["kept"],
        "source_samples": num_sources,
        **ctx.shares(),
    }
    outputs = {"data": str(ctx.out / "data.parquet"), "source_data": str(ctx.out / "source_data.parquet")}
    return StageResult(outputs, summary, counts=counts)


async def _discovered(ctx: Context, config: RsrConfig, task: TaskSpec, made: datasets.Lineage) -> Found | None:
    """What every harness made of one task, with its verified trajectories as samples; None if the machine lost every attempt.

    Those are what training on the sources themselves takes: the solver's tokens and what it saw, its harness's interventions
    included, under the general harness's prompt.
    """
    results = await discover(ctx, config, task)
    if not results:
        return None
    kept, counts = collect(ctx.chat, task, [(r.rollout.harness, r) for r in results], config.keep_per_task)
    rows = datasets.rows_of([sample for _, sample in kept], results, made)
    return {**told(results), "rows": [datasets.cells_of(row) for row in rows], "counts": counts}


class _Rewriter:
    """Plan, screen, execute, verify and collect for one source at a time."""

    def __init__(self, ctx: Context, config: RsrConfig, made: datasets.Lineage) -> None:
        self._ctx, self._config, self._made = ctx, config, made
        sampling = ctx.sampling(config.plan_temperature, max_tokens=config.plan_tokens)
        room = config.plan_room(ctx.config.model.max_model_len)
        self._planner = Planner(
            ctx.ask, sampling, whole=config.plan_whole, fits=lambda messages: len(ctx.chat.prompt(messages)) <= room
        )
        self._screener = Screener(ctx.ask, ctx.scan, config.critic_tokens)

    async def rewrite(self, source: Source) -> Rewritten | None:
        """K runbooks, those that pass executed M times each; what is kept of the executions. None if the machine lost them all."""
        ctx, config = self._ctx, self._config
        drafts: list[dict[str, object]] = []
        books = await asyncio.gather(*[self._runbook(source, number, drafts) for number in range(config.runbooks)])
        passed = [book for book in books if book is not None]
        executed = [pair for group in await asyncio.gather(*[execute(ctx, config, book) for book in passed]) for pair in group]
        if passed and not executed:
            return None
        kept, counts = collect(ctx.chat, source.task, executed, config.keep_per_task)
        rows = datasets.rows_of(
            [sample for _, sample in kept],
            [result for _, result in executed],
            self._made,
            runbooks={sample.rollout_id: number for number, sample in kept},
            parents={sample.rollout_id: source.rollout_id for _, sample in kept},
        )
        return {
            "drafts": sorted(drafts, key=lambda draft: (draft["number"], draft["attempt"])),
            "runbooks": [{"number": book.number, "text": book.text} for book in passed],
            "rows": [datasets.cells_of(row) for row in rows],
            "counts": counts,
        }

    async def _runbook(self, source: Source, number: int, drafts: list[dict[str, object]]) -> Runbook | None:
        """Revised up to `rounds` times; one that never passes, or that the planner is not let write, is dropped, not its task."""
        ctx, text, reasons = self._ctx, "", ()
        for attempt in range(self._config.rounds + 1):
            seed = seed_of(ctx.config.seed, ctx.name, source.task.id, number, attempt)
            try:
                text = await self._planner.write(source.task.instruction, source.commands, seed, text, reasons)
            except RequestRefused:
                drafts.append({"number": number, "attempt": attempt, "text": "", "refused": ["planner_refused"]})
                return None
            reasons = await self._screener.refusals(source.task, text, seed)
            drafts.append({"number": number, "attempt": attempt, "text": text, "refused": list(reasons)})
            if not reasons:
                return Runbook(source.task, number, text)
        return None


async def _each(ctx: Context, journal: Journal, items: Iterable, work: Any) -> None:  # Any: see `each`
    async def done(note: str) -> None:
        await ctx.keep_costs()
        ctx.progress.advance(note)

    await each(journal, items, work, at_once=ctx.config.sandbox.concurrency, done=done)


def _rows(items: Iterable[dict[str, Any]]) -> Iterable[datasets.Row]:  # Any: JSON
    for item in items:
        yield from map(datasets.row_of, item["rows"])
