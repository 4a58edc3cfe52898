"""Counts, recovery rates and differences by hand."""

import math

import pytest

from termrsi.stages import error_rates
from termrsi.stages.error_rates import JudgedRun
from termrsi.stages.error_rules import CATEGORIES


def run(task: str, planning: str, family: str = "f") -> JudgedRun:
    return JudgedRun(task, family, {**dict.fromkeys(CATEGORIES, "no_error"), "planning": planning})


def test_counts_and_rate_of_one_run_per_task() -> None:
    states = ["recovered"] * 8 + ["unresolved"] * 2 + ["uncertain"] * 3 + ["no_error"]
    found = error_rates.rates([run(str(i), state) for i, state in enumerate(states)])
    planning = found["planning"]
    assert {name: planning[name] for name in ("unresolved", "recovered", "no_error", "uncertain")} == {
        "unresolved": 2, "recovered": 8, "no_error": 1, "uncertain": 3,
    }  # fmt: skip
    assert planning["rate"] == 0.8
    assert (planning["low"], planning["high"]) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))  # Wilson
    assert found["tool_use"]["no_error"] == 14


def test_without_an_error_the_rate_is_undefined() -> None:
    found = error_rates.rates([run("a", "no_error"), run("b", "uncertain")])
    assert [found["planning"][name] for name in ("rate", "low", "high")] == [None, None, None]
    assert all(cells["rate"] is None for cells in error_rates.rates([]).values())


def test_runs_of_one_task_are_not_independent() -> None:
    """Of two tasks, one always recovered and one never: resamples are of one, the other, or both; 95 % takes all of them."""
    runs = [run("a", "recovered")] * 3 + [run("b", "unresolved")] * 3
    planning = error_rates.rates(runs)["planning"]
    assert (planning["rate"], planning["low"], planning["high"]) == (0.5, 0.0, 1.0)


def test_families_apart() -> None:
    runs = [run("a", "recovered", "x"), run("b", "unresolved", "y"), run("c", "recovered", "y")]
    found = error_rates.families(runs)
    assert {name: rates["planning"]["rate"] for name, rates in found.items()} == {"x": 1.0, "y": 0.5}


def test_the_difference_is_paired_by_task() -> None:
    """Tasks a and b rise from unresolved to recovered, c and d stay: 1/4 -> 3/4; what only one side has is left out."""
    before = [run("a", "unresolved"), run("b", "unresolved"), run("c", "unresolved"), run("d", "recovered")]
    after = [run("a", "recovered"), run("b", "recovered"), run("c", "unresolved"), run("d", "recovered"), run("e", "unresolved")]
    planning = error_rates.compare(before, after)["planning"]
    assert (planning["tasks"], planning["paired"]) == (4, 1)
    assert planning["recovery"] == 0.5
    # The number of the two that rise among four draws is binomial (4, 1/2): 1/16 each for none and for all of them.
    assert (planning["recovery_low"], planning["recovery_high"]) == (0.0, 1.0)
    assert planning["unresolved"] == -0.5
    assert (planning["unresolved_low"], planning["unresolved_high"]) == (-1.0, 0.0)


def test_a_difference_of_undefined_rates_is_undefined() -> None:
    planning = error_rates.compare([run("a", "no_error")], [run("a", "recovered")])["planning"]
    assert planning["recovery"] is None
    assert planning["recovery_low"] is None
    assert planning["unresolved"] == 0.0
    # One of one on each side: Wilson's [0, 0.793] for both, and square and add.
    assert planning["unresolved_high"] == pytest.approx(0.7935, abs=1e-4)
    assert planning["unresolved_low"] == pytest.approx(-0.7935, abs=1e-4)


def test_other_tasks_are_compared_unpaired() -> None:
    before = [run("a", "unresolved"), run("b", "recovered")]
    after = [run("c", "recovered"), run("d", "recovered")]
    planning = error_rates.compare(before, after)["planning"]
    assert (planning["tasks"], planning["paired"], planning["recovery"]) == (0, 0, 0.5)
    assert (planning["recovery_low"], planning["recovery_high"]) == (0.0, 1.0)  # of a and b: both a, or both b, 1/4 each
    assert not math.isnan(float(planning["unresolved_low"] or 0.0))
