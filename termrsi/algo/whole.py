"""What a loss takes from the whole batch of an update, because no part of it can tell: from a forward pass, before it is split.

Counts, lengths of rollouts, divergences of prompts, a quantile. Lists of samples in, numbers out; numpy, no torch.
"""

from collections.abc import Sequence

import numpy as np

from termrsi.records import Sample

MAX_LOG_RATIO = 20.0  # as in the losses


def rollout_tokens(samples: Sequence[Sample]) -> list[int]:
    """For each sample, the action tokens of its whole rollout. A sample without `rollout_id` is a rollout of its own."""
    keys = _rollouts(samples)
    totals: dict[str, int] = {}
    for key, sample in zip(keys, samples, strict=True):
        totals[key] = totals.get(key, 0) + sum(sample.mask)
    return [totals[key] for key in keys]


def count_rollouts(samples: Sequence[Sample]) -> int:
    """Distinct rollouts with at least one action token: the denominator of the rollout-mean losses."""
    return len({key for key, sample in zip(_rollouts(samples), samples, strict=True) if any(sample.mask)})


def prompt_tv(samples: Sequence[Sample], logp: Sequence[Sequence[float]]) -> list[float]:
    """For each sample, the divergence of its prompt: the mean over its rollouts of the mean over action tokens of |r - 1| / 2.

    r = exp(logp - sampler_logp), and `logp` of the present weights, one list per sample. A prompt is a `group_id`; without one a
    rollout is a prompt of its own. A rollout of several samples counts once, one without action tokens not at all.
    """
    rollouts = _rollouts(samples)
    groups = [sample.group_id or key for sample, key in zip(samples, rollouts, strict=True)]
    sums: dict[tuple[str, str], list[float]] = {}
    for group, rollout, d in zip(groups, rollouts, _log_ratios(samples, logp), strict=True):
        if len(d):
            total = sums.setdefault((group, rollout), [0.0, 0.0])
            total[0] += float(np.abs(np.expm1(np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))).sum()) / 2
            total[1] += len(d)
    of_group: dict[str, list[float]] = {}
    for (group, _), (total, count) in sums.items():
        of_group.setdefault(group, []).append(total / count)
    return [float(np.mean(of_group[group])) if group in of_group else 0.0 for group in groups]


def log_ratio_bound(
    samples: Sequence[Sample], logp: Sequence[Sequence[float]], quantile: float, *, of_sequences: bool = False
) -> float:
    """The least value that at least that share of |log ratio to the sampler| over all action tokens does not exceed; 0 of none.

    `of_sequences`: each token has its sample's mean (`gspo`).
    """
    found = [np.full(len(d), d.mean()) if of_sequences and len(d) else d for d in _log_ratios(samples, logp)]
    return quantile_of(np.concatenate(found or [np.zeros(0)]), quantile)


def quantile_of(log_ratios: np.ndarray, quantile: float) -> float:
    """Of the absolute values `[K]`: the empirical quantile, one of them; 0 of none."""
    return float(np.quantile(np.abs(log_ratios), quantile, method="inverted_cdf")) if len(log_ratios) else 0.0


def _log_ratios(samples: Sequence[Sample], logp: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """log pi - log mu of each sample's action tokens. Raises ValueError if a sample lacks the sampler's log-probabilities."""
    for s in samples:
        if any(s.mask) and len(s.sampler_logp) != len(s.ids):
            raise ValueError(
                f"{s.rollout_id or 'a sample'}: sampler_logp holds {len(s.sampler_logp)} entries, {len(s.ids)} are needed"
            )
    return [
        np.asarray(now, np.float64)[on] - np.asarray(s.sampler_logp, np.float64)[on]
        for s, now in zip(samples, logp, strict=True)
        for on in [np.flatnonzero(s.mask)]
    ]


def _rollouts(samples: Sequence[Sample]) -> list[str]:
    return [sample.rollout_id or f"\0{i}" for i, sample in enumerate(samples)]
