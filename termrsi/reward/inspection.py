"""What the gates of an audit go by, measured of one task in sandboxes: its solution, nothing, and broken solutions.

What a machine loses is tried again in fresh sandboxes; only then does a gate hear of it, as of a machine's fault.
"""

import asyncio
import shlex
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.ports import Sandbox, SandboxPool, Verifier
from termrsi.records import Finding, Outcome, TaskSpec, Verdict
from termrsi.reward import endstate, gates, mutants, oracle, steps
from termrsi.reward.checks import attempt
from termrsi.reward.endstate import State
from termrsi.reward.gates import Run, Timed, Tried
from termrsi.reward.verifiers import TaskVerifier

RUNS = 2  # of the solution, and of an empty submission
RETRIES = 2  # fresh sandboxes for what a machine lost
LOOKS = 2  # at a mutant that passes
SAID_CHARS = 4000
MUTANT_FLOOR_S, MUTANT_TIMES = 10.0, 3.0  # a mutant may take this many times the solution's seconds: one that hangs is broken
_LOG = "/logs/verifier/test-stdout.txt"

Scripts = Mapping[str, Mapping[str, str]]  # step ("" if there is none) -> file of its solution -> other text


@dataclass(frozen=True, slots=True)
class Bench:
    """Where submissions are tried."""

    pool: SandboxPool
    verifier: Verifier


@dataclass(slots=True)
class _Submission:
    """Stands for the agent, and for the verifier, of one run: keeps what they took and said."""

    verifier: Verifier
    limits: Mapping[str, float]  # of the verifier, by step
    scripts: Scripts = field(default_factory=dict)
    limit_s: float | None = None  # of a mutant
    forget: bool = False  # the solution's directory is removed, and the state verified twice
    watch: bool = False  # the state that the solution leaves is looked at
    unlike: bool = False  # at another time, among other processes than a run before
    stop_at: tuple[State, State] | None = None  # states of the whole solution: its like is not verified
    state: dict[str, str] | None = field(default_factory=dict)
    again: list[Verdict] = field(default_factory=list)
    again_fault: str = ""
    said: list[str] = field(default_factory=list)
    times: list[Timed] = field(default_factory=list)
    solve_s: float = 0.0

    async def act(self, sandbox: Sandbox, task: TaskSpec) -> None:
        """Runs the solution, or a mutant of it. Raises TaskError if the solution runs out of time, as a mutant may."""
        if self.watch:
            await endstate.begin(sandbox, unlike=self.unlike)
        try:
            result = await oracle.solve(sandbox, task, self.scripts.get(task.step), limit_s=self.limit_s)
        except SandboxSpoiled as error:
            raise TaskError(f"its own solution leaves the sandbox unusable: {error.what}", task.id) from error
        self.said.append(result.output[-SAID_CHARS:])
        self.solve_s += result.duration_s
        if self.limit_s is None:
            oracle.in_time(result, task)
        if task.agent_timeout_s:
            self.times.append(Timed(_step("its solution", task), result.duration_s, task.agent_timeout_s))
        if self.forget:
            await sandbox.run(f"rm -rf {oracle.PLACE}")
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


