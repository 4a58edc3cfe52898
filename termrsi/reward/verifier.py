"""Harbor's verifier contract: kill what the agent left running, put fresh tests, run them, read reward and report.

A result that cannot be trusted is a VerifierError and never a reward of 0: no reward file, one out of [0, 1], a time-out, or
a 0 from a script that never got to its tests. Differences from Harbor 0.26: the agent's processes are dead before the tests
start, an agent that replaced a program which every test script runs through (`watched`) scores 0 without a test, `/tests` and the
log directory are emptied rather than merged, and `reward.txt` is read where `reward.json` holds something other than numbers.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from termrsi import watched
from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import TaskSpec, Verdict
from termrsi.reward import reports

LOGS = "/logs/verifier"
DEFAULT_TIMEOUT_S = 600.0
GRACE_S = 15.0  # over the verifier's own time-out, for the sandbox to notice
FINISHED = "verifier-finished"
ROOM, ROOM_BYTES = "/.room", 4 << 20  # what tests and their report may need

_TEMPLATE = re.compile(r"^\$\{(\w+)(?::-(.*))?\}$", re.DOTALL)
# A verifier script that uses one of these leaves a report when it really ran.
_REPORTING = re.compile(r"pytest|ctrf|junit|\buvx?\b|unittest")
_RAN = re.compile(r"test session starts|short test summary info|\b\d+ (?:passed|failed)\b|Ran \d+ tests?")
_BROKEN = re.compile(
    r"command not found|No such file or directory.*(?:python|pytest|uv)|Could not resolve|Unable to locate package"
    r"|Temporary failure in name resolution|No space left on device|Unable to acquire the dpkg|Failed to download|E: dpkg"
)

# `/logs` or `/tests` may be a link to anywhere, or a file. A mounted directory cannot be removed: emptying it is enough.
_CLEAN = (
    f"rm -rf {ROOM}; "
    "for d in /logs /tests; do if [ -L $d ] || { [ -e $d ] && [ ! -d $d ]; }; then rm -f $d; fi; done; "
    f"rm -rf /tests {LOGS} 2> /dev/null; mkdir -p /tests {LOGS} && chmod 777 {LOGS} && "
    f'[ ! -L {LOGS} ] && [ -z "$(ls -A /tests)" ] && [ -z "$(ls -A {LOGS})" ]'
)


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """The verifier's side of a task: nothing of it reaches an agent."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None


def load_spec(path: Path | str) -> VerifierSpec:
    """The `[verifier]` table of a task directory.

    Raises TaskError if task.toml cannot be read, VerifierError if an environment variable of the host that it needs is unset.
    """
    file = Path(path) / "task.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"cannot be read: {error}", str(file)) from error
    table = data.get("verifier", {})
    if not isinstance(table, dict):
        raise TaskError("verifier is not a table", str(file))
    try:
        timeout_s = float(table.get("timeout_sec", DEFAULT_TIMEOUT_S))
    except (TypeError, ValueError) as error:
        raise TaskError("verifier.timeout_sec is not a number", str(file)) from error
    env = {str(key): _resolve(str(value), str(key), file) for key, value in dict(table.get("env", {})).items()}
    user = table.get("user")
    return VerifierSpec(timeout_s, env, None if user is None else str(user))


class HarborVerifier:
    """Implements `ports.Verifier` for task directories with `tests/test.sh`."""

    def __init__(self, *, timeout_multiplier: float = 1.0) -> None:
        self._multiplier = timeout_multiplier

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        """Score the sandbox's present state. It is no restart point afterwards: snapshot first.

        A sandbox that the agent left unusable scores 0, with the source "spoiled". Raises VerifierError if no valid result can be
        had, TaskError if the task has no verifier, SandboxError from below.
        """
        started = time.monotonic()
        try:
            return await self._verify(sandbox, task, started)
        except SandboxSpoiled:
            return Verdict(False, 0.0, source="spoiled", duration_s=time.monotonic() - started)

    async def _verify(self, sandbox: Sandbox, task: TaskSpec, started: float) -> Verdict:
        spec = load_spec(task.path)
        tests = Path(task.path) / "tests"
        if not (tests / "test.sh").is_file():
            raise TaskError("there is no tests/test.sh", task.path)
        lost: SandboxError | None = None
        try:
            await sandbox.kill_processes()
        except SandboxError as error:  # also by an agent whose `bash` is none
            lost = error
        try:
            replaced = tuple(await sandbox.replaced())
        except SandboxError as error:
            raise (lost or error) from error
        if any(watched.relied_on(path) and path not in task.touches for path in replaced):
            # Whatever the tests said now, a program of the agent would have said it.
            return Verdict(False, 0.0, source="replaced", duration_s=time.monotonic() - started, replaced=replaced)
        if lost is not None:
            raise lost
        await self._look_for_room(sandbox)
        cleaned = await sandbox.run(_CLEAN, GRACE_S)
        if cleaned.exit_code != 0:
            raise VerifierError("the log and test directories could not be emptied", task.id)
        await sandbox.put(tests, "/tests")
        await self._run(sandbox, task, spec, unix_lines=b"\r\n" not in (tests / "test.sh").read_bytes())
        await sandbox.kill_processes()  # what the tests ran of the agent's may still write
        with tempfile.TemporaryDirectory(prefix=f"termrsi-verify-{os.getpid()}-") as folder:
            await sandbox.get(LOGS, folder)
            verdict = read_verdict(Path(folder), tests, task.id, time.monotonic() - started)
        return dataclasses.replace(verdict, replaced=replaced)

    async def _look_for_room(self, sandbox: Sandbox) -> None:
        """Raises SandboxSpoiled if the agent filled its disk, SandboxError if a machine's is full: the backend knows which."""
        with tempfile.NamedTemporaryFile(prefix=f"termrsi-room-{os.getpid()}-") as room:
            room.write(os.urandom(ROOM_BYTES))  # not zeros, which take no room
            room.flush()
            await sandbox.put(room.name, ROOM)

    async def _run(self, sandbox: Sandbox, task: TaskSpec, spec: VerifierSpec, *, unix_lines: bool) -> None:
        limit_s = spec.timeout_s * self._multiplier
        fix = "" if unix_lines else "sed -i 's/\\r$//' /tests/test.sh; "
        # The script is executed, not sourced, so that its own shebang counts; its exit code does not.
        inner = f"/tests/test.sh > {LOGS}/{reports.STDOUT} 2>&1; echo {FINISHED}"
        if spec.user not in (None, "root", "0"):
            inner = f"su -s /bin/bash {shlex.quote(str(spec.user))} -c {shlex.quote(inner)}"
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in spec.env.items())
        place = _workdir(task)
        command = (
            f"{fix}chmod +x /tests/test.sh; {f'cd {shlex.quote(place)} 2> /dev/null; ' if place else ''}"
            f"env -u BASH_ENV -u ENV -u LD_PRELOAD {settings} timeout -k 5 {limit_s:g} bash -c {shlex.quote(inner)}"
        )
        result = await sandbox.run(command, limit_s + GRACE_S)
        if FINISHED not in result.output:
            what = f"no end within {limit_s:g} s" if result.timed_out or result.exit_code in (124, 137) else "it broke off"
            raise VerifierError(f"{what}: {result.output[-200:]!r}", task.id)


