"""Passed checks to one number: progress calibrated per task family (FDR), and its combination with strict success (SPR).

The papers name both and give no formula: all of it is ours, except the count reward (T1). `FamilyScale` is fitted once
from the task pool and kept with a hash of it; `shape` is a pure function of progress and strict success.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal, Protocol, get_args

from termrsi.errors import ConfigError, TaskError
from termrsi.records import Verdict

Kind = Literal["fdr", "saturation", "offset", "spr", "count", "binary"]
Calibration = Literal["family", "global"]

QUANTILE = 0.95
ROUNDING = 1e-9


class CheckedTask(Protocol):
    """A task with its measured checks: `reward.checks.TaskChecks`, or anything alike."""

    @property
    def id(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def checks(self) -> Iterable[str]: ...

    @property
    def baseline(self) -> Iterable[str]: ...

    @property
    def weights(self) -> Mapping[str, float]: ...


def shape(
    progress: float,
    strict: bool,
    *,
    kind: Kind,
    beta: float = 0.4,
    delta: float = 0.6,
    tau: float = 0.5,
) -> float:
    """The trial's scalar reward from calibrated progress x in [0, 1] and strict success (ours).

        fdr, count   x                                 saturation   beta * sigma(x)
        offset       (1 - delta) * x + delta * strict  spr          beta * sigma(x) + delta * strict
        binary       strict                            sigma(x) = (1 - e^(-x/tau)) / (1 - e^(-1/tau))

    tau = inf gives sigma(x) = x, tau = 0 gives 1 for any progress. With beta < delta, spr puts every strict success above
    every partial result; offset with delta <= 1/2 does not, and is an ablation. `count` takes an uncapped x.

    Raises ValueError for missing, NaN, infinite or out-of-range progress, an unknown kind, or parameters that leave [0, 1].
    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind of reward {kind!r}: one of {', '.join(get_args(Kind))}")
    if progress is None or not math.isfinite(progress) or progress < 0.0 or (progress > 1.0 and kind != "count"):
        raise ValueError(f"progress {progress!r} is not in [0, 1]")
    won = 1.0 if strict else 0.0
    match kind:
        case "binary":
            return won
        case "fdr" | "count":
            return float(progress)
        case "saturation":
            return _unit("beta", beta) * _saturate(progress, tau)
        case "offset":
            return (1.0 - _unit("delta", delta)) * progress + delta * won
    if _unit("beta", beta) + _unit("delta", delta) > 1.0 + ROUNDING:
        raise ValueError(f"beta + delta = {beta + delta} is over 1")
    return min(1.0, beta * _saturate(progress, tau) + delta * won)


def _saturate(x: float, tau: float) -> float:
    if math.isnan(tau) or tau < 0.0:
        raise ValueError(f"tau {tau!r} is negative or not a number")
    if tau == 0.0:
        return 1.0 if x > 0.0 else 0.0
    whole = math.expm1(-1.0 / tau)
    return x if whole == 0.0 else math.expm1(-x / tau) / whole


def _unit(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} {value!r} is not in [0, 1]")
    return value


