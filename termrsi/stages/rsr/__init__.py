"""RSR, recursive self-rewrite (arXiv 2610.02826): discover, plan, screen, execute, verify, collect; one model plays every part."""

import asyncio
from collections import Counter
from dataclasses import asdict

from termrsi import datasets
from termrsi.config.stages import RsrConfig
from termrsi.errors import StageError
from termrsi.harness.group import seed_of
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.rsr.collect import collect
from termrsi.stages.rsr.discover import Source, discover
from termrsi.stages.rsr.execute import Runbook, execute
from termrsi.stages.rsr.plan import Planner
from termrsi.stages.rsr.screen import Screener


async def run(ctx: Context, config: RsrConfig) -> StageResult:
    """Writes `data.parquet` (the SFT set), `runbooks.json`, and counts of what each filter kept and refused."""
    sources, counts = await discover(ctx, config)
    if config.sources:
        sources = sources[: config.sources]
    runbooks, screened = await _runbooks(ctx, config, sources)
    write_json(ctx.out / "runbooks.json", [{"task": r.task.id, "number": r.number, "text": r.text} for r in runbooks])
    executed = await execute(ctx, config, runbooks)
    tasks = {task.id: task for task in ctx.tasks.train}
    samples, collected = collect(ctx.chat, tasks, [scored for _, scored in executed], config.keep_per_task)
    counts |= {"sources": len(sources), "runbooks": len(runbooks), **screened, **collected}
    ctx.log(ctx.name, {k: float(v) for k, v in counts.items()})
    if not samples:
        raise StageError("no execution was verified, so there is nothing to train on", ctx.name, f"counts: {counts}")
    source_of = {source.task.id: source.rollout_id for source in sources}
    rows = datasets.rows_of(
        samples,
        [scored for _, scored in executed],
        await ctx.lineage(datasets.Kind.rsr),
        runbooks={scored.rollout.id: runbook.number for runbook, scored in executed},
        parents={scored.rollout.id: source_of[runbook.task.id] for runbook, scored in executed},
    )
    datasets.write(ctx.out / "data.parquet", rows)
    summary: dict[str, float | int | str | None] = {
        "solved": counts["solved_jointly"],
        "runbooks": len(runbooks),
        "verified": collected["verified"],
        "kept": len(samples),
    }
    return StageResult({"data": str(ctx.out / "data.parquet")}, summary, counts=counts)


async def _runbooks(ctx: Context, config: RsrConfig, sources: list[Source]) -> tuple[list[Runbook], dict[str, int]]:
    """K runbooks per source, each revised up to `rounds` times; a runbook that never passes is dropped, not its task."""
    planner = Planner(ctx.generator, ctx.chat, ctx.sampling(config.plan_temperature, max_tokens=config.plan_tokens))
    screener = Screener(ctx.generator, ctx.chat, ctx.scan)
    refused: Counter[str] = Counter()
    log: list[dict] = []
    ctx.progress.begin(f"{ctx.name}: plan and screen", len(sources) * config.runbooks)
    slots = asyncio.Semaphore(ctx.config.sandbox.concurrency)

    async def one(source: Source, number: int) -> Runbook | None:
        text, reasons = "", ()
        for attempt in range(config.rounds + 1):
            seed = seed_of(ctx.config.seed, ctx.name, source.task.id, number, attempt)
            async with slots:
                text, tokens = await planner.write(source.task.instruction, source.commands, seed, text, reasons)
                ctx.costs.completion_tokens += tokens
                reasons = await screener.refusals(source.task, text, seed)
            log.append({"task": source.task.id, "number": number, "attempt": attempt, "text": text, "refused": reasons})
            if not reasons:
                ctx.progress.advance()
                return Runbook(source.task, number, text)
            refused.update(reasons)
        ctx.progress.advance("dropped")
        return None

    made = await asyncio.gather(*[one(s, k) for s in sources for k in range(config.runbooks)])
    ctx.progress.end()
    write_json(ctx.out / "screen.json", log)
    write_json(ctx.out / "sources.json", [{**asdict(s), "task": s.task.id} for s in sources])
    return [r for r in made if r is not None], {f"refused_{reason}": n for reason, n in sorted(refused.items())}