def read_verdict(logs: Path, tests: Path, task_id: str, duration_s: float) -> Verdict:
    """The verdict in a copy of the verifier's log directory. Raises VerifierError if there is no valid result."""
    for path in sorted(logs.rglob("*")):
        if path.is_symlink():  # it would be followed on this machine, not inside the sandbox
            path.unlink()
    reward = read_reward(logs, task_id)
    report = reports.parse(logs)
    if reward == 0.0 and report.source == "none" and _never_ran(logs, tests):
        raise VerifierError("reward 0 from a verifier that never ran its tests", task_id)
    source = "reward" if report.source == "none" else report.source
    return Verdict(reward == 1.0, reward, report.passed, report.failed, report.skipped, source, duration_s)


def read_reward(logs: Path, where: str = "") -> float:
    """The official scalar: reward.json before reward.txt (Harbor 0.8 on). Raises VerifierError unless it is in [0, 1]."""
    as_json, as_text = logs / "reward.json", logs / "reward.txt"
    value = _json_reward(as_json) if as_json.is_file() else None
    if value is None:
        if not as_text.is_file():
            what = "reward.json has no number to read" if as_json.is_file() else "no reward file"
            raise VerifierError(what, where)
        text = as_text.read_text(encoding="utf-8", errors="replace").strip()
        try:
            value = float(text)
        except ValueError as error:
            raise VerifierError(f"reward.txt holds {text[:40]!r}", where, "valid: one number") from error
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        raise VerifierError(f"reward {value!r}", where, "valid: a finite number in [0, 1]")
    return value


def _json_reward(path: Path) -> float | None:
    """The key "reward", else "success", else the only key. None: other values than numbers, or no such key."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except json.JSONDecodeError:
        return None
    if isinstance(data, int | float):
        return float(data)
    if not isinstance(data, dict) or not data or not all(isinstance(value, int | float) for value in data.values()):
        return None
    for key in ("reward", "success"):
        if key in data:
            return float(data[key])
    return float(next(iter(data.values()))) if len(data) == 1 else None


def _never_ran(logs: Path, tests: Path) -> bool:
    """No report where one is due, or an installation that failed; a script that only writes its reward is taken at its word."""
    out = logs / reports.STDOUT
    text = out.read_text(encoding="utf-8", errors="replace") if out.is_file() else ""
    if _RAN.search(text):
        return False
    script = (tests / "test.sh").read_text(encoding="utf-8", errors="replace") if (tests / "test.sh").is_file() else ""
    return bool(_REPORTING.search(script) or _BROKEN.search(text))


def _workdir(task: TaskSpec) -> str | None:
    """The task's own directory, else the WORKDIR that its Dockerfile ends with, else None: where the shell starts."""
    if task.environment.workdir:
        return task.environment.workdir
    dockerfile = Path(task.environment.context or Path(task.path) / "environment") / "Dockerfile"
    if not dockerfile.is_file():
        return None
    place: str | None = None
    for line in dockerfile.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            place = None
        elif word.upper() == "WORKDIR" and "$" not in rest:
            place = os.path.normpath(os.path.join(place or "/", rest.strip().strip("\"'")))  # noqa: PTH118 - a path inside
    return place


def _resolve(value: str, key: str, file: Path) -> str:
    """`${VAR}` and `${VAR:-default}` come from the host when they are the whole value."""
    match = _TEMPLATE.match(value)
    if match is None:
        return value
    found = os.environ.get(match[1], match[2])
    if found is None:
        raise VerifierError(f"verifier.env.{key} needs the variable {match[1]}, which is unset", str(file))
    return found
