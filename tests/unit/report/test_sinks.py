"""Metrics in their file: each figure raw, and beside it the mean of its last five observations."""

import json
import math
from pathlib import Path

from termrsi.config.schema import Config
from termrsi.report.curves import CausalMeans
from termrsi.report.sinks import Sinks


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_mean_goes_over_this_and_up_to_four_observations_before() -> None:
    means = CausalMeans()
    got = [means.observe("rpr", {"step": step, "reward": value})["reward/mean5"] for step, value in enumerate([1, 3, 2, 6, 3, 11])]
    assert got == [1.0, 2.0, 2.0, 3.0, 3.0, 5.0]  # the last: 3, 2, 6, 3, 11


def test_what_is_missing_or_not_finite_is_no_observation() -> None:
    means = CausalMeans()
    figures: list[dict[str, float]] = [
        {"step": 1, "ev": 1.0},
        {"step": 2},
        {"step": 3, "ev": math.nan},
        {"step": 4, "ev": math.inf},
        {"step": 5, "ev": 3.0},
    ]
    assert [means.observe("rpr", one) for one in figures] == [{"ev/mean5": 1.0}, {}, {}, {}, {"ev/mean5": 2.0}]


def test_stages_and_figures_share_no_window() -> None:
    means = CausalMeans()
    means.observe("rpr_1", {"step": 1, "a": 1.0, "b": 5.0})
    assert means.observe("rpr_2", {"step": 1, "a": 3.0}) == {"a/mean5": 3.0}
    assert means.observe("rpr_1", {"step": 2, "a": 3.0}) == {"a/mean5": 2.0}


def test_figures_without_a_step_are_no_curve() -> None:
    assert CausalMeans().observe("final_eval", {"mean_at_k": 0.5}) == {}


def test_the_file_holds_raw_and_mean_and_a_second_start_begins_anew(tmp_path: Path) -> None:
    """What a stopped stage had observed stays in the file and in no mean."""
    for values in ([1.0, 2.0], [5.0]):
        sinks = Sinks(Config(), tmp_path)
        for step, value in enumerate(values):
            sinks("rpr", {"step": step, "reward": value})
        sinks.close()
    assert [(line["reward"], line["reward/mean5"]) for line in _lines(tmp_path)] == [(1.0, 1.0), (2.0, 1.5), (5.0, 5.0)]
    assert all("step/mean5" not in line for line in _lines(tmp_path))


def test_wandb_is_told_both(tmp_path: Path) -> None:
    class Run:
        told: dict[str, float]

        def log(self, figures: dict[str, float]) -> None:
            self.told = figures

        def finish(self) -> None: ...

    sinks, run = Sinks(Config(), tmp_path), Run()
    sinks._wandb = run  # type: ignore[assignment]
    sinks("rpr", {"step": 1, "reward": 0.5})
    sinks.close()
    assert run.told == {"rpr/step": 1, "rpr/reward": 0.5, "rpr/reward/mean5": 0.5}
