"""What a run removes of its dead processes, and what it keeps for its next life."""

from pathlib import Path

import pytest

from termrsi import setup
from termrsi.config.load import load


def dead(state: Path, name: str) -> Path:
    """A whole snapshot of a process that is gone."""
    home = state / "snapshots" / name
    home.mkdir(parents=True)
    (home / "manifest.json").write_text('{"layers": []}')
    return home


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("scale", "removed"), [("dry", False), ("laptop", True)])
def test_only_its_own_is_removed_and_what_is_kept_stays(
    scale: str, removed: bool, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path / "cache"))
    config = load([f"scale={scale}", "experiment=rsr", f"run_dir={tmp_path / 'run.1'}"])
    names = (f"{config.owner}-1-0-aa", f"{config.owner}-1-0-bb", "run-1-1-0-cc")
    own, kept, others = [dead(tmp_path / "termrsi", name) for name in names]
    said: list[str] = []
    setup.reap(config, "a crashed run", said.append, frozenset({kept.name}), before=before)
    assert (own.exists(), kept.exists(), others.exists()) == (not removed, True, True)
    assert [line for line in said if config.owner in line] == [f"removed what a crashed run left: {own}"] * removed


def test_runs_that_are_called_the_same_own_what_is_theirs(tmp_path: Path) -> None:
    """As the arms of a comparison are: each is the seed's, in another folder."""
    owners = [load(["scale=dry", "experiment=rsr", f"run_dir={tmp_path / arm / 'seed.0'}"]).owner for arm in ("a", "b", "a")]
    assert owners[0] == owners[2] != owners[1]
    assert all(owner.startswith("seed-0-") and len(owner) <= 40 for owner in owners)
    long = load(["scale=dry", "experiment=rsr", f"run_dir={tmp_path / ('x' * 60)}"]).owner
    assert len(long) == 40
