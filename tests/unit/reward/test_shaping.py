"""Rewards against values worked by hand, their limiting cases, and the properties that the definitions promise."""

import json
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from termrsi.errors import ConfigError, TaskError
from termrsi.records import Verdict
from termrsi.reward.shaping import FamilyScale, Kind, pool_digest, shape, verdict_progress

GRID = [i / 20 for i in range(21)]


@dataclass(frozen=True)
class Task:
    id: str
    family: str
    checks: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)


def task(name: str, family: str, n: int, weight: float = 1.0, free: int = 0) -> Task:
    checks = tuple(f"{name}.{i}" for i in range(n + free))
    return Task(name, family, checks, checks[n:], dict.fromkeys(checks, weight))


def pool(seed: int = 0) -> list[Task]:
    rng = random.Random(seed)
    return [task(f"t{i}", f"f{i % 3}", rng.randint(1, 12), free=rng.randint(0, 2)) for i in range(20)]


def test_spr_by_hand() -> None:
    # sigma(1/2) at tau = 1/2: (1 - e^-1) / (1 - e^-2) = 0.6321205588 / 0.8646647168 = 0.7310585786
    assert shape(0.5, False, kind="spr") == pytest.approx(0.4 * 0.7310585786, abs=1e-9)
    assert shape(0.5, True, kind="spr") == pytest.approx(0.6 + 0.4 * 0.7310585786, abs=1e-9)
    assert shape(0.5, False, kind="saturation", beta=1.0) == pytest.approx(0.7310585786, abs=1e-9)
    assert shape(0.25, True, kind="offset", delta=0.6) == pytest.approx(0.4 * 0.25 + 0.6)
    assert [shape(0.3, s, kind="binary") for s in (False, True)] == [0.0, 1.0]
    assert shape(0.3, True, kind="fdr") == shape(0.3, False, kind="count") == 0.3


def test_any_strict_success_beats_any_partial_result() -> None:
    assert min(shape(x, True, kind="spr") for x in GRID) > max(shape(x, False, kind="spr") for x in GRID)
    assert min(shape(x, True, kind="spr") for x in GRID) == pytest.approx(0.6)
    assert max(shape(x, False, kind="spr") for x in GRID) == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["fdr", "saturation", "offset", "spr", "count", "binary"])
@pytest.mark.parametrize("tau", [0.0, 1e-3, 0.5, 1e6, 1e308, math.inf])
def test_bounds_and_monotone(kind: Kind, tau: float) -> None:
    for strict in (False, True):
        values = [shape(x, strict, kind=kind, tau=tau) for x in GRID]
        assert values == sorted(values)
        assert all(0.0 <= value <= 1.0 for value in values)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("x", GRID)
def test_limits_of_spr(x: float, strict: bool) -> None:
    assert shape(x, strict, kind="spr", beta=1.0, delta=0.0, tau=math.inf) == shape(x, strict, kind="fdr")
    assert shape(x, strict, kind="spr", beta=0.7, delta=0.0, tau=0.3) == shape(x, strict, kind="saturation", beta=0.7, tau=0.3)
    limit = shape(x, strict, kind="spr", beta=0.3, delta=0.7, tau=1e9)
    assert limit == pytest.approx(shape(x, strict, kind="offset", delta=0.7), abs=1e-8)
    assert shape(x, strict, kind="saturation", beta=1.0, tau=0.0) == (1.0 if x > 0 else 0.0)


def test_offset_with_half_or_less_does_not_separate() -> None:
    assert shape(0.95, False, kind="offset", delta=0.4) > shape(0.1, True, kind="offset", delta=0.4)


@pytest.mark.parametrize("progress", [math.nan, math.inf, -math.inf, -0.1, 1.1, None])
@pytest.mark.parametrize("kind", ["fdr", "spr", "binary"])
def test_invalid_progress_is_an_error(progress: float, kind: Kind) -> None:
    with pytest.raises(ValueError, match="progress"):
        shape(progress, False, kind=kind)


