"""From scored rollouts to samples with credit: rewards, values and turn ids in, advantages and critic targets out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from termrsi.algo import advantage, metrics
from termrsi.config.schema import CreditConfig
from termrsi.records import Sample, ScoredRollout


def samples_of(scored: ScoredRollout, temperature: float) -> list[Sample]:
    """One sample per chunk, with the sampler's log-probabilities laid on the tokens; `temperature`: the sampler's."""
    made = []
    for number, chunk in enumerate(scored.rollout.chunks):
        logprobs = iter(chunk.logprobs)
        on_tokens = tuple(next(logprobs) if m else 0.0 for m in chunk.mask)
        made.append(
            Sample(
                chunk.ids,
                chunk.mask,
                chunk.turn_ids,
                rollout_id=scored.rollout.id if len(scored.rollout.chunks) == 1 else f"{scored.rollout.id}#{number}",
                group_id=scored.rollout.group_id,
                sampler_logp=on_tokens,
                routing=chunk.routing,
                temperature=temperature,
            )
        )
    return made


def with_values(
    samples: Sequence[Sample], values: Sequence[Sequence[float]], rewards: Sequence[float], c: CreditConfig
) -> list[Sample]:
    """Advantages (lam) and critic targets (lam_critic) of single-chunk trajectories that ended; whitened over the batch.

    The whole reward stands on the last action token (T1). Targets come from unwhitened advantages.
    """
    made, raw, masks = [], [], []
    for sample, value, reward in zip(samples, values, rewards, strict=True):
        mask = np.asarray(sample.mask)
        booked = np.zeros(len(mask))
        if mask.any():
            booked[np.flatnonzero(mask)[-1]] = reward
        arrays = (booked, np.asarray(value), np.asarray(sample.turn_ids), mask)
        advantages, _ = advantage.turn_boundary_gae(*arrays, gamma=c.gamma, lam=c.lam, credit=c.credit.value)
        _, returns = advantage.turn_boundary_gae(*arrays, gamma=c.gamma, lam=c.lam_critic, credit=c.credit.value)
        raw.append(advantages)
        masks.append(mask)
        made.append(replace(sample, returns=tuple(returns.tolist()), old_values=tuple(float(v) for v in value)))
    final = advantage.whiten(raw, masks) if c.whiten else raw
    return [replace(s, advantages=tuple(float(x) for x in a)) for s, a in zip(made, final, strict=True)]


def with_contrast(samples: Sequence[Sample], rewards: Sequence[float]) -> list[Sample]:
    """The samples of groups in which rewards differ, advantages whitened anew over them.

    Of a task that always or never works a perfect critic would leave no advantage; what a poor one leaves is its own error.
    Tmax's active sampling (arXiv 2606.23321) does this for groups without a critic; for one with a critic it is ours.
    """
    seen: dict[str, set[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        seen.setdefault(sample.group_id, set()).add(reward)
    told = [s for s in samples if len(seen[s.group_id]) > 1]
    if not told:
        return []
    raw = [np.asarray(s.advantages) for s in told]
    return [
        replace(s, advantages=tuple(float(x) for x in a))
        for s, a in zip(told, advantage.whiten(raw, [np.asarray(s.mask) for s in told]), strict=True)
    ]


def explained(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Explained variance of the kept values against the targets: over action tokens, and over the first token of each turn."""
    values, returns, first = [], [], []
    for sample in samples:
        before = None
        for value, target, turn, mask in zip(sample.old_values, sample.returns, sample.turn_ids, sample.mask, strict=True):
            if mask:
                values.append(value)
                returns.append(target)
                first.append(turn != before)
                before = turn
    v, r, f = np.array(values), np.array(returns), np.array(first, bool)
    return metrics.explained_variance(v, r), metrics.explained_variance(v[f], r[f])


def group_advantages(samples: Sequence[Sample], rewards: Sequence[float]) -> list[Sample]:
    """Advantages of each group, constant over a rollout's action tokens (GRPO; population std, zero-variance groups give 0)."""
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(i)
    made = list(samples)
    for members in groups.values():
        for i, a in zip(members, advantage.group_relative(np.array([rewards[i] for i in members])), strict=True):
            made[i] = replace(samples[i], advantages=tuple(float(a) * m for m in samples[i].mask))
    return made
