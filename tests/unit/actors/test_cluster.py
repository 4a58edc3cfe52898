"""What is said of a Ray that cannot be had. None is started."""

from pathlib import Path

import pytest
import ray

from termrsi.actors.cluster import Cluster, ends
from termrsi.config.load import load
from termrsi.errors import EngineError


def connect(error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    Cluster(load(["experiment=rsr", f"run_dir={place / 'run'}"]), "", place, place, dict, {}).connect()


def test_a_ray_that_is_not_there_in_time_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives a node 30 s, and then raises an Exception of no kind."""
    with pytest.raises(EngineError) as found:
        connect(Exception("The current node timed out during startup.\nMore of it."), tmp_path, monkeypatch)
    told = "Ray did not start: The current node timed out during startup."
    assert str(found.value) == f"cluster: {told}; the same command again, when the machine is less busy"


def test_a_fault_of_another_kind_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="of ours"):
        connect(RuntimeError("of ours"), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("The actor died.\n\tclass_name: X\n\n  EngineError: no room\n", "The actor died.: EngineError: no room"),
        ("once", "once"),
        ("", "RuntimeError"),
    ],
)
def test_a_death_at_the_start_is_one_line_with_its_reason(text: str, told: str) -> None:
    assert ends(RuntimeError(text)) == told
