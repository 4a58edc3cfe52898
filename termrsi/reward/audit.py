"""Audit of tasks: their gates in order (`gates`), measured in sandboxes, then two judges if there is a model (`judges`).

What is found is written task by task (`audit_log`): an audit that was killed goes on where it was.
"""

import asyncio
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.ports import Sandbox, SandboxPool, Verifier, Writer
from termrsi.records import Finding, Outcome, SkippedTask, TaskAudit, TaskSpec, Verdict
from termrsi.reward import endstate, gates, judges, mutants, oracle, steps
from termrsi.reward.audit_log import AuditLog
from termrsi.reward.checks import attempt, content_key
from termrsi.reward.endstate import State
from termrsi.reward.gates import Run, Timed, Tried
from termrsi.reward.verifiers import TaskVerifier

FORMAT = "audit-1"  # of what is found, and by what rules: what another one found is not taken for it
RUNS = 2  # of the solution, and of an empty submission
RETRIES = 2  # fresh sandboxes for what a machine lost
SAID_CHARS = 4000
MUTANT_FLOOR_S, MUTANT_TIMES = 10.0, 3.0  # a mutant may take this many times the solution's seconds: one that hangs is broken
_LOG = "/logs/verifier/test-stdout.txt"

Scripts = Mapping[str, Mapping[str, str]]  # step ("" if there is none) -> file of its solution -> other text


@dataclass(slots=True)
class _Submission:
    """Stands for the agent, and for the verifier, of one run: keeps what they took and said."""

    verifier: Verifier
    limits: Mapping[str, float]  # of the verifier, by step
    scripts: Scripts = field(default_factory=dict)
    limit_s: float | None = None  # of a mutant
    forget: bool = False  # the solution's directory is removed, and the state verified twice
    watch: bool = False  # the state that the solution leaves is looked at
    stop_at: tuple[State, State] | None = None  # states of the whole solution: its like is not verified
    state: dict[str, str] | None = field(default_factory=dict)
    again: list[Verdict] = field(default_factory=list)
    again_fault: str = ""
    said: list[str] = field(default_factory=list)
    times: list[Timed] = field(default_factory=list)

    async def act(self, sandbox: Sandbox, task: TaskSpec) -> None:
        """Runs the solution, or a mutant of it. Raises TaskError if the solution runs out of time, as a mutant may."""
        if self.watch:
            await endstate.begin(sandbox)
        try:
            result = await oracle.solve(sandbox, task, self.scripts.get(task.step), limit_s=self.limit_s)
        except SandboxSpoiled as error:
            raise TaskError(f"its own solution leaves the sandbox unusable: {error.what}", task.id) from error
        self.said.append(result.output[-SAID_CHARS:])
        if self.limit_s is None:
            oracle.in_time(result, task)
        if task.agent_timeout_s:
            self.times.append(Timed(_step("its solution", task), result.duration_s, task.agent_timeout_s))
        if self.forget:
            await sandbox.run(f"cd /; rm -rf {oracle.PLACE}")
        if self.watch and self.state is not None:
            found = await endstate.taken(sandbox, task.instruction)
            self.state = None if found is None else self.state | {f"{task.step}:{path}": what for path, what in found.items()}

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        """See `ports.Verifier`."""
        if self.stop_at is not None and self.state is not None and not task.step and endstate.same(self.state, *self.stop_at):
            raise _EqualState
        try:
            verdict = await self.verifier.verify(sandbox, task)
        except VerifierError:
            self.said.append((await sandbox.run(f"tail -c {SAID_CHARS} {shlex.quote(_LOG)} 2> /dev/null")).output)
            raise
        self.said.append(verdict.log[-SAID_CHARS:])
        if limit_s := self.limits.get(task.step):
            self.times.append(Timed(_step("its verifier", task), verdict.duration_s, limit_s))
        if self.forget:
            try:
                self.again.append(await self.verifier.verify(sandbox, task))
            except VerifierError as error:
                self.again_fault = str(error)
        return verdict


