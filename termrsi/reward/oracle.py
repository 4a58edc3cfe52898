"""A task's own solution: where it lies, what its text is, and running it in a sandbox where an agent would have worked."""

import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from termrsi.errors import TaskError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, TaskSpec
from termrsi.reward import steps
from termrsi.reward.secret_files import SCRIPTS
from termrsi.reward.verifier import solution_environment

PLACE = "/solution"  # in the sandbox
ORACLE_TIMEOUT_S, TYPED_TIMEOUT_S = 600.0, 180.0


def solution(task: TaskSpec) -> Path | None:
    """Harbor's solution/solve.sh, a step's before the task's, or Terminal-Bench's solution.sh or solution.yaml.

    A task of several steps has one if each of them has.
    """
    if task.steps:
        each = [solution(one) for one in steps.parts(task)]
        return each[0] if all(each) else None
    names = [f"steps/{task.step}/{SCRIPTS[0]}"] * bool(task.step) + list(SCRIPTS)
    return next((path for name in names if (path := Path(task.path) / name).is_file()), None)


def texts(task: TaskSpec) -> dict[str, str]:
    """The text files of its solution, by their paths in the solution's own directory; the script comes first. Lines end as here.

    Raises TaskError if there is none.
    """
    given = _given(task)
    found = [given]
    if given.parent.name == "solution":
        found += [path for path in sorted(given.parent.rglob("*")) if path.is_file() and not path.is_symlink() and path != given]
    contents = {path.relative_to(given.parent).as_posix(): path.read_bytes() for path in found}
    plain = {name: data.decode("utf-8-sig") for name, data in contents.items() if b"\0" not in data and _is_utf8(data)}
    return {name: text.replace("\r\n", "\n") for name, text in plain.items()}


async def solve(
    sandbox: Sandbox, task: TaskSpec, changed: Mapping[str, str] | None = None, *, limit_s: float | None = None
) -> CommandResult:
    """Runs it; `changed`: other texts for some of its files. Of typed commands the result is of all, and the first to run out of
    time is the last. `limit_s`: instead of the agent's time. Raises TaskError if there is none."""
    given = _given(task)
    if given.suffix == ".yaml":
        return await _type(sandbox, _typed(given, (changed or {}).get(given.name)), limit_s)
    await sandbox.run(f"rm -rf {PLACE}")  # of the step before
    if given.parent.name == "solution":
        await sandbox.put(given.parent, PLACE)
    else:
        await sandbox.put(given, f"{PLACE}/{given.name}")
    for name, text in (changed or {}).items():
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            shutil.copymode(given.parent / name, file.name)
            await sandbox.put(file.name, f"{PLACE}/{name}")
    # In a shell of its own: `set -e` and `cd` of the script must not reach the sandbox's.
    await sandbox.run(f"sed -i 's/\\r$//' {PLACE}/*.sh")
    settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in solution_environment(task.path).items())
    script = f"env {settings} bash {PLACE}/{given.name} < /dev/null"
    return await sandbox.run(script, limit_s or task.agent_timeout_s or ORACLE_TIMEOUT_S)


def in_time(result: CommandResult, task: TaskSpec) -> None:
    """Raises TaskError if the solution was not."""
    if result.timed_out:
        raise TaskError(f"its own solution ran out of time: {result.output[-200:]!r}", task.id)


def _given(task: TaskSpec) -> Path:
    given = solution(task)
    if given is None:
        raise TaskError("there is no solution/solve.sh", task.path)
    return given


async def _type(sandbox: Sandbox, commands: list[tuple[str, float]], limit_s: float | None) -> CommandResult:
    output, seconds, code = "", 0.0, 0
    for command, timeout_s in commands:
        result = await sandbox.run(command, min(timeout_s, limit_s or timeout_s))
        output, seconds, code = output + result.output, seconds + result.duration_s, result.exit_code
        if result.timed_out:
            return CommandResult(code, output, timed_out=True, duration_s=seconds)
    return CommandResult(code, output, duration_s=seconds)


def _typed(file: Path, text: str | None = None) -> list[tuple[str, float]]:
    """Commands of a solution.yaml and their limits in seconds. Raises TaskError."""
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8-sig") if text is None else text)
        return [(str(one["command"]), float(one.get("max_timeout_sec", TYPED_TIMEOUT_S))) for one in data]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise TaskError(f"is no list of commands: {' '.join(str(error).split())}", str(file)) from error


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