@dataclass(slots=True)
class Inspection:
    """Of one task. `online`: where sandboxes have a network, to tell who needs one. `sandbox_s` is what it has taken so far."""

    task: TaskSpec
    bench: Bench
    online: Bench | None = None
    num_mutants: int = 8
    sandbox_s: float = 0.0
    _limits: dict[str, float] = field(default_factory=dict, init=False)  # of the verifier in seconds, by step

    async def findings(self) -> AsyncGenerator[Finding, None]:
        """One for each gate, in their order; each measures what it needs. Whoever reads them stops where the task leaves."""
        yield self._loads()
        yield await self._builds()
        solved = [await self._run(solve=True, watch=True, unlike=number > 0) for number in range(RUNS)]
        runs = [run for run, _ in solved]
        online = None
        if not all(run.strict for run in runs) and self.online is not None:
            online = await self._probed(self.online)
        finding = gates.network(runs, online, declared=self.task.environment.network)
        yield finding
        if online is not None and self.online is not None and finding.outcome is Outcome.flag:
            # As it may: from here on it has what it needs.
            self.task, self.bench = _with_network(self.task), self.online
            solved = [await self._run(solve=True, watch=True, unlike=number > 0) for number in range(RUNS)]
            runs = [run for run, _ in solved]
        yield gates.oracle(runs)
        nothing = [(await self._run())[0] for _ in range(RUNS)]
        yield gates.empty(nothing)
        replayed, _ = await self._run(solve=True, forget=True)
        yield gates.replay(replayed)
        (_, first), (_, second) = solved
        whole = (first, second) if first is not None and second is not None else None
        seconds = max(run.solve_s for run in runs)
        yield gates.mutation(await self._mutants(whole, max(MUTANT_FLOOR_S, MUTANT_TIMES * seconds)))
        yield gates.flaky(runs, nothing, replayed)
        yield gates.in_time([*runs, *nothing])

    async def _probed(self, online: Bench) -> Run:
        """The solution with a network."""
        task, bench = self.task, self.bench
        self.task, self.bench = _with_network(task), online
        try:
            return (await self._run(solve=True))[0]
        finally:
            self.task, self.bench = task, bench

    def _loads(self) -> Finding:
        """Whether the verifier's side of the task can be read."""
        for part in steps.parts(self.task):
            try:
                self._limits[part.step] = TaskVerifier().suite(part).timeout_s
            except TaskError as error:
                return Finding("loads", Outcome.reject, (str(error),))
            except VerifierError as error:
                return Finding("loads", Outcome.unmeasured, (str(error),))
        return Finding("loads", Outcome.passed)

    async def _builds(self) -> Finding:
        fault = ""
        for _ in range(1 + RETRIES):
            try:
                await self.bench.pool.release(await self.bench.pool.lease(self.task))
            except TaskError as error:
                return Finding("builds", Outcome.reject, (str(error),))
            except SandboxError as error:
                fault = str(error)
            else:
                return Finding("builds", Outcome.passed)
        return Finding("builds", Outcome.unmeasured, (f"no sandbox could be started: {fault}",))

    async def _run(
        self, *, solve: bool = False, watch: bool = False, unlike: bool = False, forget: bool = False
    ) -> tuple[Run, State | None]:
        """An empty submission, or the solution; with the state that it leaves, if that is watched."""
        submission = partial(_Submission, self.bench.verifier, self._limits, watch=watch, unlike=unlike, forget=forget)
        made, verdict, why = await self._tried(submission, solve=solve)
        said = "\n".join(made.said)
        if isinstance(why, TaskError):
            return Run(refused=why.what, said=said), None
        if verdict is None:
            return Run(fault=str(why), said=said), None
        again = None
        if made.again and not made.again_fault:
            again = steps.judged(self.task, made.again) if self.task.steps else made.again[0]
        run = Run(verdict, again, fault=made.again_fault, said=said, times=tuple(made.times), solve_s=made.solve_s)
        return run, made.state if watch else None

    async def _tried(
        self, submission: Callable[[], _Submission], *, solve: bool
    ) -> tuple[_Submission, Verdict | None, Exception | None]:
        """The last try, its verdict, or what kept it from one. Raises _EqualState."""
        made, verdict, why = submission(), None, None
        for _ in range(1 + RETRIES):
            made, verdict = submission(), None
            began = time.monotonic()
            try:
                verdict, why = await attempt(self.bench.pool, made, self.task, made.act if solve else None), None
            except TaskError as error:
                return made, None, error
            except (SandboxError, VerifierError) as error:
                why = error
            finally:
                self.sandbox_s += time.monotonic() - began
            if verdict is not None and not made.again_fault:
                break
        return made, verdict, why

    async def _mutants(self, whole: tuple[State, State] | None, limit_s: float) -> list[Tried]:
        """`whole`: the states that two whole solutions left."""
        files = {f"{one.step}:{name}": text for one in steps.parts(self.task) for name, text in oracle.texts(one).items()}
        chosen = await asyncio.to_thread(mutants.mutants, files, self.num_mutants, self.task.id)
        return [await self._mutant(one, whole, limit_s) for one in chosen]

    async def _mutant(self, mutant: mutants.Mutant, whole: tuple[State, State] | None, limit_s: float) -> Tried:
        """A verifier is blamed for what it takes twice: in the first run, what others do at that moment may be in the state (files
        of the host that a sandbox shows change under it, and one that vanishes ends the listing). A state that cannot be had
        then either leaves the mutant without a result; one that a whole solution leaves now as well, for what others did since
        the first two stays, is no other state."""
        step, _, name = mutant.file.partition(":")
        watch = whole is not None
        scripts = {step: {name: mutant.text}}
        submission = partial(_Submission, self.bench.verifier, self._limits, scripts, limit_s, watch=watch, stop_at=whole)
        what, state = mutant.what.removeprefix(":"), None
        for _ in range(LOOKS if watch else 1):
            try:
                made, verdict, _why = await self._tried(submission, solve=True)
            except _EqualState:
                return Tried(what, equal=True)
            if whole is not None and made.state is not None and endstate.same(made.state, *whole):
                return Tried(what, equal=True)
            if verdict is None or not verdict.strict:
                return Tried(what, noticed=None if verdict is None else True)
            state = made.state
        if whole is None:
            return Tried(what, noticed=False)
        if state is None:
            return Tried(what, noticed=None)
        _, now = await self._run(solve=True, watch=True)
        return Tried(what, equal=True) if now is not None and endstate.same(state, whole[0], now) else Tried(what, noticed=False)


def _with_network(task: TaskSpec) -> TaskSpec:
    return replace(task, environment=replace(task.environment, network=True))
