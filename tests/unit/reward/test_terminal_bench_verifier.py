"""Terminal-Bench 1.x's contract: where files go, how each parser's output is read, and what is an error rather than a 0."""

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from termrsi.errors import TaskError, VerifierError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward.terminal_bench import TerminalBenchVerifier, load_spec
from termrsi.reward.verifiers import TaskVerifier
from tests.folder_sandbox import FolderSandbox

Make = Callable[..., TaskSpec]
SUMMARY = """=========================== short test summary info ============================
PASSED test_outputs.py::test_a
{} test_outputs.py::test_b - reason
SKIPPED [1] test_outputs.py:9: no network
============================== 2 passed in 0.1s ==============================
"""


@pytest.fixture
def box(tmp_path: Path) -> FolderSandbox:
    root = tmp_path / "machine"
    (root / "app").mkdir(parents=True)
    return FolderSandbox(root)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_task(script: str, config: str = "") -> TaskSpec:
        root = tmp_path / "task"
        (root / "tests").mkdir(parents=True)
        (root / "tests" / "test_outputs.py").write_text("def test_a(): pass\n")
        (root / "run-tests.sh").write_bytes(script.encode())
        (root / "task.yaml").write_text(f"instruction: do it\ndifficulty: easy\n{config}")
        return TaskSpec("t", "f", "do it", str(root), EnvironmentSpec(workdir="/app"))

    return make_task


def said(text: str) -> str:
    """A script that prints what pytest would, and does not look like one that only does."""
    return "base64 -d <<'END'\n" + base64.b64encode(f"{text}\n".encode()).decode() + "\nEND\n"


@pytest.mark.parametrize(
    ("word", "solved"), [("PASSED", True), ("XFAIL", True), ("FAILED", False), ("ERROR", False), ("XPASS", False)]
)
async def test_pytest(box: FolderSandbox, make: Make, word: str, solved: bool) -> None:
    verdict = await TerminalBenchVerifier().verify(box, make(said(SUMMARY.format(word))))
    assert (verdict.strict, verdict.reward) == (solved, float(solved))
    assert len(verdict.passed) + len(verdict.failed) == 2
    assert len(verdict.skipped) == 1  # keeps no task from being solved


@pytest.mark.parametrize(
    "cut",
    [
        "test_outputs.py::test_a PASSED [ 50%]\n",
        "= short test summary info =\nPASSED test_outputs.py::test_a\nPASSED test_outputs.py::test_b\n",
    ],
)
async def test_what_broke_off_is_no_result(box: FolderSandbox, make: Make, cut: str) -> None:
    """As when a program of the agent's, imported by a test, ends pytest."""
    with pytest.raises(VerifierError, match="totals"):
        await TerminalBenchVerifier().verify(box, make(said(cut)))


async def test_a_script_that_prints_as_pytest_does_need_not_end_as_it(box: FolderSandbox, make: Make) -> None:
    header = "echo '=== short test summary info ==='\n"
    verdict = await TerminalBenchVerifier().verify(box, make(f"{header}echo PASSED test_a\necho FAILED test_b\n"))
    assert (verdict.strict, verdict.passed, verdict.failed) == (False, ("test_a",), ("test_b",))


async def test_a_report_that_shrinks_is_no_success(box: FolderSandbox, make: Make) -> None:
    verifier, task = TaskVerifier(), make(said(SUMMARY.format("PASSED")))
    verifier.expect({"t": ("test_outputs.py::test_a", "test_outputs.py::test_c"), "other": ("test_d",)})
    with pytest.raises(VerifierError, match=r"without checks that its solution passed: test_outputs\.py::test_c"):
        await verifier.verify(box, task)
    verifier.expect({"t": ("test_outputs.py::test_a",)})
    assert (await verifier.verify(box, task)).strict


async def test_a_failure_stays_one_whatever_is_missing(box: FolderSandbox, make: Make) -> None:
    verifier = TaskVerifier()
    verifier.expect({"t": ("test_outputs.py::test_c",)})
    verdict = await verifier.verify(box, make(said(SUMMARY.format("FAILED"))))
    assert (verdict.strict, verdict.failed) == (False, ("test_outputs.py::test_b",))


async def test_totals_alone_may_not_shrink_either_nor_stand_for_names(box: FolderSandbox, make: Make) -> None:
    verifier, task = TaskVerifier(), make(said("2 passed, 1 warning, 3 subtests passed in 0.05s"))
    verifier.expect({"t": ("check-1", "check-2")})
    assert (await verifier.verify(box, task)).strict
    for more in (("check-1", "check-2", "check-3", "check-4", "check-5", "check-6"), ("test_outputs.py::test_a",)):
        verifier.expect({"t": more})
        with pytest.raises(VerifierError, match="without checks"):
            await verifier.verify(box, task)


async def test_a_failure_that_only_the_totals_tell(box: FolderSandbox, make: Make) -> None:
    text = "test_outputs.py::test_a PASSED [100%]\n==== 1 passed, 1 error in 65.20s (0:01:05) ====\n"
    verdict = await TerminalBenchVerifier().verify(box, make(said(text)))
    assert (verdict.strict, verdict.failed) == (False, ("unnamed",))


