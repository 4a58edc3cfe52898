"""What judged runs add up to: per category counts and recovery rate, per family too, and the difference of two checkpoints.

The recovery rate is recovered / (recovered + unresolved), pooled over runs (ReTerm, arXiv 2610.18484); without either it is
undefined. Tasks are the sample of the 95 % intervals, for runs of one task are not independent (`metrics.ratio_interval`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from termrsi.algo import metrics
from termrsi.algo.metrics import Interval
from termrsi.stages.error_rules import CATEGORIES, STATES

Rates = dict[str, dict[str, float | int | None]]


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """One run: the state of each category."""

    task_id: str
    family: str
    states: dict[str, str]


def rates(runs: Sequence[JudgedRun], *, seed: int = 0) -> Rates:
    """Per category: a count per state, `rate`, `low` and `high`."""
    found: Rates = {}
    for category in CATEGORIES:
        counts = Counter(run.states[category] for run in runs)
        interval = metrics.ratio_interval([*_recovered(runs, category).values()], seed=seed)
        found[category] = {state: counts[state] for state in STATES} | _told("rate", interval)
    return found


def families(runs: Sequence[JudgedRun], *, seed: int = 0) -> dict[str, Rates]:
    """`rates` of each family, by name."""
    names = sorted({run.family for run in runs})
    return {name: rates([run for run in runs if run.family == name], seed=seed) for name in names}


def compare(before: Sequence[JudgedRun], after: Sequence[JudgedRun], *, seed: int = 0) -> Rates:
    """Per category, `after` less `before`: `recovery` is the difference of recovery rates, `unresolved` that of the shares of runs.

    On the `tasks` that both have, in pairs (`paired` 1); where there is none, on those of each, resampled apart.
    """
    both = {run.task_id for run in before} & {run.task_id for run in after}
    sides = [[run for run in runs if run.task_id in both] if both else runs for runs in (before, after)]
    found: Rates = {}
    for category in CATEGORIES:
        told: dict[str, float | int | None] = {"tasks": len(both), "paired": int(bool(both))}
        for name, parts_of in (("recovery", _recovered), ("unresolved", _unresolved)):
            old, new = (parts_of(runs, category) for runs in sides)
            order = sorted(both) if both else ()
            pairs = [[side[t] for t in order] if both else [*side.values()] for side in (old, new)]
            told |= _told(name, metrics.ratio_difference_interval(*pairs, paired=bool(both), seed=seed), f"{name}_")
        found[category] = told
    return found


def _recovered(runs: Iterable[JudgedRun], category: str) -> dict[str, tuple[int, int]]:
    """Per task: runs whose errors were recovered, runs with an error of which that is known."""
    return _parts(runs, category, ("recovered",), ("recovered", "unresolved"))


def _unresolved(runs: Iterable[JudgedRun], category: str) -> dict[str, tuple[int, int]]:
    """Per task: runs with an unresolved error, runs of which it is known whether they have one."""
    return _parts(runs, category, ("unresolved",), ("unresolved", "recovered", "no_error"))


def _parts(
    runs: Iterable[JudgedRun], category: str, counted: tuple[str, ...], among: tuple[str, ...]
) -> dict[str, tuple[int, int]]:
    parts: dict[str, tuple[int, int]] = {}
    for run in runs:
        a, b = parts.get(run.task_id, (0, 0))
        state = run.states[category]
        parts[run.task_id] = (a + (state in counted), b + (state in among))
    return parts


def _told(name: str, interval: Interval | None, prefix: str = "") -> dict[str, float | int | None]:
    if interval is None:
        return {name: None, f"{prefix}low": None, f"{prefix}high": None}
    return {name: interval.estimate, f"{prefix}low": interval.low, f"{prefix}high": interval.high}
