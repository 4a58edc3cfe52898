"""What a task's checks are worth: measured by an empty submission and by the task's own solution, in fresh sandboxes."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from termrsi import watched
from termrsi.errors import TaskError
from termrsi.ports import Sandbox, SandboxPool, Verifier
from termrsi.records import CommandResult, TaskSpec, Verdict
from termrsi.reward import steps
from termrsi.reward.verifier import solution_environment

ORACLE_TIMEOUT_S, TYPED_TIMEOUT_S = 600.0, 180.0


@dataclass(frozen=True, slots=True)
class TaskChecks:
    """Ids of a task's checks, of those that an empty submission passes, and their weights."""

    id: str
    family: str
    checks: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    touches: tuple[str, ...] = ()  # what its solution replaces of what a verifier runs through (`watched`)
    solved: tuple[str, ...] = ()  # those of `checks` that its solution passed each time

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TaskChecks":  # Any: parsed JSON
        """The inverse of `to_dict`. Raises KeyError for one of an older version."""
        lists = {name: tuple(data[name]) for name in ("checks", "baseline", "touches", "solved")}
        return cls(data["id"], data["family"], weights=data["weights"], **lists)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


async def measure(pool: SandboxPool, verifier: Verifier, task: TaskSpec, *, repeats: int = 1) -> TaskChecks:
    """Run nothing, then the solution, `repeats` times each; a check that differs between equal runs has weight 0 (ours).

    Raises TaskError if there is no solution, if the solution does not pass, or if the empty submission passes.
    """
    if solution(task) is None:
        raise TaskError("there is no solution/solve.sh", task.path)
    empty = [await attempt(pool, verifier, task, oracle=False) for _ in range(repeats)]
    if any(verdict.strict for verdict in empty):
        raise TaskError("an empty submission passes", task.id)
    solved = [await attempt(pool, verifier, task, oracle=True) for _ in range(repeats)]
    for verdict in solved:
        if not verdict.strict:
            raise TaskError(f"its own solution fails: {', '.join(verdict.failed) or verdict.reward}", task.id)
    checks = tuple(dict.fromkeys(check for verdict in solved for check in (*verdict.passed, *verdict.failed, *verdict.skipped)))
    flaky = _differing(empty) | _differing(solved)
    baseline = tuple(check for check in checks if any(check in verdict.passed for verdict in empty))
    weights = {check: 0.0 if check in flaky else 1.0 for check in checks}
    replaced = {path for verdict in solved for path in verdict.replaced}
    touches = tuple(sorted(path for path in replaced if watched.relied_on(path) or path in watched.SET_ASIDE))
    passed = tuple(check for check in checks if all(check in verdict.passed for verdict in solved))
    return TaskChecks(task.id, task.family, checks, baseline, weights, touches, passed)


def _differing(verdicts: list[Verdict]) -> set[str]:
    passed = [set(verdict.passed) for verdict in verdicts]
    return set.union(*passed) - set.intersection(*passed)


async def attempt(pool: SandboxPool, verifier: Verifier, task: TaskSpec, *, oracle: bool) -> Verdict:
    """Of one fresh sandbox, left as it is or with the task's solution run in it. Raises TaskError, SandboxError, VerifierError."""
    sandbox = await pool.lease(task)
    try:
        if not task.steps:
            return await _judged(sandbox, verifier, task, oracle=oracle)
        verdicts: list[Verdict] = []
        for one in steps.parts(task):
            if not await steps.prepare(sandbox, one, first=not verdicts):
                raise TaskError(f"setup.sh or the healthcheck of its step {one.step} fails", task.id)
            verdicts.append(await _judged(sandbox, verifier, one, oracle=oracle))
            if not steps.goes_on(task, one.step, verdicts[-1]):
                break
        return steps.judged(task, verdicts)
    finally:
        await pool.release(sandbox)


async def _judged(sandbox: Sandbox, verifier: Verifier, task: TaskSpec, *, oracle: bool) -> Verdict:
    if oracle:
        await _solve(sandbox, task)
        task = replace(task, touches=(watched.EVERYTHING,))  # whatever it replaces is the task's own wish
    return await verifier.verify(sandbox, task)


def solution(task: TaskSpec) -> Path | None:
    """Harbor's solution/solve.sh, a step's before the task's, or Terminal-Bench's solution.sh or solution.yaml.

    A task of several steps has one if each of them has.
    """
    if task.steps:
        each = [solution(one) for one in steps.parts(task)]
        return each[0] if all(each) else None
    names = ["solution/solve.sh", "solution.sh", "solution.yaml"]
    if task.step:
        names.insert(0, f"steps/{task.step}/solution/solve.sh")
    return next((path for name in names if (path := Path(task.path) / name).is_file()), None)


async def _solve(sandbox: Sandbox, task: TaskSpec) -> None:
    given = solution(task)
    if given is None:
        raise TaskError("there is no solution/solve.sh", task.path)
    if given.suffix == ".yaml":
        for command, timeout_s in _typed(given):
            _in_time(await sandbox.run(command, timeout_s), task)
        return
    folder = "/solution"
    await sandbox.run(f"rm -rf {folder}")  # of the step before
    if given.parent.name == "solution":
        await sandbox.put(given.parent, folder)
    else:
        await sandbox.put(given, f"{folder}/{given.name}")
    # In a shell of its own: `set -e` and `cd` of the script must not reach the sandbox's.
    await sandbox.run(f"sed -i 's/\\r$//' {folder}/*.sh")
    settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in solution_environment(task.path).items())
    script = f"env {settings} bash {folder}/{given.name} < /dev/null"
    _in_time(await sandbox.run(script, task.agent_timeout_s or ORACLE_TIMEOUT_S), task)


def _typed(file: Path) -> list[tuple[str, float]]:
    """Commands of a solution.yaml and their limits in seconds. Raises TaskError."""
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
        return [(str(one["command"]), float(one.get("max_timeout_sec", TYPED_TIMEOUT_S))) for one in data]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise TaskError(f"is no list of commands: {' '.join(str(error).split())}", str(file)) from error


def _in_time(result: CommandResult, task: TaskSpec) -> None:
    if result.timed_out:
        raise TaskError(f"its own solution ran out of time: {result.output[-200:]!r}", task.id)