def test_unknown_kind_and_bad_parameters() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        shape(0.5, False, kind="dense")  # pyright: ignore[reportArgumentType]  # the error is the test
    with pytest.raises(ValueError, match="over 1"):
        shape(0.5, False, kind="spr", beta=0.6, delta=0.6)
    with pytest.raises(ValueError, match="tau"):
        shape(0.5, False, kind="spr", tau=-1.0)
    with pytest.raises(ValueError, match="beta"):
        shape(0.5, False, kind="saturation", beta=1.5)


def test_count_is_unbounded_only_without_cap() -> None:
    tasks = [task("a", "f", 2), task("b", "f", 2), task("c", "f", 10)]
    scale = FamilyScale.fit(tasks, calibration="global", cap=False)
    x = scale.progress(tasks[2], tasks[2].checks)
    assert x > 1.0
    assert shape(x, True, kind="count") == x
    assert FamilyScale.fit(tasks, calibration="global").progress(tasks[2], tasks[2].checks) == 1.0


def test_scale_by_a_second_form() -> None:
    tasks = pool()
    scale = FamilyScale.fit(tasks, n0=20.0)
    worth = {t.id: len(t.checks) - len(t.baseline) for t in tasks}
    whole = float(np.quantile(list(worth.values()), 0.95))
    assert scale.pool == pytest.approx(whole)
    for family in ("f0", "f1", "f2"):
        mine = [worth[t.id] for t in tasks if t.family == family]
        q = float(np.quantile(mine, 0.95))
        expected = math.exp((len(mine) * math.log(q) + 20 * math.log(whole)) / (len(mine) + 20))
        assert scale.families[family] == pytest.approx(expected)
        member = next(t for t in tasks if t.family == family)
        some = [c for c in member.checks if c not in member.baseline][:2]
        assert scale.progress(member, some) == pytest.approx(min(1.0, len(some) / expected))


def test_progress_by_hand() -> None:
    # Two tasks of one family worth 2 and 4: q = 2 + 0.95 * 2 = 3.9 for family and pool alike.
    a, b = task("a", "f", 2), task("b", "f", 4, free=1)
    scale = FamilyScale.fit([a, b])
    assert scale.progress(b, ["b.0", "b.1", "b.1", "b.4", "unknown"]) == pytest.approx(2 / 3.9)
    assert scale.progress(b, []) == 0.0
    assert scale.progress(b, b.baseline) == 0.0  # the no-op run
    assert scale.progress(b, b.checks) == 1.0


def test_progress_is_bounded_monotone_and_blind_to_order() -> None:
    tasks, rng = pool(), random.Random(1)
    scale = FamilyScale.fit(tasks)
    for item in tasks:
        got: list[str] = []
        last = 0.0
        for check in rng.sample(item.checks, len(item.checks)):
            got.append(check)
            x = scale.progress(item, got)
            assert last <= x <= 1.0
            assert scale.progress(item, reversed(got)) == x
            last = x


