"""The smoke test of one written task, on fresh machines: it builds and starts, its initial-state test passes, its final-state test
fails; and passes after its solution, if it has one. Nothing says that a task without one can be solved: Tmax leaves that to
training.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.ports import SandboxPool, Verifier
from termrsi.records import CommandResult, TaskSpec
from termrsi.reward.checks import attempt, by_solution
from termrsi.reward.oracle import solution
from termrsi.tasks import harbor
from termrsi.tasks.synthesis.write import INITIAL

INITIAL_TIMEOUT_S = 60.0
SHOWN_CHARS = 300  # of why a task was refused

_T = TypeVar("_T")


async def smoke(pool: SandboxPool, verifier: Verifier, folder: Path, *, retries: int) -> tuple[str, str]:
    """Category and detail of why the task is refused, both "" if it holds. Raises SandboxError if each try lost its machine."""
    loaded = harbor.load(folder)
    if not loaded.tasks:
        return "unusable", _short(loaded.skipped[0].reason)
    task = loaded.tasks[0]
    try:
        first = await _again(lambda: _initial(pool, task), retries)
    except TaskError as error:
        return "does_not_build", _short(error.what)
    except SandboxSpoiled as error:
        return "initial_test_fails", _short(error.what)
    if first.exit_code != 0:
        return "initial_test_fails", _short(first.output)
    try:
        untouched = await _again(lambda: attempt(pool, verifier, task), retries)
    except VerifierError as error:
        return "no_verdict", _short(error.what)
    if untouched.strict:
        return "passes_untouched", ""
    if solution(task) is None:
        return "", ""
    try:
        solved = await _again(lambda: attempt(pool, verifier, task, by_solution), retries)
    except VerifierError as error:
        return "no_verdict", _short(error.what)
    except (TaskError, SandboxSpoiled) as error:
        return "solution_fails", _short(error.what)
    return ("", "") if solved.strict else ("solution_fails", _short(", ".join(solved.failed)))


async def _initial(pool: SandboxPool, task: TaskSpec) -> CommandResult:
    sandbox = await pool.lease(task)
    try:
        await sandbox.put(Path(task.path) / INITIAL, f"/{INITIAL}")
        return await sandbox.run(f"bash /{INITIAL} < /dev/null", INITIAL_TIMEOUT_S)
    finally:
        await pool.release(sandbox)


async def _again(call: Callable[[], Awaitable[_T]], retries: int) -> _T:
    """What the machine lost is tried again on fresh ones; what ran in it and spoiled it is the task's."""
    for _ in range(retries):
        try:
            return await call()
        except SandboxSpoiled:
            raise
        except (SandboxError, VerifierError):
            continue
    return await call()


def _short(text: str) -> str:
    return " ".join(text.split())[-SHOWN_CHARS:]
