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


@pytest.mark.parametrize(("scale", "removed"), [("dry", False), ("laptop", True)])
def test_only_its_own_is_removed_and_what_is_kept_stays(
    scale: str, removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path / "cache"))
    config = load([f"scale={scale}", "experiment=rsr", f"run_dir={tmp_path / 'run.1'}"])
    assert config.owner == "run-1"
    own, kept, others = [dead(tmp_path / "termrsi", name) for name in ("run-1-1-0-aa", "run-1-1-0-bb", "run-2-1-0-cc")]
    said: list[str] = []
    setup.reap(config, "a crashed run", said.append, frozenset({kept.name}), owner=config.owner)
    assert (own.exists(), kept.exists(), others.exists()) == (not removed, True, True)
    assert [line for line in said if "run-1" in line] == [f"removed what a crashed run left: {own}"] * removed
