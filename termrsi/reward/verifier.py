"""Harbor's verifier contract: `tests/` goes to /tests, `test.sh` runs, and leaves a reward and a report in /logs/verifier.

A result that cannot be trusted is a VerifierError and never a reward of 0: no reward file, one out of [0, 1], a time-out, or
whatever reward a script left that never got to its tests. Differences from Harbor 0.26, beside those of `procedure`: `/tests` and
the log directory are emptied rather than merged; `reward.txt` is read where `reward.json` holds something other than numbers, and
where no file of the tests names `reward.json`: then what they ran of the agent's may have written it.
"""

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from termrsi.errors import TaskError, VerifierError
from termrsi.furnish import workdir_of
from termrsi.places import from_host, in_words
from termrsi.ports import Sandbox
from termrsi.records import TaskSpec, Verdict
from termrsi.reward import apart, reports
from termrsi.reward.apart import Apart, Beside, Hook
from termrsi.reward.kit import Kit
from termrsi.reward.procedure import Suite, judge

DEFAULT_TIMEOUT_S = 600.0
_SHOWN_BYTES = 1 << 20  # the end of a log, where a test runner sums up

# A verifier script that uses one of these leaves a report, or says so, when it really ran.
_REPORTING = re.compile(r"pytest|ctrf|junit|unittest")
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_ENDED = re.compile(r"short test summary info|\b\d+ (?:passed|failed)\b|Ran \d+ tests?")
_RAN = re.compile(f"test session starts|{_ENDED.pattern}")
# What an installation says that failed; "not found" only from the tests' own scripts, for the agent's programs say it too.
_BROKEN = re.compile(
    r"^\S*/tests/\S+: (?:line )?\d+: .*(?:not found|(?:python\S*|pytest|uvx?|env): No such file or directory)$|Could not resolve"
    r"|Unable to locate package|Temporary failure in name resolution|Unable to acquire the dpkg|Failed to download|E: dpkg",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """The verifier's side of a task: nothing of it reaches an agent."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None


def load_spec(path: Path | str, step: str = "") -> VerifierSpec:
    """The `[verifier]` table of a task directory; what the step of that name says for itself comes before it.

    Raises TaskError if task.toml cannot be read, VerifierError if an environment variable of the host that it needs is unset.
    """
    file = Path(path) / "task.toml"
    data = _read(file)
    table: dict[str, Any] = _table(data, "verifier", file)
    env = dict(_table(table, "env", file))
    if step:
        own = next((_table(one, "verifier", file) for one in data.get("steps", []) if one.get("name") == step), {})
        env |= _table(own, "env", file)
        table = {
            key: table[key] for key in ("user",) if key in table
        } | own  # its time is its own: Harbor's default if it says none
    try:
        timeout_s = float(table.get("timeout_sec", DEFAULT_TIMEOUT_S))
    except (TypeError, ValueError, OverflowError) as error:
        raise TaskError("verifier.timeout_sec is not a number", str(file)) from error
    user = table.get("user")
    return VerifierSpec(
        timeout_s,
        {str(key): _resolve(in_words(value), str(key), file) for key, value in env.items()},
        None if user is None else str(user),
    )


def _container(task: TaskSpec) -> tuple[Apart | None, tuple[Hook, ...]]:
    """Where its tests run, and what is collected before. Raises TaskError."""
    data = _read(Path(task.path) / "task.toml")
    return apart.of(task, data), apart.hooks(task, data)


def solution_environment(path: Path | str) -> dict[str, str]:
    """Of `[solution]` in task.toml. Raises TaskError, VerifierError as `load_spec`."""
    file = Path(path) / "task.toml"
    if not file.is_file():
        return {}
    env = _table(_table(_read(file), "solution", file), "env", file)
    return {str(key): _resolve(in_words(value), str(key), file) for key, value in env.items()}


def _read(file: Path) -> dict[str, Any]:  # Any: parsed TOML
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"cannot be read: {error}", str(file)) from error


def _table(data: dict[str, Any], key: str, file: Path) -> dict[str, Any]:  # Any: parsed TOML
    found = data.get(key, {})
    if not isinstance(found, dict):
        raise TaskError(f"{key} is not a table", str(file))
    return found


class HarborVerifier:
    """Implements `ports.Verifier` for task directories with `tests/test.sh`. `text_first`: as Harbor before 0.8, reward.txt counts
    before reward.json."""

    def __init__(
        self, *, timeout_multiplier: float = 1.0, text_first: bool = False, kit: Kit | None = None, beside: Beside | None = None
    ) -> None:
        self._multiplier = timeout_multiplier
        self._kit = kit
        self._text_first = text_first
        self._beside = beside
        self._expected: dict[str, int] = {}

    def expect(self, checks: Mapping[str, Collection[str]]) -> None:
        """How many checks a task's own solution passed, by task id: full reward with fewer is none that can be trusted."""
        self._expected |= {task: len(ids) for task, ids in checks.items()}

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        """See `procedure.judge`. Raises TaskError, too, if the task has no verifier."""
        return await judge(sandbox, task, self.suite(task), self._beside)

    def suite(self, task: TaskSpec) -> Suite:
        """Raises TaskError, VerifierError if an environment variable of the host that it needs is unset.

        Of a task of several steps whose steps are judged one by one (`task.step`): the task's own tests, and the step's on top.
        """
        if task.steps:
            raise TaskError("its steps are verified one by one", task.path)
        spec = load_spec(task.path, task.step)
        where, hooks = _container(task)
        root = Path(task.path)
        folders = [folder for folder in (root / "tests", root / "steps" / task.step / "tests") if folder.is_dir()]
        if not task.step:
            folders = folders[:1]
        scripts = [folder / "test.sh" for folder in folders if (folder / "test.sh").is_file()]
        bundled = where is not None and where.bundled
        if not scripts and not bundled:
            raise TaskError("there is no tests/test.sh", task.path)
        script = scripts[-1] if scripts else root / "tests" / "test.sh"
        return Suite(
            puts=() if bundled else tuple((folder, "/tests") for folder in folders),
            script="/tests/test.sh",
            timeout_s=spec.timeout_s * self._multiplier,
            read=lambda logs, seconds: self._held(
                read_verdict(
                    logs, script, task.id, seconds, text_first=self._text_first or not (bundled or _named("reward.json", folders))
                ),
                task,
            ),
            env=spec.env,
            user=spec.user,
            workdir=workdir_of(task.environment if where is None else where.environment),
            windows_lines=not bundled and b"\r\n" in script.read_bytes(),
            kit=self._kit.part(task.path) if self._kit else None,
            hooks=hooks,
            apart=where,
            artifacts=apart.declared(task, _read(root / "task.toml")),
            place=workdir_of(task.environment),
        )

    def _held(self, verdict: Verdict, task: TaskSpec) -> Verdict:
        """Raises VerifierError for a full reward whose report has shrunk: something ended the tests before their end."""
        task_id = task.id
        expected = 0 if task.step else self._expected.get(task_id, 0)  # the checks of all steps were counted together
        if verdict.strict and len(verdict.passed) < expected:
            raise VerifierError(f"reward 1 with {len(verdict.passed)} checks passed, its solution passed {expected}", task_id)
        return verdict


def read_verdict(logs: Path, test_script: Path, task_id: str, duration_s: float, *, text_first: bool = False) -> Verdict:
    """The verdict in a copy of the verifier's log directory. Raises VerifierError if there is no valid result."""
    reward = read_reward(logs, task_id, text_first=text_first)
    report = reports.parse(logs)
    if report.source == "none" and _never_ran(logs, test_script, failed=reward == 0.0):
        raise VerifierError(f"reward {reward:g} from a verifier that never ran its tests", task_id)
    source = "reward" if report.source == "none" else report.source
    return Verdict(reward == 1.0, reward, report.passed, report.failed, report.skipped, source, duration_s)


def read_reward(logs: Path, where: str = "", *, text_first: bool = False) -> float:
    """The official scalar: reward.json before reward.txt (Harbor 0.8 on), or the other way. Raises VerifierError unless it is in
    [0, 1]."""
    as_json, as_text = logs / "reward.json", logs / "reward.txt"
    value = _json_reward(as_json) if as_json.is_file() and not (text_first and as_text.is_file()) else None
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
    """The key "reward", else "success", else the mean of all keys, each a dimension of its own. None: other values than numbers."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, lists in lists
        return None
    if isinstance(data, int | float):
        return float(data)
    if not isinstance(data, dict) or not data or not all(isinstance(value, int | float) for value in data.values()):
        return None
    for key in ("reward", "success"):
        if key in data:
            return float(data[key])
    return sum(float(value) for value in data.values()) / len(data)


def _named(word: str, folders: list[Path]) -> bool:
    return any(word.encode() in path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())


def _never_ran(logs: Path, test_script: Path, *, failed: bool) -> bool:
    """No report where one is due, or an installation that failed; a script that only writes its reward is taken at its word."""
    text = "\n".join(
        path.read_bytes()[-_SHOWN_BYTES:].decode("utf-8", "replace")
        for path in sorted(logs.rglob("*"))
        if path.is_file() and path.suffix not in (".json", ".xml")
    )
    if (_RAN if failed else _ENDED).search(text):  # what only began may have been ended by the agent's own code
        return False
    script = test_script.read_text(encoding="utf-8", errors="replace") if test_script.is_file() else ""
    return bool(_REPORTING.search(_COMMENT.sub("", script)) or (failed and _BROKEN.search(text)))


def _resolve(value: str, key: str, file: Path) -> str:
    """Raises VerifierError if it is a variable of this machine that is unset."""
    found = from_host(value)
    if found is None:
        raise VerifierError(f"the verifier's {key} needs a variable of this machine that is unset: {value}", str(file))
    return found
