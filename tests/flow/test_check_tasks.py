"""`termrsi tasks check` on real sandboxes: a fit task, one whose solution fails, one that passes untouched, the older format."""

from pathlib import Path

import pytest

from termrsi import task_commands

TEST = "#!/bin/bash\nif [ -e /app/done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
SUMMARY = """cat <<END
=== short test summary info ===
$([ -e /app/done ] && echo PASSED || echo FAILED) test_x.py::test_a
=== 1 done in 0.01s ===
END
"""


def task(root: Path, test: str = TEST, solution: str = "touch /app/done\n") -> None:
    files = {"instruction.md": "Do it.", "environment/Dockerfile": "FROM a\nWORKDIR /app\n", "task.toml": 'version = "1.0"\n'}
    for name, text in (files | {"tests/test.sh": test, "solution/solve.sh": solution}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def older(root: Path, solution: str, text: str) -> None:
    root.mkdir()
    (root / "task.yaml").write_text("instruction: Do it.\ndifficulty: easy\n")
    (root / "docker-compose.yaml").write_text("services:\n  client:\n    build: .\n")
    (root / "Dockerfile").write_text("FROM a\nWORKDIR /app\n")
    (root / "run-tests.sh").write_text(SUMMARY)
    (root / solution).write_text(text)


def test_each_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task(tmp_path / "fit")
    task(tmp_path / "no-solution-that-works", solution="true\n")
    task(tmp_path / "passes-untouched", test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    task(tmp_path / "never-ran", test="#!/bin/bash\nno_such_program\necho 0 > /logs/verifier/reward.txt\n")
    older(tmp_path / "older", "solution.sh", "touch /app/done\n")
    older(tmp_path / "typed", "solution.yaml", "- command: cd /app\n- command: touch done\n  max_timeout_sec: 5\n")
    assert task_commands.run(["check", str(tmp_path), "attempts=2", "jobs=2"]) == 1
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:6]] for line in out.splitlines() if "│" in line}
    assert rows["fit"] == ["2/2", "0/2", "0", ""]
    assert rows["no-solution-that-works"] == ["0/2", "0/2", "0", "unfit"]
    assert rows["passes-untouched"] == ["2/2", "2/2", "0", "unfit"]
    assert rows["never-ran"] == ["0/0", "0/0", "0", "unfit"]
    assert rows["older"] == ["2/2", "0/2", "1", ""]
    assert rows["typed"] == ["2/2", "0/2", "1", ""]
    assert "unfit never-ran: an empty submission could not be judged: " in out
    assert "3 of 6 pass with their solution and fail without" in out


def test_a_solution_is_run_though_an_empty_submission_has_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task(tmp_path / "lost", test="#!/bin/bash\nset -e\ntest -e /app/done\necho 1 > /logs/verifier/reward.txt\n")
    assert task_commands.run(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert [
        cell.strip() for cell in next(line for line in out.splitlines() if "lost" in line and "/1" in line).split("│")[2:4]
    ] == ["1/1", "0/0"]
    assert "unfit lost: an empty submission could not be judged: lost: no reward file" in out


def test_all_fit_is_zero(tmp_path: Path) -> None:
    task(tmp_path / "fit")
    assert task_commands.run(["check", str(tmp_path)]) == 0
