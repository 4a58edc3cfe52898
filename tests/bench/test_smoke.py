"""Every benchmark runs, at a size that proves nothing about speed. Figures are taken by hand, on a quiet machine."""

from pathlib import Path

from termrsi.model.checkpoint import tiny_model
from tests.bench import prefix_sharing


def test_prefix_sharing(tmp_path: Path) -> None:
    found = prefix_sharing.measure(tiny_model(tmp_path / "tiny"), repeats=1, vocabulary=250)
    assert found["tokens_ratio"] > 1.8
    assert found["apart_s"] > 0
    assert found["shared_s"] > 0
