"""Metrics against values worked by hand."""

import math

import numpy as np
import pytest

from termrsi.algo import metrics


def test_explained_variance() -> None:
    returns = np.array([1.0, 2.0, 3.0, 6.0])
    assert metrics.explained_variance(returns, returns) == 1.0
    assert metrics.explained_variance(np.full(4, 7.0), returns) == pytest.approx(0.0)
    assert metrics.explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert metrics.explained_variance(np.zeros(3), np.full(3, 0.1)) is None
    assert metrics.explained_variance(np.zeros(0), np.zeros(0)) is None


def test_logp_gap() -> None:
    gap = metrics.logp_gap(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]))
    assert gap.mean == pytest.approx(0.25)
    assert gap.max == pytest.approx(0.5)
    assert gap.k3 == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert metrics.logp_gap(np.zeros(0), np.zeros(0)) == metrics.Gap(0.0, 0.0, 0.0)


def test_sequence_means_are_over_the_tokens_of_each() -> None:
    means = metrics.sequence_means(np.array([1.0, 5.0, 3.0, 7.0]), np.array([4, 9, 4, 9]))
    assert means.tolist() == [2.0, 6.0]


def test_clip_fraction_and_ratios() -> None:
    ratio = metrics.ratios(np.log([1.3, 1.3, 0.7, 0.7, 1.0]), np.zeros(5))
    np.testing.assert_allclose(ratio, [1.3, 1.3, 0.7, 0.7, 1.0])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 0.0])  # only the first and the fourth lose their gradient
    assert metrics.clip_fraction(ratio, advantages, clip_low=0.2, clip_high=0.2) == pytest.approx(0.4)
    assert metrics.clip_fraction(ratio, advantages, clip_low=0.2, clip_high=0.4) == pytest.approx(0.2)
    assert metrics.clip_fraction(np.zeros(0), np.zeros(0), clip_low=0.2, clip_high=0.2) == 0.0


def test_affine_fit() -> None:
    values = np.array([0.0, 1.0, 2.0, 3.0])
    assert metrics.affine_fit(values, -0.5 * values + 0.25) == (pytest.approx(-0.5), pytest.approx(0.25))
    # By hand: slopes of (0, 0), (1, 1), (2, 0): sum (v - 1)(r - 1/3) = 0, so a = 0 and b the mean.
    assert metrics.affine_fit(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0])) == (pytest.approx(0.0), pytest.approx(1 / 3))
    assert metrics.affine_fit(np.full(3, 0.5), np.array([0.0, 1.0, 2.0])) == (1.0, 0.5)
    assert metrics.affine_fit(np.zeros(0), np.zeros(0)) == (1.0, 0.0)
    draw = np.random.default_rng(0)
    v, r = draw.normal(size=50), draw.normal(size=50)
    a, b = metrics.affine_fit(v, r)
    least = np.square(a * v + b - r).sum()
    assert all(np.square((a + da) * v + b + db - r).sum() > least for da in (-1e-3, 1e-3) for db in (-1e-3, 1e-3))


def test_mean_at_k_and_pass_at_k() -> None:
    passes = [[True, False, False], [True, True, True]]
    assert metrics.mean_at_k(passes) == pytest.approx(2 / 3)
    assert metrics.pass_at_k(3, 1, 1) == pytest.approx(1 / 3)
    assert metrics.pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / 10)  # C(3, 3) / C(5, 3)
    assert metrics.pass_at_k(5, 0, 3) == 0.0
    assert metrics.pass_at_k(5, 3, 3) == 1.0
    assert metrics.mean_pass_at_k(passes, 2) == pytest.approx((2 / 3 + 1) / 2)
    for n, c, k in ((3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="undefined"):
            metrics.pass_at_k(n, c, k)
    for empty in ([], [[True], []]):
        with pytest.raises(ValueError, match="every task an attempt"):
            metrics.mean_at_k(empty)
    with pytest.raises(ValueError, match="no task"):
        metrics.mean_pass_at_k([], 1)


def test_wilson_interval() -> None:
    # 8 of 10, z = 1.96: the usual worked example.
    interval = metrics.wilson_interval(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    none = metrics.wilson_interval(0, 10)
    assert none.low == 0.0
    assert none.high == pytest.approx(0.2775, abs=1e-4)
    assert metrics.wilson_interval(10, 10).high == 1.0
    with pytest.raises(ValueError, match="no proportion"):
        metrics.wilson_interval(3, 2)


def test_bootstrap_interval() -> None:
    passes = [[True]] * 30 + [[False]] * 70
    interval = metrics.bootstrap_interval(passes, seed=1)
    assert interval == metrics.bootstrap_interval(passes, seed=1)
    assert interval.estimate == pytest.approx(0.3)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 100)  # the normal approximation
    assert interval.low == pytest.approx(0.3 - half, abs=0.02)
    assert interval.high == pytest.approx(0.3 + half, abs=0.02)


def test_pairing_removes_the_spread_between_tasks() -> None:
    before = [[i % 2 == 0] * 4 for i in range(40)]
    after = [[attempt or k == 0 for k, attempt in enumerate(task)] for task in before]  # odd tasks: one of four passes
    paired = metrics.paired_bootstrap_interval(before, after)
    assert paired.estimate == pytest.approx(0.125)
    assert 0 < paired.low < 0.125 < paired.high
    assert paired.high - paired.low < metrics.bootstrap_interval(before).high - metrics.bootstrap_interval(before).low
    same = metrics.paired_bootstrap_interval(before, before)
    assert (same.low, same.estimate, same.high) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="the same"):
        metrics.paired_bootstrap_interval(before, after[1:])


