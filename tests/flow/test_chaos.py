"""Actors and drivers of runs on a real Ray and real sandboxes are killed: the run goes on by itself, or by the same command."""

import asyncio
import os
from pathlib import Path

import pytest

from termrsi.sandbox import check
from tests import chaos

KILLS = int(os.environ.get("TERMRSI_KILLS", "3"))
pytestmark = pytest.mark.ray


def test_nothing_is_lost_whoever_is_killed(tmp_path: Path) -> None:
    """Prompts each once, the same curve, no lost attempt scored, nothing left; a failure names the seed."""
    if missing := asyncio.run(check.probe(backend="local")):
        pytest.skip("; ".join(missing))
    with chaos.Place.made(tmp_path) as place:
        watch(place)


def watch(place: chaos.Place) -> None:
    counts, number = chaos.Counts(), 0
    whole = place.run("whole")
    code, said = whole.live()
    assert code == 0, said
    assert whole.left() == []
    assert all(steps and all(steps) for stage, steps in whole.result()["trained"].items() if stage != "warmup")
    assert {strict for files in whole.result()["verdicts"].values() for file in files.values() for strict in file.values()} == {
        True,
        False,
    }
    while counts.kills < KILLS:
        for _ in chaos.play(place, whole, f"run-{number}", f"kills of run {number}", counts):
            pass
        number += 1
    assert (counts.lost, counts.twice, counts.left, counts.failed, counts.other) == (0, 0, 0, 0, 0)
