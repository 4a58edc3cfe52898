"""Audit of tasks: their gates in order (`gates`), as measured in sandboxes (`inspection`), then two judges if there is a model.

What is found is written task by task (`audit_log`): an audit that was killed goes on where it was.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from termrsi.ports import Writer
from termrsi.records import Finding, Message, Outcome, SkippedTask, TaskAudit, TaskSpec
from termrsi.reward import gates, judges
from termrsi.reward.audit_log import AuditLog
from termrsi.reward.checks import content_key
from termrsi.reward.inspection import Bench, Inspection

FORMAT = "audit-1"  # of what is found, and by what rules: what another one found is not taken for it


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Implements `ports.Auditor`. `salt`: what findings depend on beside the tasks (backend, kit). At most `jobs` tasks at a time.

    `online`: see `inspection`. `judge_tokens`: of a judge's answer; `judge_fits`: whether it has room for a question.
    """

    bench: Bench
    log: Path
    mutants: int = 8
    jobs: int = 1
    salt: Sequence[str] = ()
    online: Bench | None = None
    judge: Writer | None = None
    judge_name: str = ""
    judge_tokens: int = judges.MAX_TOKENS
    judge_fits: Callable[[Sequence[Message]], bool] = judges.unbounded

    async def run(self, tasks: Sequence[TaskSpec]) -> AsyncGenerator[TaskAudit, None]:
        """See `ports.Auditor`. Raises ConfigError if another audit writes to the log, EngineError if the judge cannot be had."""
        slots = asyncio.Semaphore(self.jobs)
        with AuditLog(self.log) as log:

            async def one(task: TaskSpec) -> TaskAudit:
                async with slots:
                    return await self._audit(task, log)

            jobs = [asyncio.ensure_future(one(task)) for task in tasks]
            try:
                for job in asyncio.as_completed(jobs):
                    yield await job
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)

    async def _audit(self, task: TaskSpec, log: AuditLog) -> TaskAudit:
        key = await asyncio.to_thread(content_key, task.path, FORMAT, task.id, str(self.mutants), *self.salt)
        known, sandbox_s = log.found(key, "gates"), 0.0
        if known is not None:
            found = tuple(Finding(gate, Outcome(outcome), tuple(evidence)) for gate, outcome, evidence in known)
        else:
            inspection = Inspection(task, self.bench, self.online, self.mutants)
            found = await _gates(inspection)
            sandbox_s = inspection.sandbox_s
            lines = [[one.gate, one.outcome.value, list(one.evidence)] for one in found]
            log.add(key, "gates", task.id, lines, finished=all(one.outcome is not Outcome.unmeasured for one in found))
        if self.judge is None or any(gates.leaves(finding) for finding in found):
            return TaskAudit(task.id, task.path, found, sandbox_s)
        facets, used = await judges.judged(
            task, self.judge, self.judge_name, key, log, max_tokens=self.judge_tokens, fits=self.judge_fits
        )
        return TaskAudit(task.id, task.path, found + facets, sandbox_s, used.prompt_tokens, used.completion_tokens, used.cost)


async def _gates(inspection: Inspection) -> tuple[Finding, ...]:
    """Findings up to the first that the task leaves at."""
    found: list[Finding] = []
    async with aclosing(inspection.findings()) as findings:
        async for finding in findings:
            found.append(finding)
            if gates.leaves(finding):
                break
    return tuple(found)


def refused(skipped: SkippedTask) -> TaskAudit:
    """Of a directory that the loaders refuse: it enters the first gate, and leaves there."""
    return TaskAudit(Path(skipped.path).name, skipped.path, (Finding("loads", Outcome.reject, (skipped.reason,)),))
