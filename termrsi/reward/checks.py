"""What a task's checks are worth: measured by an empty submission and by the task's own solution, in fresh sandboxes."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from termrsi import watched
from termrsi.errors import TaskError
from termrsi.ports import Sandbox, SandboxPool, Verifier
from termrsi.records import TaskSpec, Verdict
from termrsi.reward import oracle, steps

Act = Callable[[Sandbox, TaskSpec], Awaitable[None]]


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
    if oracle.solution(task) is None:
        raise TaskError("there is no solution/solve.sh", task.path)
    empty = [await attempt(pool, verifier, task) for _ in range(repeats)]
    if any(verdict.strict for verdict in empty):
        raise TaskError("an empty submission passes", task.id)
    solved = [await attempt(pool, verifier, task, by_solution) for _ in range(repeats)]
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


async def by_solution(sandbox: Sandbox, task: TaskSpec) -> None:
    """The task's own solution in the place of an agent. Raises TaskError if there is none, or if it runs out of time."""
    oracle.in_time(await oracle.solve(sandbox, task), task)


async def attempt(pool: SandboxPool, verifier: Verifier, task: TaskSpec, act: Act | None = None) -> Verdict:
    """Of one fresh sandbox, left as it is or with `act` in the place of an agent, step by step. Raises TaskError, SandboxError,
    VerifierError."""
    sandbox = await pool.lease(task)
    try:
        if not task.steps:
            return await _judged(sandbox, verifier, task, act)
        verdicts: list[Verdict] = []
        for one in steps.parts(task):
            if not await steps.prepare(sandbox, one, first=not verdicts):
                raise TaskError(f"setup.sh or the healthcheck of its step {one.step} fails", task.id)
            verdicts.append(await _judged(sandbox, verifier, one, act))
            if not steps.goes_on(task, one.step, verdicts[-1]):
                break
        return steps.judged(task, verdicts)
    finally:
        await pool.release(sandbox)


async def _judged(sandbox: Sandbox, verifier: Verifier, task: TaskSpec, act: Act | None) -> Verdict:
    if act is not None:
        await act(sandbox, task)
        task = replace(task, touches=(watched.EVERYTHING,))  # whatever it replaces is the task's own wish
    return await verifier.verify(sandbox, task)


def content_key(path: Path | str, *salt: str) -> str:
    """Of every file of a task directory, and of the words before it: what was found of the one does not count for another."""
    whole = hashlib.sha256("".join(f"{word}\0" for word in salt).encode())
    root = Path(path)
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()[:32]