def test_sign_test() -> None:
    up, down, same = ([0, 0], [1, 1]), ([1, 0], [0, 0]), ([1, 0], [0, 1])

    def p(*pairs: tuple[list[int], list[int]]) -> float:
        return metrics.sign_test([before for before, _ in pairs], [after for _, after in pairs])

    assert p(same, same) == p() == 1.0
    assert p(up) == 1.0
    assert p(*[up] * 5) == pytest.approx(2 / 2**5)
    assert p(*[up] * 5, same) == p(*[up] * 5) == p(*[down] * 5)
    assert p(*[up] * 4, down) == pytest.approx(2 * (1 + 5) / 2**5)
    assert p(up, up, down, down) == 1.0
    with pytest.raises(ValueError, match="must be the same"):
        metrics.sign_test([[1]], [])


def test_ratio_interval() -> None:
    assert metrics.ratio_interval([]) is None
    assert metrics.ratio_interval([(0, 0), (0, 0)]) is None
    assert metrics.ratio_interval([(1, 1)] * 8 + [(0, 1)] * 2 + [(0, 0)] * 5) == metrics.wilson_interval(8, 10)
    assert metrics.ratio_interval([(3, 3), (2, 2)]) == metrics.wilson_interval(2, 2)  # by tasks, not by attempts
    assert metrics.ratio_interval([(0, 3), (0, 2), (0, 0)]) == metrics.wilson_interval(0, 2)
    assert metrics.ratio_interval([(1, 2)]) == metrics.Interval(0.5, 0.0, 1.0)
    # Pooled: 1 of 4 and 2 of 2 are 3 of 6; resamples are of 1/4, 1 and 1/2.
    assert metrics.ratio_interval([(1, 4), (2, 2)]) == metrics.Interval(0.5, 0.25, 1.0)
    many = metrics.ratio_interval([(i % 3, 2) for i in range(300)], seed=1)
    assert many is not None
    half = 1.96 * math.sqrt(2 / 3) / 2 / math.sqrt(300)  # standard deviation of 0, 1/2, 1
    assert (many.low, many.high) == (pytest.approx(0.5 - half, abs=0.01), pytest.approx(0.5 + half, abs=0.01))


def test_ratio_difference_interval() -> None:
    assert metrics.ratio_difference_interval([(0, 0)], [(1, 1)]) is None
    assert metrics.ratio_difference_interval([], []) is None
    before = [(i % 2 * 2, 2) for i in range(100)]
    after = [(i % 2 + (i % 4 > 0), 2) for i in range(100)]  # 0 2 0 2 -> 0 2 1 2 per 2: a quarter rises by a half
    paired = metrics.ratio_difference_interval(before, after)
    apart = metrics.ratio_difference_interval(before, after, paired=False)
    assert paired is not None
    assert apart is not None
    assert paired.estimate == apart.estimate == pytest.approx(0.125)
    half = 1.96 * math.sqrt(0.25 / 4 - 0.125**2) / 10
    assert (paired.low, paired.high) == (pytest.approx(0.125 - half, abs=0.01), pytest.approx(0.125 + half, abs=0.01))
    assert apart.high - apart.low > 2 * (paired.high - paired.low)
    with pytest.raises(ValueError, match="the same"):
        metrics.ratio_difference_interval([(1, 1)], [])
    # Nothing varies: 0 of 10 on both sides, Wilson's upper bound 0.2775.
    none = metrics.ratio_difference_interval([(0, 1)] * 10, [(0, 1)] * 10)
    assert none is not None
    assert (none.estimate, none.low, none.high) == (0.0, pytest.approx(-0.2775, abs=1e-4), pytest.approx(0.2775, abs=1e-4))
    full = metrics.ratio_difference_interval([(0, 1)] * 10, [(1, 1)] * 10)
    assert full is not None
    assert (full.estimate, full.high) == (1.0, 1.0)
    assert full.low == pytest.approx(1 - math.hypot(0.2775, 0.2775), abs=1e-4)
