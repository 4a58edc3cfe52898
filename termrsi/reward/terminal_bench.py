"""Terminal-Bench 1.x's verifier contract: run-tests.sh and the contents of `tests/` go to /tests, and its output is parsed.

A task is solved if every check has passed. As in terminal-bench 0.2.18 a skipped check and an expected failure keep no task from
being solved. Other than there: a report without any check, or one of pytest without its last line, is a VerifierError (there it
counts as solved), and so is a success that lacks a check which the task's own solution passed; the whole log is read rather than a
screen of 160 columns; pytest is asked for its summary where the script does not.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from termrsi.errors import TaskError, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import TaskSpec, Verdict
from termrsi.reward import reports
from termrsi.reward.kit import Kit
from termrsi.reward.procedure import Suite, judge

DEFAULT_TIMEOUT_S = 60.0

_NO_PYTEST = re.compile(r"No module named pytest|pytest: (?:command )?not found")


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """The verifier's side of a task."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    parser: str = "pytest"


def load_spec(path: Path | str) -> VerifierSpec:
    """Raises TaskError if task.yaml cannot be read."""
    file = Path(path) / "task.yaml"
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
        given = data.get("max_test_timeout_sec") if isinstance(data, dict) else None
        timeout_s = DEFAULT_TIMEOUT_S if given is None else float(given)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, ValueError) as error:
        raise TaskError(f"cannot be read: {' '.join(str(error).split())}", str(file)) from error
    if not isinstance(data, dict):
        raise TaskError("is not a mapping", str(file))
    return VerifierSpec(timeout_s, str(data.get("parser_name") or "pytest"))


class TerminalBenchVerifier:
    """Implements `ports.Verifier` for task directories with `task.yaml` and `run-tests.sh`."""

    def __init__(self, *, timeout_multiplier: float = 1.0, kit: Kit | None = None) -> None:
        self._multiplier = timeout_multiplier
        self._kit = kit
        self._expected: dict[str, frozenset[str]] = {}

    def expect(self, checks: Mapping[str, Collection[str]]) -> None:
        """The checks that a task's own solution passed, by task id: a success without one of them is none that can be trusted."""
        self._expected |= {task: frozenset(ids) for task, ids in checks.items()}

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        """See `procedure.judge`. Raises TaskError, too, if the task has no verifier that is known here."""
        return await judge(sandbox, task, self.suite(task))

    def suite(self, task: TaskSpec) -> Suite:
        """Raises TaskError."""
        root = Path(task.path)
        script, tests = root / "run-tests.sh", root / "tests"
        if not script.is_file():
            raise TaskError("there is no run-tests.sh", task.path)
        spec = load_spec(root)
        read = PARSERS.get(spec.parser)
        if spec.parser == "pytest" and _prints_summary([script, *sorted(tests.rglob("*"))]):
            read = functools.partial(_pytest, whole=False)
        if read is None:
            raise TaskError(f"parser_name {spec.parser!r} is not known", task.path, f"valid: {', '.join(PARSERS)}")
        return Suite(
            puts=(*(((tests, "/tests"),) if tests.is_dir() else ()), (script, "/tests/run-tests.sh")),
            script="/tests/run-tests.sh",
            timeout_s=spec.timeout_s * self._multiplier,
            read=lambda logs, seconds: self._held(read(logs, task.id, seconds), task.id),
            env={"TEST_DIR": "/tests", "T_BENCH_TEST_DIR": "/tests", "PYTEST_ADDOPTS": "-rA"},
            workdir=task.environment.workdir,
            windows_lines=b"\r\n" in script.read_bytes(),
            kit=self._kit.part(task.path) if self._kit else None,
        )

    def _held(self, verdict: Verdict, task_id: str) -> Verdict:
        """Raises VerifierError for a success whose report has shrunk: something ended the tests, or told of others."""
        missing = self._expected.get(task_id, frozenset()).difference(verdict.passed)
        if verdict.strict and missing:
            raise VerifierError(f"solved without checks that its solution passed: {', '.join(sorted(missing))[:200]}", task_id)
        return verdict


def _prints_summary(files: list[Path]) -> bool:
    """Whether they print pytest's summary by themselves, as some do that test in another way."""
    return any(b"short test summary" in file.read_bytes() for file in files if file.is_file())


def _pytest(logs: Path, task_id: str, seconds: float, *, whole: bool = True) -> Verdict:
    text = _text(logs)
    report = reports.parse_text(text, whole=whole)
    if report.source == "none":
        why = "pytest is not there" if _NO_PYTEST.search(text) else f"its output has no totals of pytest: {text[-200:]!r}"
        raise VerifierError(f"the verifier never ran its tests to their end: {why}", task_id)
    solved = not report.failed
    return Verdict(solved, float(solved), report.passed, report.failed, report.skipped, report.source, seconds)


def _marked(word: str) -> Callable[[Path, str, float], Verdict]:
    """A block between two marker lines says in one line whether the task is solved."""

    def read(logs: Path, task_id: str, seconds: float) -> Verdict:
        report = reports.parse_block(_text(logs), word)
        if report.source == "none":
            raise VerifierError("the verifier never ran its tests: its output has no block of results", task_id)
        solved = not report.failed
        return Verdict(solved, float(solved), report.passed, report.failed, (), report.source, seconds)

    return read


def _swelancer(logs: Path, task_id: str, seconds: float) -> Verdict:
    """One check for all, by the last of the script's two phrases, which it ends with.

    Ours: without either, nothing was tested (there, words of a tool's log may then solve it); a success before the last does not
    count, which the agent's own program may have printed.
    """
    said = re.findall(r"swe lancer (success|failure)", _text(logs), re.IGNORECASE)
    if not said:
        raise VerifierError("the verifier never ran its tests to their end: it said neither success nor failure", task_id)
    solved = said[-1].lower() == "success"
    checks = ("swelancer_task",)
    return Verdict(solved, float(solved), checks if solved else (), () if solved else checks, (), "swelancer", seconds)


PARSERS: dict[str, Callable[[Path, str, float], Verdict]] = {
    "pytest": _pytest,
    "swebench": _marked("PASSED"),
    "sweperf": _marked("PASSED"),
    "mlebench": _marked("ALL TESTS PASSED"),
    "swelancer": _swelancer,
}


def _text(logs: Path) -> str:
    """The end of what the tests printed."""
    file = logs / reports.STDOUT
    return reports.end_of(file) if file.is_file() and not file.is_symlink() else ""
