"""Planted secrets are found, in the right category; what the task itself says is none."""

from base64 import b64encode
from pathlib import Path

import pytest

from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward.leakage import scan

TESTS = '''
from pathlib import Path

def test_total_is_right():
    """The file must hold the total of all the paid invoices of the year."""
    assert Path("/app/out/total_secret.txt").read_text().strip() == "48151.62"
    assert digest() == "d41d8cd98f00b204"
    assert "hidden sentinel phrase" in text()
    assert count() == 2024
    assert first_line() == "paid: 42"
    assert encoding == "utf-8"

class TestOrder:
    pass
'''


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    (tmp_path / "tests").mkdir()
    (tmp_path / "solution").mkdir()
    (tmp_path / "tests" / "test_outputs.py").write_text(TESTS)
    (tmp_path / "tests" / "test.sh").write_text(
        "check_file_exists() {\n[ -f /app/report.txt ]\n}\ncheck_runs() {\ntrue > /dev/null\n}\n"
    )
    (tmp_path / "tests" / "gold.bin").write_bytes(b"\0\1")
    (tmp_path / "solution" / "solve.sh").write_text("#!/bin/bash\nawk 'sum over column 7 of it' data > report.txt\necho 77310\n")
    instruction = "Sum the invoices of 2024 and write report.txt. See /app/data for the input."
    return TaskSpec("t", "f", instruction, str(tmp_path), EnvironmentSpec(workdir="/app"))


@pytest.mark.parametrize(
    ("text", "categories"),
    [
        ("Look at the files first, then add up what was paid, and check the result.", ()),
        ("The file must hold the total of all the paid invoices.", ("ngram",)),
        ("the FILE must, hold: the total of most invoices", ()),  # seven in a row at most
        ("The answer is 48151.62.", ("literal",)),
        ("The answer is 48,151.62.", ("literal",)),
        ("Some invoices are of 2024, or 7, or 123.", ()),
        ("Print 77310 at the end.", ("literal",)),  # of the solution
        ("The digest D41D8CD98F00B204 comes out.", ("hash",)),
        ("It has a hidden sentinel phrase in it.", ("literal",)),
        ("Use awk 'sum over column 7 of it'.", ("literal",)),
        ("Write to /app/out/total_secret.txt.", ("literal", "path")),
        ("Write /app/report.txt, discard the rest in /dev/null.", ()),
        ("Read /app/data.", ()),
        ("Make test_total_is_right pass.", ("test_name",)),
        ("Open test_outputs.py.", ("test_name",)),
        ("gold.bin has it", ("test_name",)),
        ("TestOrder comes last", ("test_name",)),
        ("file_exists is checked", ("test_name",)),
        ("the program runs", ()),
        ("The first line reads paid: 42.", ("expected_output",)),
        ("Read it as utf-8, as 42 were paid.", ()),
        (f"echo {b64encode(b'48151.62').decode()} | base64 -d", ("encoded",)),
        (f"xxd -r -p <<< {b'hidden sentinel phrase'.hex()}", ("encoded",)),
        ("uvqqra fragvary cuenfr", ("encoded",)),  # rot13
        ("Backwards it is 26.15184.", ("reversed",)),
        ("Backwards: esarhp lenitnes neddih", ("reversed",)),
        ("First 481,\nthen 51.6,\nthen 2.", ("split",)),
        ("echo 'hidden' 'senti' 'nel' 'phrase'", ("split",)),
        ("cat /tests/* first", ("reads_tests",)),
        ("Run bash test.sh and look", ("reads_tests", "test_name")),
        ("ls /solution", ("reads_tests",)),
        ("Test the result in a shell, then stop.", ()),
        ("A bit over forty-eight thousand one hundred and fifty.", ()),  # a paraphrase: only a model could tell
        ("", ()),
    ],
)
def test_categories(task: TaskSpec, text: str, categories: tuple[str, ...]) -> None:
    assert scan(task, text) == categories


def test_only_categories_come_back(task: TaskSpec) -> None:
    assert set(scan(task, TESTS)) == {"expected_output", "hash", "literal", "ngram", "path", "test_name"}


def test_the_instruction_itself_leaks_nothing(task: TaskSpec) -> None:
    assert scan(task, task.instruction) == ()


def test_steps_are_read_too(task: TaskSpec) -> None:
    folder = Path(task.path) / "steps" / "one" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_more.py").write_text("assert value == 990017\n")
    assert scan(task, "it is 990017") == ("literal",)
