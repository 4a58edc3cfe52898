"""`termrsi tasks`: options, what is listed and shown, and exit codes. What runs in sandboxes: `flow/test_check_tasks.py`."""

from pathlib import Path

import pytest

from termrsi import task_commands
from termrsi.errors import ConfigError
from termrsi.task_commands import Options


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """A good task, one that is repaired, one that is refused, one of the older format."""
    for name, config in (("good", ""), ("repaired", "version = 1.0\n[environment]\nimage = 'a'\n"), ("refused", "[task]\n")):
        root = tmp_path / name
        for file, text in (
            ("instruction.md", f"Do {name}."),
            ("environment/Dockerfile", "FROM a\n"),
            ("tests/test.sh", "exit 1\n"),
        ):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        (root / "task.toml").write_text(config)
    root = tmp_path / "older"
    root.mkdir()
    for file in ("docker-compose.yaml", "run-tests.sh", "Dockerfile"):
        (root / file).write_text("services:\n  client:\n")
    (root / "task.yaml").write_text("difficulty: easy\ninstruction: Do older.\nmax_test_timeout_sec: 7\n")
    return tmp_path


def test_options() -> None:
    found = Options.of("check", "tasks", ["strict=true", "backend=docker", "attempts=3", "jobs=2", "run=false"])
    assert (found.strict, found.backend, found.attempts, found.jobs, found.run) == (True, "docker", 3, 2, False)
    assert Options.of("list", "tasks", []) == Options()
    assert Options.of("show", "bundled", ["levels=1,2", "seeds=2"]) == Options(levels="1,2", seeds=2)


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("list", ["strikt=true"], "termrsi tasks list: unknown option 'strikt=true'; nearest: strict="),
        ("list", ["strict"], "nearest: strict="),
        ("list", ["zzz=1"], "it takes strict=, levels=, families=, seeds="),
        ("list", ["jobs=2"], "termrsi tasks list: jobs= is an option of tasks check, tasks audit; it takes strict="),
        ("check", ["mutants=2"], "mutants= is an option of tasks audit"),
        ("kit", ["backend=docker"], "backend= is an option of tasks check, tasks audit; it takes strict=, out=, python="),
        ("audit", ["attempts=2"], "attempts= is an option of tasks check"),
        ("check", ["seeds=3"], "seeds= chooses among the bundled suite, and has no effect on 'PATH'"),
        ("audit", ["mutant=3"], "nearest: mutants="),
        ("audit", ["mutants=0"], "whole number from 1 on"),
        ("audit", ["network=public"], "valid: none or host"),
        ("audit", ["network=host", "backend=gvisor"], "the gvisor backend has no network"),
        ("check", ["backend=podman"], "backend is 'podman'; valid: local or docker or gvisor"),
        ("list", ["strict=maybe"], "valid: true or false"),
        ("check", ["attempts=0"], "whole number from 1 on"),
        ("check", ["attempts=-1"], "whole number"),
        ("check", ["jobs=many"], "whole number"),
    ],
)
def test_bad_options_are_one_line(verb: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.of(verb, "PATH", words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_levels_are_numbers() -> None:
    with pytest.raises(ConfigError, match="whole numbers with commas between"):
        Options.of("list", "bundled", ["levels=1,x"])


def test_the_bundled_suite_is_a_path_like_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path))
    assert task_commands.run(["list", "bundled", "families=copy,move", "seeds=2"]) == 0
    assert "4 tasks, 0 refused" in capsys.readouterr().out
    assert task_commands.run(["show", "bundled", "families=copy", "seeds=1", "levels=2"]) == 0
    assert "level, split" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["list", "show", "check", "kit", "audit"])
def test_a_directory_without_a_task_is_bad_input_to_each(verb: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task in it; a task directory holds") as caught:
        task_commands.run([verb, str(tmp_path)])
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("arguments", [[], ["list"], ["show"], ["lsit", "."], ["list", "strict=true"], ["list", "/nowhere"]])
def test_bad_commands_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        task_commands.run(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "/nowhere"], "a tree of them, or bundled"),
        (["audit", "bundled", "families=none_such"], "unknown family 'none_such'"),
        (["audit", "bundled", "levels=4"], "unknown level 4"),
        (["audit", "bundled", "judge=http://x/v1"], "judge_model=NAME"),
    ],
)
def test_an_audit_that_cannot_be_is_refused_before_it_begins(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_commands.run(arguments)
    assert message in str(caught.value)


def test_list_names_everything_and_tells_what_was_refused(collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task_commands.run(["list", str(collection)]) == 1
    out = capsys.readouterr().out
    for word in ("good", "repaired", "older", "Dockerfile", 'version read as "1.0"', "unknown key environment.image"):
        assert word in out
    assert f"refused {collection}/refused: task.toml: [task].name is missing" in out
    assert "3 tasks, 1 refused" in out


def test_strict_refuses_what_lenient_repairs(collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task_commands.run(["list", str(collection), "strict=true"]) == 1
    assert "2 tasks, 2 refused" in capsys.readouterr().out


def test_show_tells_the_verifiers_contract(collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task_commands.run(["show", str(collection / "good")]) == 0
    assert task_commands.run(["show", str(collection / "older")]) == 0
    out = capsys.readouterr().out
    for word in ("Do good.", "/tests/test.sh, 600 s", "Do older.", "/tests/run-tests.sh, 7 s", "2048 MiB"):
        assert word in out


def test_check_without_runs_tells_what_loading_tells(collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task_commands.run(["check", str(collection / "good"), "run=false"]) == 0
    assert task_commands.run(["check", str(collection), "run=false"]) == 1
    assert "passes" not in capsys.readouterr().out
