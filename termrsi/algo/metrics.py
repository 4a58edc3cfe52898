"""Numbers that describe a batch or an evaluation. numpy only; no torch.

Letters: K action tokens, N tasks, k attempts of one task.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence bounds."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two log-probabilities of the same tokens lie apart: mean and largest |d|, and k3 = mean of e^d - 1 - d."""

    mean: float
    max: float
    k3: float


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - Var(R - V) / Var(R) over action tokens `[K]`; None where it is undefined: no token, or equal returns.

    Perfect 1, any constant 0, sign-flipped negative. Returns of small lambda flatter the critic: compare at lambda = 1.
    """
    if len(returns) == 0 or np.ptp(returns) == 0.0:
        return None
    returns = np.asarray(returns, np.float64)
    return float(1.0 - np.var(returns - values) / np.var(returns))


def affine_fit(values: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """(a, b) that minimise sum (a V + b - R)^2 over `[K]`.

    (1, mean of R - V) for equal values, of which any a would do; (1, 0) of none.
    """
    if len(values) == 0:
        return 1.0, 0.0
    values, targets = np.asarray(values, np.float64), np.asarray(targets, np.float64)
    if np.ptp(values) == 0.0:
        return 1.0, float((targets - values).mean())
    centred = values - values.mean()
    scale = float((centred * (targets - targets.mean())).sum() / np.square(centred).sum())
    return scale, float(targets.mean() - scale * values.mean())


def ratios(logp: np.ndarray, old_logp: np.ndarray) -> np.ndarray:
    """exp(logp - old_logp) `[K]`, the exponent held in [-20, 20] as in the losses."""
    return np.exp(np.clip(np.asarray(logp, np.float64) - old_logp, -20.0, 20.0))


def sequence_means(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Mean `[S]` over the tokens of each of S sequences; `values`, `rows` `[K]`, `rows` numbers each token's sequence."""
    _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
    return np.bincount(place, weights=np.asarray(values, np.float64)) / count


def clip_fraction(
    ratio: np.ndarray, advantages: np.ndarray, *, clip_low: float | np.ndarray, clip_high: float | np.ndarray
) -> float:
    """Share of tokens, or of sequences, `[K]` whose gradient the PPO clip removes; 0 if there are none. Radii may be `[K]`."""
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return float(clipped.mean()) if len(ratio) else 0.0


def logp_gap(logp: np.ndarray, sampler_logp: np.ndarray) -> Gap:
    """Gap between learner and sampler over action tokens `[K]`, d = log pi - log mu; zeros if there are none.

    k3 is the estimator of KL(mu || pi) that is never negative (Schulman, "Approximating KL divergence").
    """
    if len(logp) == 0:
        return Gap(0.0, 0.0, 0.0)
    d = np.clip(np.asarray(logp, np.float64) - sampler_logp, -20.0, 20.0)
    return Gap(float(np.abs(d).mean()), float(np.abs(d).max()), float((np.expm1(d) - d).mean()))


def mean_at_k(passes: Sequence[Sequence[float]]) -> float:
    """Mean over tasks of passes / attempts. Raises ValueError without tasks, or if a task has no attempt."""
    return float(np.mean(_rates(passes)))


def pass_at_k(num_attempts: int, num_passed: int, k: int) -> float:
    """Unbiased chance that one of k attempts passes, 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1).

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= num_attempts and 0 <= num_passed <= num_attempts):
        raise ValueError(f"pass@{k} of {num_passed} in {num_attempts} is undefined")
    return 1.0 - math.comb(num_attempts - num_passed, k) / math.comb(num_attempts, k)


def mean_pass_at_k(passes: Sequence[Sequence[float]], k: int) -> float:
    """`pass_at_k` averaged over tasks. Raises ValueError without tasks, or if one has fewer than k attempts."""
    if not passes:
        raise ValueError("no task, no pass@k")
    return float(np.mean([pass_at_k(len(task), sum(map(bool, task)), k) for task in passes]))


def wilson_interval(num_passed: int, num_attempts: int, *, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion (Wilson 1927), honest at 0 and 1. For independent attempts, one per task.

    Raises ValueError unless 0 <= passed <= attempts and attempts >= 1.
    """
    if num_attempts < 1 or not 0 <= num_passed <= num_attempts:
        raise ValueError(f"{num_passed} of {num_attempts} is no proportion")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p, n = num_passed / num_attempts, num_attempts
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n passes one bound equals the estimate, up to rounding.
    return Interval(p, max(0.0, min(centre - half, p)), min(1.0, max(centre + half, p)))