class _EqualState(Exception):
    """A mutant left what the whole solution leaves: there is nothing to notice."""


def _step(what: str, task: TaskSpec) -> str:
    return f"{what} of step {task.step}" if task.step else what


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Implements `ports.Auditor`. `online`: a pool whose sandboxes have a network, to tell who needs one. `salt`: what findings
    depend on beside the tasks (backend, kit). At most `jobs` tasks at a time."""

    pool: SandboxPool
    verifier: Verifier
    log: Path
    mutants: int = 8
    jobs: int = 1
    salt: Sequence[str] = ()
    online: SandboxPool | None = None
    online_verifier: Verifier | None = None
    judge: Writer | None = None
    judge_name: str = ""

    async def run(self, tasks: Sequence[TaskSpec]) -> AsyncGenerator[TaskAudit, None]:
        """See `ports.Auditor`. Raises ConfigError if another audit writes to the log, what is no machine's fault as it comes."""
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
        known = log.found(key, "gates")
        if known is not None:
            found = tuple(Finding(gate, Outcome(outcome), tuple(evidence)) for gate, outcome, evidence in known)
        else:
            found = tuple([finding async for finding in self._gates(task)])
            lines = [[one.gate, one.outcome.value, list(one.evidence)] for one in found]
            log.add(key, "gates", task.id, lines, finished=all(one.outcome is not Outcome.unmeasured for one in found))
        if self.judge is not None and not any(gates.leaves(finding) for finding in found):
            found += await judges.judged(task, self.judge, self.judge_name, key, log)
        return TaskAudit(task.id, task.path, found)

    async def _gates(self, task: TaskSpec) -> AsyncIterator[Finding]:
        """Findings in the order of the gates, up to the first that the task leaves at; each measures what it needs."""
        async with aclosing(self._measured(task)) as findings:
            async for finding in findings:
                yield finding
                if gates.leaves(finding):
                    return

    async def _measured(self, task: TaskSpec) -> AsyncGenerator[Finding, None]:
        limits, loads = _loads(task)
        yield loads
        yield await self._builds(task)
        solved = [await self._run(task, limits, solve=True, watch=True) for _ in range(RUNS)]
        runs = [run for run, _ in solved]
        online = None
        if not all(run.strict for run in runs) and self.online is not None:
            online, _ = await self._run(_with_network(task), limits, solve=True, online=True)
        finding = gates.network(runs, online, declared=task.environment.network)
        yield finding
        networked = finding.outcome is Outcome.flag and online is not None
        if networked:  # as the task may: from here on it has what it needs
            task = _with_network(task)
            solved = [await self._run(task, limits, solve=True, watch=True, online=True) for _ in range(RUNS)]
            runs = [run for run, _ in solved]
        yield gates.oracle(runs)
        nothing = [(await self._run(task, limits, online=networked))[0] for _ in range(RUNS)]
        yield gates.empty(nothing)
        replayed, _ = await self._run(task, limits, solve=True, forget=True, online=networked)
        yield gates.replay(replayed)
        seconds = max((one.seconds for run in runs for one in run.times if one.what.startswith("its solution")), default=0.0)
        states = [state for _, state in solved]
        yield gates.mutation(await self._mutants(task, limits, states, seconds, online=networked))
        yield gates.flaky(runs, nothing, replayed)
        yield gates.in_time([*runs, *nothing])

    async def _builds(self, task: TaskSpec) -> Finding:
        fault = ""
        for _ in range(1 + RETRIES):
            try:
                await self.pool.release(await self.pool.lease(task))
            except TaskError as error:
                return Finding("builds", Outcome.reject, (str(error),))
            except SandboxError as error:
                fault = str(error)
            else:
                return Finding("builds", Outcome.passed)
        return Finding("builds", Outcome.unmeasured, (f"no sandbox could be started: {fault}",))

    async def _run(
        self,
        task: TaskSpec,
        limits: Mapping[str, float],
        *,
        solve: bool = False,
        watch: bool = False,
        forget: bool = False,
        online: bool = False,
    ) -> tuple[Run, State | None]:
        """An empty submission, or the solution; with the state that it leaves. What the machine loses is tried again."""

        submission = partial(_Submission, self._verifier(online), limits, watch=watch, forget=forget)
        made, verdict, why = await self._tried(task, submission, solve=solve, online=online)
        said = "\n".join(made.said)
        if isinstance(why, TaskError):
            return Run(refused=why.what, said=said), None
        if verdict is None:
            return Run(fault=str(why), said=said), None
        again = None
        if made.again and not made.again_fault:
            again = steps.judged(task, made.again) if task.steps else made.again[0]
        return Run(verdict, again, fault=made.again_fault, said=said, times=tuple(made.times)), made.state if watch else None

    async def _tried(
        self, task: TaskSpec, submission: Callable[[], _Submission], *, solve: bool, online: bool
    ) -> tuple[_Submission, Verdict | None, Exception | None]:
        """The last try, its verdict, or what kept it from one. Raises _EqualState."""
        pool = self.online if online and self.online is not None else self.pool
        made, verdict, why = submission(), None, None
        for _ in range(1 + RETRIES):
            made, verdict = submission(), None
            try:
                verdict, why = await attempt(pool, made, task, made.act if solve else None), None
            except TaskError as error:
                return made, None, error
            except (SandboxError, VerifierError) as error:
                why = error
            if verdict is not None and not made.again_fault:
                break
        return made, verdict, why

    async def _mutants(
        self, task: TaskSpec, limits: Mapping[str, float], states: Sequence[State | None], seconds: float, *, online: bool
    ) -> list[Tried]:
        """`states`: of two whole solutions, which took so many seconds."""
        files = {f"{one.step}:{name}": text for one in steps.parts(task) for name, text in oracle.texts(one).items()}
        chosen = await asyncio.to_thread(mutants.mutants, files, self.mutants, task.id)
        first, second = states
        whole = (first, second) if first is not None and second is not None else None
        limit_s = max(MUTANT_FLOOR_S, MUTANT_TIMES * seconds)
        tried: list[Tried] = []
        for one in chosen:
            step, _, name = one.file.partition(":")

            submission = partial(
                _Submission,
                self._verifier(online),
                limits,
                {step: {name: one.text}},
                limit_s,
                watch=whole is not None,
                stop_at=whole,
            )
            what = one.what.removeprefix(":")
            try:
                made, verdict, _ = await self._tried(task, submission, solve=True, online=online)
            except _EqualState:
                tried.append(Tried(what, equal=True))
                continue
            equal = whole is not None and made.state is not None and endstate.same(made.state, *whole)
            tried.append(Tried(what, equal, None if verdict is None else not verdict.strict))
        return tried

    def _verifier(self, online: bool) -> Verifier:
        return self.online_verifier if online and self.online_verifier is not None else self.verifier


def _loads(task: TaskSpec) -> tuple[dict[str, float], Finding]:
    """The verifier's limits in seconds, by step, and whether its side of the task can be read at all."""
    limits: dict[str, float] = {}
    for part in steps.parts(task):
        try:
            limits[part.step] = TaskVerifier().suite(part).timeout_s
        except TaskError as error:
            return limits, Finding("loads", Outcome.reject, (str(error),))
        except VerifierError as error:
            return limits, Finding("loads", Outcome.unmeasured, (str(error),))
    return limits, Finding("loads", Outcome.passed)


def refused(skipped: SkippedTask) -> TaskAudit:
    """Of a directory that the loaders refuse: it enters the first gate, and leaves there."""
    return TaskAudit(Path(skipped.path).name, skipped.path, (Finding("loads", Outcome.reject, (skipped.reason,)),))


def _with_network(task: TaskSpec) -> TaskSpec:
    return replace(task, environment=replace(task.environment, network=True))
