"""`termrsi tasks audit PATH|bundled`: are the tasks of a collection, or of the bundled suite, fit to be trained on?"""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from termrsi.judge import judge_of
from termrsi.ports import Writer
from termrsi.records import LoadResult, Outcome, TaskAudit
from termrsi.report import funnel
from termrsi.reward.gates import GATES
from termrsi.task_folders import loaded
from termrsi.task_options import Options

_OUT = Console(highlight=False, soft_wrap=True)


def run(path: str, options: Options) -> int:
    """0 once it has run, whatever it found. Raises ConfigError."""
    from termrsi.places import cache_dir
    from termrsi.reward.audit import refused

    judge = judge_of(options.judge, options.judge_model, options.judge_key_env)
    result = loaded(path, options)
    log = (Path(options.out) if options.out else cache_dir() / "audit") / "audit.jsonl"
    audits = [*map(refused, result.skipped), *asyncio.run(_audited(result, options, judge, log))]
    show(audits)
    if judge is None:
        _OUT.print("no judge was given: what only a reader can tell has not been looked at", markup=False)
    _OUT.print(f"item by item: {log}", markup=False)
    return 0


def show(audits: list[TaskAudit]) -> None:
    """The funnel, then what was found of each task that is not clean."""
    table = Table("gate", "entered", "rejected", "not measured", "flagged", "")
    for row in funnel.rows(audits, GATES):
        why = ", ".join(f"{facet} {count}" for facet, count in row.why.most_common())
        table.add_row(row.gate, *map(str, (row.entered, row.rejected, row.unmeasured, row.flagged)), why)
    _OUT.print(table)
    for audit in sorted(audits, key=lambda audit: (funnel.VERDICTS.index(audit.verdict), audit.task_id)):
        if audit.verdict != "clean":
            _OUT.print(f"{audit.verdict}: {audit.task_id}", markup=False)
        for finding in audit.findings:
            if finding.outcome is not Outcome.passed:
                for line in finding.evidence:
                    _OUT.print(f"  {finding.gate}: {' '.join(line.split())}", markup=False)
    counts = funnel.verdicts(audits)
    _OUT.print(f"{len(audits)} tasks: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}", markup=False)


async def _audited(result: LoadResult, options: Options, judge: Writer | None, log: Path) -> list[TaskAudit]:
    from termrsi.places import cache_dir
    from termrsi.reward.audit import Auditor
    from termrsi.reward.inspection import Bench
    from termrsi.reward.verifiers import TaskVerifier
    from termrsi.sandbox.host_pool import HostPool
    from termrsi.sandbox.machines import Limits

    def pool(*, network: bool) -> HostPool:
        limits = Limits(build_network=options.build_network == "host", network=network)
        return HostPool(size=options.jobs, cache_dir=cache_dir(), backend=options.backend, owner="audit", limits=limits)

    offline = pool(network=False)
    online = pool(network=True) if options.network == "host" else None
    auditor = Auditor(
        bench=Bench(offline, TaskVerifier(kit=options.kit or None, beside=offline.beside)),
        log=log,
        mutants=options.mutants,
        jobs=options.jobs,
        salt=(options.backend, options.network, options.build_network, str(options.kit and Path(options.kit).absolute())),
        online=Bench(online, TaskVerifier(beside=online.beside)) if online else None,
        judge=judge,
        judge_name=options.judge_model,
    )
    columns = (TextColumn("auditing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    audits: list[TaskAudit] = []
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=len(result.tasks))
            async for audit in auditor.run(result.tasks):
                audits.append(audit)
                progress.advance(bar)
    finally:
        await offline.close()
        if online is not None:
            await online.close()
    return audits