def bootstrap_interval(
    passes: Sequence[Sequence[float]], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean@k with a percentile interval over resampled tasks: attempts of one task are not independent."""
    rates = _rates(passes)
    return _percentiles(rates, confidence, resamples, seed)


def paired_bootstrap_interval(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean@k of `after` minus that of `before` on the same tasks in the same order; tasks are resampled in pairs.

    Hard tasks are hard for both, so pairing takes their spread out. Raises ValueError if the numbers of tasks differ.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} tasks before, {len(after)} after: they must be the same")
    return _percentiles(_rates(after) - _rates(before), confidence, resamples, seed)


def sign_test(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """Two-sided exact p-value that tasks rise and fall alike; paired tasks in the same order, those of equal rates left out.

    1 if none differs. Raises ValueError if the numbers of tasks differ.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} tasks before, {len(after)} after: they must be the same")
    changes = _rates(after) - _rates(before) if before else np.zeros(0)
    rises, falls = int((changes > 0).sum()), int((changes < 0).sum())
    n, extreme = rises + falls, min(rises, falls)
    return min(1.0, 2.0 * sum(math.comb(n, i) for i in range(extreme + 1)) / 2**n)


def _rates(passes: Sequence[Sequence[float]]) -> np.ndarray:
    if not passes or not all(len(task) for task in passes):
        raise ValueError("every evaluation needs a task, and every task an attempt")
    return np.array([float(np.mean([bool(attempt) for attempt in task])) for task in passes])


def _percentiles(values: np.ndarray, confidence: float, resamples: int, seed: int) -> Interval:
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, 1_000_000 // len(values))  # a few MiB at a time
    for start in range(0, resamples, rows):
        picks = rng.integers(0, len(values), size=(min(rows, resamples - start), len(values)))
        means[start : start + len(picks)] = values[picks].mean(1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(values.mean()), float(low), float(high))


def ratio_interval(
    parts: Sequence[tuple[int, int]], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Pooled ratio sum(a) / sum(b) of `parts`, one (a, b) per task, 0 <= a <= b; None where every b is 0: it is undefined.

    With at most one attempt per task (b <= 1) Wilson's interval; otherwise percentiles over resampled tasks, those with b > 0.
    Where these all agree (a = 0, or a = b) resamples tell nothing, and it is Wilson's with one attempt per task; where there is but
    one of them, and it is divided, nothing is known of others: 0 to 1 (ours).
    """
    told = np.array([part for part in parts if part[1] > 0], float).reshape(-1, 2)
    if not len(told):
        return None
    a, b = (float(x) for x in told.sum(0))
    if told[:, 1].max() <= 1:
        return wilson_interval(int(a), int(b), confidence=confidence)
    if a in (0.0, b):
        return wilson_interval(len(told) if a else 0, len(told), confidence=confidence)
    if len(told) == 1:
        return Interval(a / b, 0.0, 1.0)
    sums = _resampled_sums(told, resamples, np.random.default_rng(seed))
    return Interval(a / b, *_bounds(sums[:, 0] / sums[:, 1], confidence))


def ratio_difference_interval(
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
    *,
    paired: bool = True,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval | None:
    """Pooled ratio of `after` minus that of `before`, with percentiles over resampled tasks; None where either is undefined.

    `paired`: the same tasks in the same order, resampled in pairs; else each side for itself. Resamples in which a ratio is
    undefined are left out. Where all agree, as two ratios of 0, they tell nothing: the sides' own intervals are combined (Newcombe
    1998, square and add), which is wide, for it knows no pairs. Raises ValueError if tasks to be paired differ in number.
    """
    if paired and len(before) != len(after):
        raise ValueError(f"{len(before)} tasks before, {len(after)} after: they must be the same")
    old, new = (np.array(side, float).reshape(-1, 2) for side in (before, after))
    totals = [side.sum(0) for side in (old, new)]
    if any(total[1] == 0 for total in totals):
        return None
    rng = np.random.default_rng(seed)
    if paired:
        sums = _resampled_sums(np.hstack([old, new]), resamples, rng)
    else:
        sums = np.hstack([_resampled_sums(side, resamples, rng) for side in (old, new)])
    sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]
    estimate = float(totals[1][0] / totals[1][1] - totals[0][0] / totals[0][1])
    changes = sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
    if len(changes) and np.ptp(changes) > 0:
        return Interval(estimate, *_bounds(changes, confidence))
    one, two = (ratio_interval(side, confidence=confidence, resamples=resamples, seed=seed) for side in (before, after))
    assert one is not None, "a total above 0 is a ratio"
    assert two is not None, "a total above 0 is a ratio"
    low = math.hypot(two.estimate - two.low, one.high - one.estimate)
    high = math.hypot(two.high - two.estimate, one.estimate - one.low)
    return Interval(estimate, max(-1.0, estimate - low), min(1.0, estimate + high))


def _resampled_sums(rows: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Column sums `[resamples, columns]` of as many rows `[N, columns]` drawn with replacement."""
    n, sums = len(rows), np.empty((resamples, rows.shape[1]))
    block = max(1, 1_000_000 // n)  # a few MiB at a time
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        sums[start : start + size] = rng.multinomial(n, np.full(n, 1 / n), size=size) @ rows
    return sums


def _bounds(values: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)
