"""What a task's checks are worth: measured by an empty submission and by the task's own solution, in fresh sandboxes."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from termrsi import watched
from termrsi.errors import TaskError
from termrsi.ports import Sandbox, SandboxPool, Verifier
from termrsi.records import TaskSpec, Verdict

ORACLE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TaskChecks:
    """Ids of a task's checks, of those that an empty submission passes, and their weights."""

    id: str
    family: str
    checks: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    touches: tuple[str, ...] = ()  # what its solution replaces of what a verifier runs through (`watched`)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


async def measure(pool: SandboxPool, verifier: Verifier, task: TaskSpec, *, repeats: int = 1) -> TaskChecks:
    """Run nothing, then the solution, `repeats` times each; a check that differs between equal runs has weight 0 (ours).

    Raises TaskError if there is no solution, if the solution does not pass, or if the empty submission passes.
    """
    if not (Path(task.path) / "solution" / "solve.sh").is_file():
        raise TaskError("there is no solution/solve.sh", task.path)
    empty = [await _verdict(pool, verifier, task, oracle=False) for _ in range(repeats)]
    if any(verdict.strict for verdict in empty):
        raise TaskError("an empty submission passes", task.id)
    solved = [await _verdict(pool, verifier, task, oracle=True) for _ in range(repeats)]
    for verdict in solved:
        if not verdict.strict:
            raise TaskError(f"its own solution fails: {', '.join(verdict.failed) or verdict.reward}", task.id)
    checks = tuple(dict.fromkeys(check for verdict in solved for check in (*verdict.passed, *verdict.failed, *verdict.skipped)))
    flaky = _differing(empty) | _differing(solved)
    baseline = tuple(check for check in checks if any(check in verdict.passed for verdict in empty))
    weights = {check: 0.0 if check in flaky else 1.0 for check in checks}
    touches = tuple(sorted({path for verdict in solved for path in verdict.replaced if watched.relied_on(path)}))
    return TaskChecks(task.id, task.family, checks, baseline, weights, touches)


def _differing(verdicts: list[Verdict]) -> set[str]:
    passed = [set(verdict.passed) for verdict in verdicts]
    return set.union(*passed) - set.intersection(*passed)


async def _verdict(pool: SandboxPool, verifier: Verifier, task: TaskSpec, *, oracle: bool) -> Verdict:
    sandbox = await pool.lease(task)
    try:
        if oracle:
            await _solve(sandbox, task)
            task = replace(task, touches=watched.RELIED_ON)  # whatever it replaces is the task's own wish
        return await verifier.verify(sandbox, task)
    finally:
        await pool.release(sandbox)


async def _solve(sandbox: Sandbox, task: TaskSpec) -> None:
    await sandbox.put(Path(task.path) / "solution", "/solution")
    # In a shell of its own: `set -e` and `cd` of the script must not reach the sandbox's.
    await sandbox.run("sed -i 's/\\r$//' /solution/*.sh")
    result = await sandbox.run("bash /solution/solve.sh < /dev/null", task.agent_timeout_s or ORACLE_TIMEOUT_S)
    if result.timed_out:
        raise TaskError(f"its own solution ran out of time: {result.output[-200:]!r}", task.id)
