"""Lines of JSON, with the ids of what was being worked on when they were logged."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrsi.config.load import load
from termrsi.driver import main
from termrsi.errors import ConfigError
from termrsi.report import logs

LOG = logging.getLogger("termrsi.tests")


@pytest.fixture
def json_lines() -> Iterator[None]:
    logs.setup("json")
    yield
    logs.setup("text")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.usefixtures("json_lines")
def test_a_line_has_the_ids_of_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.ids(run="r", stage="sft"):
        with logs.ids(step=3, rollout="g/0"):
            LOG.info("%d done", 7)
        LOG.warning("näher")
    LOG.info("outside")
    first, second, third = lines(capsys)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "termrsi.tests",
        "message": "7 done",
        "run": "r",
        "stage": "sft",
        "step": 3,
        "rollout": "g/0",
    }
    assert {key: second[key] for key in ("level", "message", "run", "stage")} == {
        "level": "warning",
        "message": "näher",
        "run": "r",
        "stage": "sft",
    }
    assert "step" not in second
    assert not {"run", "stage", "step", "rollout"} & third.keys()


@pytest.mark.usefixtures("json_lines")
async def test_tasks_at_once_keep_their_own_ids(capsys: pytest.CaptureFixture[str]) -> None:
    async def episode(name: str) -> None:
        with logs.ids(rollout=name):
            await asyncio.sleep(0)
            LOG.info("turn")
            await asyncio.sleep(0)
            LOG.info("turn")

    with logs.ids(stage="rpr"):
        await asyncio.gather(*(episode(name) for name in "abc"))
    assert [(line["stage"], line["rollout"]) for line in lines(capsys)] == [("rpr", name) for name in "abcabc"]


@pytest.mark.usefixtures("json_lines")
def test_an_error_has_its_traceback_and_others_are_heard_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    other = logging.getLogger("other")
    other.info("unheard")
    try:
        raise KeyError("x")
    except KeyError:
        other.exception("it broke")
    (line,) = lines(capsys)
    assert (line["logger"], line["level"], line["message"]) == ("other", "error", "it broke")
    assert line["error"].endswith("KeyError: 'x'")


def test_text_is_as_python_does(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("json")
    logs.setup("json")
    LOG.info("once")
    logs.setup("text")
    LOG.info("unheard")
    assert [line["message"] for line in lines(capsys)] == ["once"]


def test_a_process_of_ray_learns_of_it_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs.worker_environment("text", "run") == {}
    asked = logs.worker_environment("json", "run")
    module, _, name = str(asked["worker_process_setup_hook"]).rpartition(".")
    assert (module, getattr(logs, name)) == (logs.__name__, logs.in_worker)
    variables = asked["env_vars"]
    assert isinstance(variables, dict)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    logs.in_worker()
    LOG.info("x")
    with logs.ids(rollout="g/1"):
        LOG.info("y")
    logs.setup("text")
    assert [(line["run"], line.get("rollout")) for line in lines(capsys)] == [("run", None), ("run", "g/1")]


def test_a_whole_run_says_nothing_but_lines_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["experiment=tmax", "scale=dry", "logger.lines=json", f"run_dir={tmp_path / 'one'}"]) == 0
    finally:
        logs.setup("text")
    out, err = capsys.readouterr()
    assert out == ""
    found = [json.loads(line) for line in err.splitlines()]
    assert {line["run"] for line in found} == {"one"}
    steps = [(line["stage"], line["step"]) for line in found if line["message"].startswith("step done")]
    assert ("dppo", 1) in steps
    assert ("dppo", 2) in steps
    finished = [line for line in found if line["message"].startswith("rollout finished")]
    assert finished
    assert all(line["rollout"] and line["stage"] for line in finished)
    assert any(line["message"].startswith("ledger: ") for line in found)


def test_other_kinds_of_lines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger.lines.*text.*json"):
        load(["experiment=tmax", "logger.lines=yaml"])
