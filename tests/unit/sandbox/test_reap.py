"""What dead owners left is told from what living ones hold, by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from termrsi import commands
from termrsi.sandbox import layers, reap


def dead_label(owner: str) -> str:
    """Of a process that has ended."""
    code = f"from termrsi.sandbox import layers; print(layers.label({owner!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def holdings(state: Path, label: str) -> list[Path]:
    made = [state / "gvisor" / "live" / label, state / "gvisor" / "snapshots" / label, state / "snapshots" / label]
    for path in made:
        path.mkdir(parents=True)
        (path / "file").touch()
    layer = state / "layers" / label
    (layer / "users").mkdir(parents=True)
    (layer / "users" / label).touch()
    return [*made, layer]


def test_the_dead_ones_go_and_the_living_stay(tmp_path: Path) -> None:
    dead, living, other = dead_label("run"), layers.label("run"), dead_label("other")
    gone = holdings(tmp_path, dead)
    kept = [*holdings(tmp_path, living), *holdings(tmp_path, other)]
    removed = reap.everything(tmp_path, owner="run", docker=False)
    assert all(dead in name for name in removed)
    assert [path for path in gone if path.exists()] == []
    assert all(path.exists() for path in kept)
    assert reap.everything(tmp_path, owner="run", docker=False) == []
    assert len(reap.everything(tmp_path, docker=False)) >= 3  # of whichever owner
    assert all(path.exists() for path in kept if living in path.name)


def test_what_a_run_goes_on_from_stays(tmp_path: Path) -> None:
    wanted, other = dead_label("run"), dead_label("run")
    for label in (wanted, other):
        holdings(tmp_path, label)
        (tmp_path / "snapshots" / label / "manifest.json").write_text(json.dumps({"layers": []}))
    reap.everything(tmp_path, docker=False, keep={wanted})
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == [wanted]
    assert [path.name for path in (tmp_path / "gvisor" / "snapshots").iterdir()] == [wanted]
    assert [path.name for path in (tmp_path / "layers" / wanted / "users").iterdir()] == [wanted]
    assert not (tmp_path / "layers" / other).exists()


def test_a_run_that_starts_leaves_the_snapshots_of_another_which_may_go_on(tmp_path: Path) -> None:
    own, other = dead_label("run"), dead_label("other")
    for label in (own, other):
        holdings(tmp_path, label)
        (tmp_path / "snapshots" / label / "manifest.json").write_text(json.dumps({"layers": []}))
    removed = reap.before("run", tmp_path, docker=False)
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == [other]
    assert [path.name for path in (tmp_path / "gvisor" / "snapshots").iterdir()] == [other]
    assert not list((tmp_path / "gvisor" / "live").iterdir()), "what only runs is of no use to anyone"
    assert any(own in name for name in removed)
    reap.before("other", tmp_path, docker=False, snapshots=False)
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == [other], "one that was started again on its node"


def test_a_layer_whose_last_user_left_as_it_was_killed_goes_too(tmp_path: Path) -> None:
    dead, living = dead_label("run"), layers.label("run")
    for label in (dead, living):
        (tmp_path / "layers" / label / "tree").mkdir(parents=True)
        (tmp_path / "cache" / "images" / f"tmp-{label.replace('run', 'build', 1)}").mkdir(parents=True)
    reap.everything(tmp_path, docker=False, cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "layers").iterdir()] == [living]
    assert [path.name for path in (tmp_path / "cache" / "images").iterdir()] == [f"tmp-{living.replace('run', 'build', 1)}"]


def test_doctor_clean_says_what_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    label = dead_label("run")
    holdings(tmp_path / "termrsi", label)
    assert commands.run(["doctor", "--clean"]) == 0
    assert label in capsys.readouterr().out
    assert commands.run(["doctor", "--clean"]) == 0
    assert not list((tmp_path / "termrsi" / "gvisor" / "live").iterdir())