def test_scaling_one_family_changes_no_progress_without_pooling() -> None:
    tasks = pool()
    heavy = [replace(t, weights=dict.fromkeys(t.checks, 2.0)) if t.family == "f1" else t for t in tasks]
    doubled = [
        replace(t, checks=(*t.checks, *(f"{c}'" for c in t.checks)), baseline=(*t.baseline, *(f"{c}'" for c in t.baseline)))
        if t.family == "f1"
        else t
        for t in tasks
    ]
    plain = FamilyScale.fit(tasks, n0=0)
    for variant in (heavy, doubled):
        scale = FamilyScale.fit(variant, n0=0)
        for before, after in zip(tasks, variant, strict=True):
            half = before.checks[: len(before.checks) // 2]
            copies = [f"{c}'" for c in half] if variant is doubled and before.family == "f1" else []
            assert scale.progress(after, [*half, *copies]) == pytest.approx(plain.progress(before, half))


def test_much_pooling_is_global() -> None:
    tasks = pool()
    shared = FamilyScale.fit(tasks, calibration="global")
    for n0 in (1e12, math.inf):
        pooled = FamilyScale.fit(tasks, n0=n0)
        for item in tasks:
            assert pooled.progress(item, item.checks[:1]) == pytest.approx(shared.progress(item, item.checks[:1]))


def test_global_with_unit_weights_and_no_baseline_is_the_count_reward() -> None:
    tasks = [task(f"t{n}", f"f{n % 2}", n) for n in range(1, 9)]
    scale = FamilyScale.fit(tasks, calibration="global")
    constant = float(np.quantile(range(1, 9), 0.95))
    for item in tasks:
        assert scale.progress(item, item.checks) == pytest.approx(min(1.0, len(item.checks) / constant))


def test_unseen_family_uses_the_pool() -> None:
    tasks = pool()
    scale = FamilyScale.fit(tasks)
    new = task("new", "elsewhere", 3)
    assert scale.progress(new, new.checks[:1]) == pytest.approx(min(1.0, 1 / scale.pool))


def test_a_task_with_nothing_to_earn_stays_out_and_is_binary() -> None:
    tasks, empty = pool(), task("empty", "f0", 0, free=3)
    with_it = FamilyScale.fit([*tasks, empty])
    assert with_it.families == FamilyScale.fit(tasks).families
    with pytest.raises(TaskError, match="nothing to earn"):
        with_it.progress(empty, empty.checks)
    assert verdict_progress(with_it, empty, Verdict(True, 1.0, passed=empty.checks)) == 1.0
    with pytest.raises(TaskError, match="no task"):
        FamilyScale.fit([empty])


def test_no_report_falls_back_to_strict() -> None:
    tasks = pool()
    scale = FamilyScale.fit(tasks)
    assert [verdict_progress(scale, tasks[0], Verdict(s, float(s))) for s in (False, True)] == [0.0, 1.0]
    assert verdict_progress(scale, tasks[0], Verdict(False, 0.0, failed=tasks[0].checks)) == 0.0


def test_flaky_checks_have_weight_zero() -> None:
    a = replace(task("a", "f", 3), weights={"a.0": 0.0})  # the others default to 1
    scale = FamilyScale.fit([a])
    assert scale.progress(a, ["a.0"]) == 0.0
    assert scale.progress(a, ["a.1", "a.2"]) == 1.0


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_weights_are_refused(weight: float) -> None:
    with pytest.raises(TaskError, match="weight"):
        FamilyScale.fit([task("a", "f", 2, weight=weight)])


def test_a_changed_pool_is_refused() -> None:
    tasks = pool()
    scale = FamilyScale.from_dict(json.loads(json.dumps(FamilyScale.fit(tasks).to_dict())))
    assert scale == FamilyScale.fit(tasks)
    scale.check(tasks[::-1])
    reordered = [replace(t, checks=t.checks[::-1]) for t in tasks]
    scale.check(reordered)
    for changed in (tasks[1:], [replace(tasks[0], family="f9"), *tasks[1:]], [replace(tasks[0], baseline=()), *tasks[1:]]):
        if pool_digest(changed) != scale.digest:
            with pytest.raises(ConfigError, match="pool changed"):
                scale.check(changed)
    with pytest.raises(ConfigError, match="pool changed"):
        scale.check(tasks[1:])


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="calibration"):
        FamilyScale.fit(pool(), calibration="none")  # pyright: ignore[reportArgumentType]  # the error is the test
    with pytest.raises(ConfigError, match="n0"):
        FamilyScale.fit(pool(), n0=-1)
    with pytest.raises(ConfigError, match="scale"):
        FamilyScale.from_dict({"pool": 1.0})
    with pytest.raises(TaskError, match="same id"):
        pool_digest([task("a", "f", 1), task("a", "g", 1)])
