"""Planted secrets are found, in the right category; what the task itself says is none."""

import re
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward.leakage import scan
from termrsi.reward.secret_files import MAX_FILE_BYTES
from termrsi.tasks import bundled, harbor

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
    assert password() == "correct horse battery staple"
    assert key == "alpha-bravo-77-x"
    assert animal == "elephant", "the animal is another"
    assert state == "running"
    assert "giraffe" in animals
    assert "invoice" == kind

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
        ("The digest D41D8CD98F00B204 comes out.", ("hash", "literal")),
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
        ("It is ALPHA-BRAVO-77-X.", ("literal",)),
        ("It is Correct Horse Battery Staple.", ("literal",)),
        ("It is correct horse\nbattery staple.", ("literal",)),
        ("It is correct  horse \t battery staple.", ("literal",)),
        ("- correct horse\n- battery staple", ("split",)),
        ("echo 'correct' 'horse' 'battery' 'staple'", ("split",)),
        ("Horse and battery come with a correct staple.", ()),
        ("The animal is an elephant.", ("expected_output",)),
        ("The animal is an ELEPHANT.", ("expected_output",)),
        ("Elephantine sums are likely.", ()),
        ("See that it is running; each invoice counts.", ()),  # a common word, and one of the task's own
        ("A giraffe is one.", ()),  # not what anything must be equal to: only a model could tell
        (f"echo {b64encode(b'elephant').decode()} | base64 -d", ("encoded",)),
        ("Read tnahpele from its end.", ("reversed",)),
        ("cat /tests/* first", ("reads_tests",)),
        ("cat tests/*", ("reads_tests",)),
        ("cat ../tests/*", ("reads_tests",)),
        ("cat '/app/tests/a'", ("reads_tests",)),
        ("cat solution/*", ("reads_tests",)),
        ("The solution/answer is short, the latests/newest first.", ()),
        ("find / -name '*test_*'", ("reads_tests",)),
        ("find . -type f -iname conftest.py", ("reads_tests",)),
        ("ls -R / | grep test_", ("reads_tests",)),
        ("find . -name 'latest.log'", ()),
        ("find /app/data -name '*.csv' and test what comes out", ()),
        ("echo Y2F0IC90ZXN0cy9h | base64 -d | bash", ("encoded",)),  # cat /tests/a
        ("echo '*/stset/ tac' | rev | bash", ("reversed",)),
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


def test_what_the_task_names_itself_is_no_reading_of_its_tests(task: TaskSpec) -> None:
    own = replace(task, instruction="Make tests/test_sum.py of the repository pass; do not touch /solution.")
    assert scan(own, "pytest tests/test_sum.py; find . -name 'test_sum.py'; grep -n def tests/test_sum.py; ls /solution") == ()


def test_an_address_of_sed_is_no_path(task: TaskSpec) -> None:
    (Path(task.path) / "tests" / "more.sh").write_text("sed -n '/server/,/client/p' a.ini | grep -q x\ncat /app/other/gold/\n")
    assert scan(task, "sed -i '/server/,/client/s/port=1/port=2/' a.ini") == ()
    assert scan(task, "look into /app/other/gold/") == ("path",)


@pytest.mark.parametrize(
    ("name", "text", "categories"),
    [
        ("solution.sh", "echo 'the vault opens at dawn' > out", ("literal",)),
        ("solution.yaml", "- command: echo 'the vault opens at dawn'\n  min_timeout_sec: 1.0\n", ("literal",)),
        ("run-tests.sh", "grep -q 'the vault opens at dawn' /app/out", ("literal",)),
        ("truth.md", "Any answer must say that 'the vault opens at dawn'.", ("literal",)),
        ("steps/one/tests/test.sh", "grep -q 'the vault opens at dawn' out", ("literal",)),
        ("steps/one/solution/solve.sh", "echo 'the vault opens at dawn'", ("literal",)),
        ("truth.md", "Whoever asks is told then: the vault opens at dawn.", ("ngram",)),
    ],
)
def test_every_secret_file_of_both_formats_is_read(tmp_path: Path, name: str, text: str, categories: tuple[str, ...]) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    task = TaskSpec("t", "f", "Write what is asked for.", str(tmp_path), EnvironmentSpec(workdir="/app"))
    assert scan(task, "Whoever asks is told then: the vault opens at dawn.") == categories


def test_a_file_that_is_too_large_to_read_has_a_name(task: TaskSpec) -> None:
    (Path(task.path) / "tests" / "golden_copy.txt").write_bytes(b"x" * MAX_FILE_BYTES + b"\n991177\n")
    assert scan(task, "compare with golden_copy.txt") == ("test_name",)
    assert scan(task, "it is 991177") == ()


def test_the_commands_of_a_solution_are_no_secret_and_its_phrases_are(task: TaskSpec) -> None:
    program = """sed -i 's/invoices_2024/paid_2024/' list; awk '{s+=$3} END {print s}' list; echo "$f $(wc -l < list)" """
    script = f"{program}\ngit commit -m 'sum the invoices'\ncp /srv/ledger/list .\necho 'four grey herons' > report.txt\n"
    (Path(task.path) / "solution" / "solve.sh").write_text(script)
    assert scan(task, f"run `{program}`, git commit -m 'sum the invoices', cp /srv/ledger/list .") == ()
    assert scan(task, "echo 'four grey herons' > report.txt") == ("literal",)


def test_a_runbook_of_a_bundled_task_and_its_own_commands_leaks_nothing(tmp_path: Path) -> None:
    """But where the commands hold a result or a value that the task does not give: these two recipes' do."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for split in ("train", "validation", "heldout"):
        root = bundled.ensure(tmp_path, split=split, seeds=range(2))
        for folder in sorted(root.iterdir()):
            task = harbor.load(folder).tasks[0]
            lines = (folder / "solution" / "solve.sh").read_text().splitlines()
            commands = "\n".join(line for line in lines if not re.match(r"#!|set |cd ", line))
            text = f"{task.instruction}\nMilestones: run `{commands}`\nUseful checks: look at the files with cat and ls."
            found.setdefault(f"{task.family}-{task.level}", set()).add(scan(task, text))
    assert len(found) == 3 * len(bundled.families())
    # A link to the release with the highest number, which the agent has to find; a port that only the file tells.
    assert found.pop("symlinks-3") == {("literal",)}
    assert found.pop("config-2") == {(), ("literal",)}
    assert set().union(*found.values()) == {()}
