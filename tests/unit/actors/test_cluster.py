"""What is said of a Ray that cannot be had. None is started."""

from pathlib import Path

import pytest
import ray

from termrsi.actors.cluster import Cluster, ends
from termrsi.config.load import load
from termrsi.errors import EngineError
from termrsi.harness.runner import attempt_s


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


@pytest.mark.parametrize(
    ("words", "steps", "limit_s"),
    [
        (["limits.wall_s=300"], 1, 7200.0),
        (["limits.wall_s=7200"], 0, 7200.0 + 300.0 + 1200.0),
        (["limits.wall_s=7200"], 3, 3 * (7200.0 + 300.0) + 1200.0),
    ],
)
def test_a_sandbox_is_leased_for_longer_than_an_episode_may_take(
    words: list[str], steps: int, limit_s: float, tmp_path: Path
) -> None:
    """Else one that comes to its time limit loses its sandbox, as by a machine's fault, and is never scored."""
    config = load(["experiment=rsr", f"run_dir={tmp_path / 'run'}", *words])
    made = Cluster(config, "", tmp_path, tmp_path, dict, {}, most_steps=steps)._sandbox_options()
    assert made.lease_limit_s == limit_s
    assert made.lease_limit_s > attempt_s(config.limits.wall_s, steps)