async def test_a_planted_report_is_not_read(box: FolderSandbox, make: Make) -> None:
    """What a program of the agent's writes while the tests run: the format has no such file."""
    planted = '{"results": {"tests": [{"name": "a", "status": "passed"}]}}'
    script = f"echo '{planted}' > /logs/verifier/ctrf.json\n" + said(SUMMARY.format("FAILED"))
    assert not (await TerminalBenchVerifier().verify(box, make(script))).strict


async def test_files_lie_flat_in_tests_and_the_script_is_told_where(box: FolderSandbox, make: Make) -> None:
    script = "#!/bin/bash\nls /tests; echo $TEST_DIR $PYTEST_ADDOPTS; pwd\n" + said(SUMMARY.format("PASSED"))
    await TerminalBenchVerifier().verify(box, make(script))
    lines = (box.root / "logs/verifier/test-stdout.txt").read_text().splitlines()
    assert lines[:4] == ["run-tests.sh", "test_outputs.py", f"{box.root}/tests -rA", f"{box.root}/app"]


async def test_windows_line_ends(box: FolderSandbox, make: Make) -> None:
    script = f"#!/bin/bash\n{said(SUMMARY.format('PASSED'))}".replace("\n", "\r\n")
    assert (await TerminalBenchVerifier().verify(box, make(script))).strict


@pytest.mark.parametrize(
    ("parser", "block", "solved"),
    [
        ("swebench", "SWEBench results starts here\nPASSED\nSWEBench results ends here", True),
        ("swebench", "SWEBench results starts here\nFAILED\nSWEBench results ends here", False),
        ("sweperf", "SWEPerf results starts here\nPASSED\nSWEPerf results ends here", True),
        ("mlebench", "MLEBench results starts here\nALL TESTS PASSED\nMLEBench results ends here", True),
        ("mlebench", "MLEBench results starts here\nPASSED\nMLEBench results ends here", False),
    ],
)
async def test_blocks(box: FolderSandbox, make: Make, parser: str, block: str, solved: bool) -> None:
    verdict = await TerminalBenchVerifier().verify(box, make(said(block), f"parser_name: {parser}\n"))
    assert verdict.strict is solved
    assert (verdict.passed, verdict.failed) == ((("tests",), ()) if solved else ((), ("tests",)))


@pytest.mark.parametrize(
    ("words", "solved"),
    [
        ("SWE LANCER SUCCESS", True),
        ("SWE LANCER FAILURE. Expected: 2, Actual: 1", False),
        ("the agent's program: SWE LANCER SUCCESS\nTest results: [0.0]\nSWE LANCER FAILURE", False),
        ("user_tool completed\nTest results: [1.0]\nswe lancer success", True),
    ],
)
async def test_swelancer(box: FolderSandbox, make: Make, words: str, solved: bool) -> None:
    verdict = await TerminalBenchVerifier().verify(box, make(said(words), "parser_name: swelancer\n"))
    assert (verdict.strict, verdict.source, len(verdict.passed)) == (solved, "swelancer", int(solved))


@pytest.mark.parametrize(
    ("script", "config", "message"),
    [
        ("echo user_tool completed\n", "parser_name: swelancer\n", "neither success nor failure"),
        ("echo no tests ran\n", "", "its output has no totals of pytest"),
        ("echo 'bash: pytest: command not found'\n", "", "pytest is not there"),
        ("echo SWEBench\n", "parser_name: swebench\n", "no block of results"),
        ("sleep 60\n", "max_test_timeout_sec: 0.3\n", "no end within 0.3 s"),
    ],
)
async def test_what_did_not_run_is_an_error(box: FolderSandbox, make: Make, script: str, config: str, message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        await TerminalBenchVerifier().verify(box, make(script, config))


async def test_what_is_not_there_is_named(box: FolderSandbox, make: Make) -> None:
    task = make("", "parser_name: other\n")
    with pytest.raises(TaskError, match=r"parser_name 'other' is not known.*valid: pytest, swebench"):
        await TerminalBenchVerifier().verify(box, task)
    (Path(task.path) / "run-tests.sh").unlink()
    with pytest.raises(TaskError, match=r"no run-tests\.sh"):
        await TerminalBenchVerifier().verify(box, task)


def test_spec(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("instruction: x\n")
    assert (load_spec(tmp_path).timeout_s, load_spec(tmp_path).parser) == (60.0, "pytest")
    for text, message in (
        ("- a\n", "not a mapping"),
        ("a: [", "cannot be read"),
        ("max_test_timeout_sec: soon\n", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(TaskError, match=message):
            load_spec(tmp_path)


async def test_each_format_gets_its_own_verifier(box: FolderSandbox, make: Make) -> None:
    task = make(said(SUMMARY.format("PASSED")))
    assert (await TaskVerifier().verify(box, task)).source == "pytest-summary"
    (Path(task.path) / "task.toml").write_text("")
    (Path(task.path) / "tests" / "test.sh").write_text("echo 0.5 > /logs/verifier/reward.txt\n")
    assert (await TaskVerifier().verify(box, task)).reward == 0.5