@dataclass(frozen=True, slots=True)
class FamilyScale:
    """How much earned progress counts as 1, per family and for the pool; never re-estimated while a run trains.

    `families` maps a family to S_f; any other family uses `pool`. `digest` identifies the pool it was fitted on.
    """

    calibration: str
    families: dict[str, float]
    pool: float
    digest: str
    cap: bool = True

    @classmethod
    def fit(
        cls, tasks: Iterable[CheckedTask], *, calibration: Calibration = "family", n0: float = 20.0, cap: bool = True
    ) -> "FamilyScale":
        """S_f = exp((n_f ln q_f + n0 ln q) / (n_f + n0)), q the 95th percentile (linear) of earnable progress C_i (ours).

        n_f counts the tasks of the family with C_i > 0; others stay out of both quantiles. `calibration="global"` uses q for
        every family, which with unit weights and no baseline is T1's count reward. `cap=False` leaves x unbounded (T1).

        Raises ConfigError for an unknown calibration or a negative n0, TaskError if no task has anything to earn.
        """
        if calibration not in get_args(Calibration):
            raise ConfigError(f"unknown calibration {calibration!r}", "reward", f"valid: {', '.join(get_args(Calibration))}")
        if math.isnan(n0) or n0 < 0:
            raise ConfigError(f"n0 {n0!r} is negative or not a number", "reward")
        pool = list(tasks)
        by_family: dict[str, list[float]] = {}
        for task in pool:
            if (worth := earnable(task)) > 0.0:
                by_family.setdefault(task.family, []).append(worth)
        if not by_family:
            raise TaskError("no task has a check that an empty submission fails", "reward scale")
        whole = _quantile([worth for worths in by_family.values() for worth in worths])
        families: dict[str, float] = {}
        if calibration == "family" and not math.isinf(n0):
            for family, worths in sorted(by_family.items()):
                n = len(worths)
                families[family] = math.exp((n * math.log(_quantile(worths)) + n0 * math.log(whole)) / (n + n0))
        return cls(calibration, families, whole, pool_digest(pool), cap)

    def progress(self, task: CheckedTask, passed: Iterable[str]) -> float:
        """x = min(1, c / S): the weight of passed checks that an empty submission fails. Order and repeats do not matter.

        Ids that are no check of the task are ignored. Raises TaskError if the task has nothing to earn.
        """
        if earnable(task) <= 0.0:
            raise TaskError("nothing to earn: use strict success alone", task.id)
        got = set(passed)
        earned = math.fsum(weight for check, weight in _open_checks(task).items() if check in got)
        x = earned / self.families.get(task.family, self.pool)
        return min(1.0, x) if self.cap else x

    def check(self, tasks: Iterable[CheckedTask]) -> None:
        """Raises ConfigError if this is not the pool that the scale was fitted on."""
        if (found := pool_digest(tasks)) != self.digest:
            raise ConfigError(
                f"the task pool changed ({found[:12]}, fitted on {self.digest[:12]})",
                "reward scale",
                "fit a new scale in a new run",
            )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "FamilyScale":
        """The inverse of `to_dict`. Raises ConfigError if a field is missing or of the wrong kind."""
        families, pool = data.get("families"), data.get("pool")
        if not isinstance(families, dict) or not isinstance(pool, int | float) or not isinstance(data.get("digest"), str):
            raise ConfigError("not a reward scale", "reward scale", "fields: calibration, families, pool, digest, cap")
        scales = {str(family): float(value) for family, value in families.items()}
        return cls(str(data.get("calibration")), scales, float(pool), str(data["digest"]), bool(data.get("cap", True)))


def verdict_progress(scale: FamilyScale, task: CheckedTask, verdict: Verdict) -> float:
    """Progress of one verdict; strict success stands in where there is no report, or nothing to earn (as T1 does)."""
    if not (verdict.passed or verdict.failed or verdict.skipped) or earnable(task) <= 0.0:
        return 1.0 if verdict.strict else 0.0
    return scale.progress(task, verdict.passed)


def pool_digest(tasks: Iterable[CheckedTask]) -> str:
    """A hash of the pool that the order of tasks and of checks does not change. Raises TaskError if an id comes twice."""
    rows = sorted(
        [task.id, task.family, sorted(set(task.checks)), sorted(set(task.baseline)), sorted(task.weights.items())] for task in tasks
    )
    for first, second in pairwise(rows):
        if first[0] == second[0]:
            raise TaskError("two tasks with the same id", str(first[0]))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _open_checks(task: CheckedTask) -> dict[str, float]:
    """Weight of each check that an empty submission does not pass; 1 where none is given."""
    free = set(task.baseline)
    weights = {check: float(task.weights.get(check, 1.0)) for check in task.checks if check not in free}
    for check, weight in weights.items():
        if not math.isfinite(weight) or weight < 0.0:
            raise TaskError(f"weight {weight} of check {check!r}", task.id, "valid: a finite number, 0 or more")
    return weights


def earnable(task: CheckedTask) -> float:
    """C_i: the weight of all checks that an empty submission fails."""
    return math.fsum(_open_checks(task).values())


def _quantile(values: list[float]) -> float:
    """numpy's default (linear) quantile."""
    ordered = sorted(values)
    at = QUANTILE * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
