"""Terminal-Bench 1.x directories: fields, the old form of the instruction, refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from termrsi.tasks import terminal_bench

COMPOSE = "services:\n  client:\n    build: .\n"
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_task(config: str, compose: str | None = COMPOSE, script: str | None = "pytest /tests -rA\n") -> Path:
        root = tmp_path / "old-task"
        root.mkdir()
        (root / "task.yaml").write_text(config)
        (root / "Dockerfile").write_text("FROM debian\n")
        for name, content in (("docker-compose.yaml", compose), ("run-tests.sh", script)):
            if content is not None:
                (root / name).write_text(content)
        return root

    return make_task


def test_fields(make: Make) -> None:
    config = (
        "# canary\ninstruction: |-\n  Do {it}.\ndifficulty: medium\ncategory: games\nmax_agent_timeout_sec: 60\nauthor_name: x\n"
    )
    root = make(config)
    result = terminal_bench.load(root)
    task = result.tasks[0]
    assert (task.id, task.family, task.level, task.instruction) == ("old-task", "games", 2, "Do {it}.")
    assert (task.agent_timeout_s, task.environment.context, task.environment.memory_mb) == (60.0, str(root), 2048)
    assert result.notes == ()


def test_descriptions_are_joined_named_one_first(make: Make) -> None:
    config = """
instruction: base
difficulty: easy
descriptions:
  - key: problem
    description: The problem.
  - key: base
    description: The frame.
"""
    result = terminal_bench.load(make(config))
    assert result.tasks[0].instruction == "The frame.\n\nThe problem."
    assert "descriptions[base]" in result.notes[0]


def test_repairs_and_remarks(make: Make) -> None:
    compose = (
        "services:\n  client:\n    container_name: ${COMPOSE_PROJECT_NAME}\n    volumes:\n      - .:/app\n  server:\n    image: x\n"
    )
    result = terminal_bench.load(make("instruction: Do it.\ndifficulty: 4\nlanguage: c\n", compose, "pytest /tests\n"))
    text = "\n".join(result.notes)
    for part in ("difficulty 4 -> unknown", "unknown key language", "mounts the task", "COMPOSE_PROJECT", "several", "without -rA"):
        assert part in text
    assert result.tasks[0].level == 1


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("", "task.yaml is empty"),
        ("- a\n", "task.yaml is not a mapping"),
        ("difficulty: easy\n", "instruction is missing"),
        ("a: [\n", "task.yaml: "),
    ],
)
def test_refusals(make: Make, config: str, text: str) -> None:
    result = terminal_bench.load(make(config))
    assert not result.tasks
    assert text in result.skipped[0].reason
    assert "\n" not in result.skipped[0].reason


def test_missing_files(make: Make, tmp_path: Path) -> None:
    result = terminal_bench.load(make("instruction: Do it.\n", None, None))
    assert result.skipped[0].reason == "docker-compose.yaml and run-tests.sh missing"
    assert terminal_bench.load(tmp_path).skipped[0].reason == "task.yaml is missing"


def test_damage_that_is_repaired_is_told(make: Make) -> None:
    root = make("instruction: Do it.\ndifficulty: easy\nrun_tests_in_same_shell: true\n", script="pytest -rA\r\n")
    (root / "task.yaml").write_bytes(b"\xef\xbb\xbf" + (root / "task.yaml").read_bytes())
    notes = [note.partition(": ")[2] for note in terminal_bench.load(root).notes]
    assert notes == [
        "task.yaml: byte-order mark removed",
        "CRLF -> LF in run-tests.sh",
        "task.yaml: not carried out: run_tests_in_same_shell; the tests have a shell of their own",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("max_test_timeout_sec: soon\n", "max_test_timeout_sec is 'soon', not a number"),
        ("max_test_timeout_sec: .nan\n", "max_test_timeout_sec is nan, not a number"),
        ("parser_name: mine\n", "parser_name 'mine' is not known; valid: pytest, swebench"),
    ],
)
def test_what_could_never_be_verified_is_refused_at_once(make: Make, more: str, words: str) -> None:
    (skipped,) = terminal_bench.load(make(f"instruction: Do it.\ndifficulty: easy\n{more}")).skipped
    assert words in skipped.reason


def test_strict_wants_a_difficulty(make: Make) -> None:
    root = make("instruction: Do it.\n")
    assert terminal_bench.load(root).tasks
    assert terminal_bench.load(root, strict=True).skipped[0].reason == "task.yaml: difficulty is missing"


@pytest.mark.parametrize(
    ("compose", "image"),
    [
        ("services:\n  client:\n    image: python:3.12\n", "python:3.12"),
        ("services:\n  client:\n    image: ${IMAGE}\n", None),
        (COMPOSE, None),
        ("services: 3\n", None),
    ],
)
def test_without_a_dockerfile_the_clients_image_counts(make: Make, compose: str, image: str | None) -> None:
    root = make("instruction: Do it.\ndifficulty: easy\n", compose=compose)
    (root / "Dockerfile").unlink()
    result = terminal_bench.load(root)
    if image is None:
        assert "no image" in result.skipped[0].reason
    else:
        assert result.tasks[0].environment.docker_image == image
