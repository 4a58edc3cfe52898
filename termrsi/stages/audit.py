"""Audit: which train tasks are fit to be trained on (River's filter of environments, arXiv 2608.22631); later ones draw from them.

The gates and their order: `reward.gates`. A task that could not be measured is left out as well, and is told apart. A judge that
cannot be had ends the stage, which goes on task by task.
"""

from contextlib import aclosing

from termrsi.config.stages import AuditConfig
from termrsi.errors import StageError
from termrsi.records import TaskAudit
from termrsi.report import funnel
from termrsi.reward.gates import GATES
from termrsi.stages.base import Context, StageResult, write_json


async def run(ctx: Context, config: AuditConfig) -> StageResult:
    """Writes `tasks.json`, the tasks that stay with their verdicts; `left.json`, the others with what was found; `funnel.json`."""
    assert ctx.auditor is not None, "the pipeline gives an audit its auditor"
    found: dict[str, TaskAudit] = {}
    ctx.progress.begin(f"{ctx.name}: {len(ctx.tasks.train)} tasks", len(ctx.tasks.train))
    async with aclosing(ctx.auditor.run(ctx.tasks.train)) as audits:
        async for audit in audits:
            found[audit.task_id] = audit
            ctx.costs.sandbox_s += audit.sandbox_s
            ctx.costs.prompt_tokens += audit.prompt_tokens
            ctx.costs.completion_tokens += audit.completion_tokens
            ctx.costs.cost += audit.cost
            await ctx.keep_costs()
            ctx.progress.advance(audit.verdict)
    ctx.progress.end()
    audits = [found[task.id] for task in ctx.tasks.train]
    stay = ("clean", "flagged") if config.keep_flagged else ("clean",)
    kept = [audit for audit in audits if audit.verdict in stay]
    rows, paths = funnel.rows(audits, GATES), {task.id: task.path for task in ctx.tasks.train}
    write_json(ctx.out / "tasks.json", [{"task": a.task_id, "verdict": a.verdict, "path": paths[a.task_id]} for a in kept])
    write_json(ctx.out / "left.json", [_told(audit) for audit in audits if audit not in kept])
    write_json(ctx.out / "funnel.json", [_row(row) for row in rows])
    if not kept:
        raise StageError(f"none of {len(audits)} train tasks is {' or '.join(stay)}", ctx.name, f"see {ctx.out / 'left.json'}")
    counts = {word.replace(" ", "_"): count for word, count in funnel.verdicts(audits).items()}
    left = {f"left_at_{row.gate}": row.left for row in rows if row.left}
    verdict = "" if config.judge else "gates only: no judge was given"
    summary: dict[str, float | int | str | None] = {"tasks": len(audits), "kept": len(kept), **counts}
    return StageResult({"tasks": str(ctx.out / "tasks.json")}, summary, verdict, left)


def _told(audit: TaskAudit) -> dict[str, object]:
    evidence = [f"{finding.gate}: {line}" for finding in audit.findings for line in finding.evidence]
    return {"task": audit.task_id, "verdict": audit.verdict, "evidence": evidence}


def _row(row: funnel.Row) -> dict[str, object]:
    numbers = {"entered": row.entered, "rejected": row.rejected, "not measured": row.unmeasured, "flagged": row.flagged}
    return {"gate": row.gate, **numbers, **({"facets": dict(row.why)} if row.why else {})}
