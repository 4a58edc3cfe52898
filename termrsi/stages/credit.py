"""From scored rollouts to samples with credit: rewards, values and turn ids in, advantages and critic targets out.

A rollout gives one sample for each of its chunks, all with its id and in their order; what is about the rollout as a whole
(reward, standing in its group, number of turns) is taken once.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from termrsi.algo import advantage, metrics
from termrsi.algo.chunks import ChunkInput, turn_boundary_gae_chunks
from termrsi.config.choices import Chunks, Credit, LimitEnds, TokenSteps
from termrsi.config.stages import CreditConfig
from termrsi.errors import StageError
from termrsi.ports import Critic
from termrsi.records import Rollout, Sample, ScoredRollout, StopReason
from termrsi.stages.base import Rewarder

LIMITS = frozenset({StopReason.turn_limit, StopReason.context_limit, StopReason.time_limit})


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of some rollouts, and what each rollout earned, by its id. `cut`: those whose end is taken for none."""

    samples: list[Sample]
    rewards: dict[str, float]
    cut: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Values:
    """What the critic says before each action token, one list per sample, and behind the last token of rollouts cut short."""

    of: list[list[float]]
    behind: dict[str, float] = field(default_factory=dict)


def batch_of(scored: Sequence[ScoredRollout], rewarder: Rewarder, temperature: float, c: CreditConfig | None = None) -> Batch:
    """`temperature`: the sampler's. Without a configuration of credit every end is one."""
    ends = c.limit_ends if c else LimitEnds.terminal
    cut = {s.rollout.id for s in scored if s.rollout.stop in LIMITS} if ends is LimitEnds.truncate else set()
    samples = [sample for s in scored for sample in samples_of(s, temperature)]
    return Batch(samples, {s.rollout.id: rewarder.reward(s) for s in scored}, frozenset(cut))


def samples_of(scored: ScoredRollout, temperature: float) -> list[Sample]:
    """One sample per chunk, with the sampler's log-probabilities laid on the tokens; `temperature`: the sampler's.

    Raises StageError if they are not known, as of a model behind an endpoint: cross-entropy is all that can be trained on it.
    """
    made = []
    for chunk in scored.rollout.chunks:
        if len(chunk.logprobs) != sum(chunk.mask):
            who = scored.rollout.model or "its sampler"
            what = f"{who} told no log-probabilities: only cross-entropy can learn from it"
            raise StageError(what, scored.rollout.id, "valid: sft")
        logprobs = iter(chunk.logprobs)
        on_tokens = tuple(next(logprobs) if m else 0.0 for m in chunk.mask)
        made.append(
            Sample(
                chunk.ids,
                chunk.mask,
                chunk.turn_ids,
                rollout_id=scored.rollout.id,
                group_id=scored.rollout.group_id,
                sampler_logp=on_tokens,
                routing=chunk.routing,
                temperature=temperature,
            )
        )
    return made


async def valued(critic: Critic, batch: Batch) -> Values:
    """The critic's present values. What follows a rollout's last token is asked for as the prefix of one more."""
    last = {members[-1]: rollout for rollout, members in _members(batch.samples).items() if rollout in batch.cut}
    asked = [_one_more(sample) if i in last else sample for i, sample in enumerate(batch.samples)]
    found = await critic.values(asked)
    behind = {rollout: float(found[i][-1]) for i, rollout in last.items()}
    return Values([values[: len(sample.ids)] for values, sample in zip(found, batch.samples, strict=True)], behind)


def with_values(batch: Batch, values: Values, c: CreditConfig) -> list[Sample]:
    """Advantages (lam) and critic targets (lam_critic), chunks linked as `c.chunks` says; whitened over the batch.

    The whole reward stands on the last action token (T1). A rollout that is cut short has none: the value behind it stands in
    (ours). Targets come from unwhitened advantages.
    """
    made = list(batch.samples)
    raw = [np.zeros(len(sample.ids)) for sample in batch.samples]
    for rollout, members in _members(batch.samples).items():
        chunks = _booked([batch.samples[i] for i in members], [values.of[i] for i in members], batch, rollout)
        behind = values.behind.get(rollout)
        for i, chunk, (advantages, _), (_, returns) in zip(
            members, chunks, _credit(chunks, c, behind, actor=True), _credit(chunks, c, behind, actor=False), strict=True
        ):
            raw[i] = advantages
            made[i] = replace(made[i], returns=tuple(returns.tolist()), old_values=tuple(float(v) for v in chunk.values))
    final = advantage.whiten(raw, [np.asarray(sample.mask) for sample in made]) if c.whiten else raw
    return [replace(s, advantages=tuple(float(x) for x in a)) for s, a in zip(made, final, strict=True)]


def of_contrast(samples: Sequence[Sample], rewards: Mapping[str, float]) -> list[Sample]:
    """The samples of groups in which rewards differ."""
    seen: dict[str, set[float]] = {}
    for sample in samples:
        seen.setdefault(sample.group_id, set()).add(rewards[sample.rollout_id])
    return [s for s in samples if len(seen[s.group_id]) > 1]


def with_contrast(samples: Sequence[Sample], rewards: Mapping[str, float], c: CreditConfig) -> list[Sample]:
    """`of_contrast`; where advantages are whitened, anew over these alone.

    Of a task that always or never works a perfect critic would leave no advantage; what a poor one leaves is its own error.
    Tmax's active sampling (arXiv 2606.23321) does this for groups without a critic; for one with a critic it is ours.
    """
    told = of_contrast(samples, rewards)
    if not told or not c.whiten:
        return told
    raw = [np.asarray(s.advantages) for s in told]
    return [
        replace(s, advantages=tuple(float(x) for x in a))
        for s, a in zip(told, advantage.whiten(raw, [np.asarray(s.mask) for s in told]), strict=True)
    ]


def explained(batch: Batch, values: Values, c: CreditConfig) -> tuple[float | None, float | None]:
    """Explained variance of the values against the returns of lambda 1: over action tokens, and over each turn's first token.

    Targets of a smaller lambda hold the values themselves, and would flatter the critic.
    """
    v, r, f = _against_returns(with_values(batch, values, _whole_returns(c)))
    return metrics.explained_variance(v, r), metrics.explained_variance(v[f], r[f])


def refit(batch: Batch, values: Values, c: CreditConfig) -> tuple[float, float]:
    """(a, b) for which a V + b is nearest to the returns of lambda 1, by least squares over the action tokens (ours).

    For a critic whose rewards have another scale than those it learned. Smaller lambdas, and rollouts that are cut short, would
    bring values of the old scale into what is fitted to: they are left out. (1, 0) if nothing is left.
    """
    plain = [s for s in with_values(batch, values, _whole_returns(c)) if s.rollout_id not in batch.cut]
    kept, returns, _ = _against_returns(plain)
    return metrics.affine_fit(kept, returns)


def _whole_returns(c: CreditConfig) -> CreditConfig:
    return replace(c, lam_critic=1.0, lam_critic_alpha=0.0, whiten=False)


def _against_returns(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, returns and whether it is the first of its turn, of each action token `[K]`."""
    kept, returns, first = [], [], []
    for sample in samples:
        before = None
        for value, target, turn, mask in zip(sample.old_values, sample.returns, sample.turn_ids, sample.mask, strict=True):
            if mask:
                kept.append(value)
                returns.append(target)
                first.append(turn != before)
                before = turn
    return np.array(kept), np.array(returns), np.array(first, bool)


def overlong(batch: Batch, *, longest: int, cache: int) -> dict[str, float]:
    """DAPO's penalty of each rollout, by its id: of the action tokens of all its chunks (`advantage.overlong_penalty`)."""
    tokens = {rollout: sum(sum(batch.samples[i].mask) for i in members) for rollout, members in _members(batch.samples).items()}
    return {rollout: advantage.overlong_penalty(count, longest=longest, cache=cache) for rollout, count in tokens.items()}


def group_advantages(
    batch: Batch, *, normalise: bool = True, penalties: Mapping[str, Sequence[float]] | None = None
) -> list[Sample]:
    """Advantages of each group, constant over a rollout's action tokens (GRPO; population std, zero-variance groups give 0).

    `penalties`: of a rollout's turns, by its id; added after that, on the action tokens of the turn (River).
    """
    groups: dict[str, dict[str, None]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.group_id, {})[sample.rollout_id] = None
    of_rollout: dict[str, float] = {}
    for members in groups.values():
        rewards = np.array([batch.rewards[rollout] for rollout in members])
        relative = advantage.group_relative(rewards, normalise=normalise)
        of_rollout |= zip(members, (float(a) for a in relative), strict=True)
    made = []
    for sample in batch.samples:
        own = (penalties or {}).get(sample.rollout_id, ())
        extra = [own[turn] if turn < len(own) else 0.0 for turn in sample.turn_ids]
        base = of_rollout[sample.rollout_id]
        made.append(replace(sample, advantages=tuple((base + e) * m for e, m in zip(extra, sample.mask, strict=True))))
    return made


def repetition(rollout: Rollout, *, threshold: float, penalty: float) -> list[float]:
    """River's penalty of each turn (`advantage.repetition_penalty`)."""
    turns = rollout.turns
    said = [turn.command for turn in turns], [turn.observation for turn in turns]
    return advantage.repetition_penalty(*said, threshold=threshold, penalty=penalty)


def minibatches(samples: Sequence[Sample], count: int, seed: str, *, whole_prompts: bool = False) -> list[list[Sample]]:
    """The samples in up to `count` parts of about as many rollouts, shuffled; the chunks of one rollout stay together.

    `whole_prompts`: the rollouts of one prompt too, in parts of about as many prompts.
    """
    units = list(_members(samples, of_prompts=whole_prompts).values())
    random.Random(seed).shuffle(units)
    size = max(1, -(-len(units) // count))
    return [[samples[i] for members in units[at : at + size] for i in members] for at in range(0, len(units), size)]


def _members(samples: Iterable[Sample], *, of_prompts: bool = False) -> dict[str, list[int]]:
    """Places of each rollout's samples, or each prompt's, in their order. A sample without an id is one of its own."""
    found: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        own = sample.rollout_id or f"\0{i}"
        found.setdefault(sample.group_id or own if of_prompts else own, []).append(i)
    return found


def _booked(samples: Sequence[Sample], values: Sequence[Sequence[float]], batch: Batch, rollout: str) -> list[ChunkInput]:
    """One rollout's chunks with its reward on the last action token of all."""
    chunks = [
        ChunkInput(np.zeros(len(s.ids)), np.asarray(v, np.float64), np.asarray(s.turn_ids), np.asarray(s.mask))
        for s, v in zip(samples, values, strict=True)
    ]
    acting = [chunk for chunk in chunks if chunk.action_mask.any()]
    if acting and rollout not in batch.cut:
        acting[-1].rewards[np.flatnonzero(acting[-1].action_mask)[-1]] = batch.rewards[rollout]
    return chunks


def _credit(
    chunks: Sequence[ChunkInput], c: CreditConfig, behind: float | None, *, actor: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    alpha, lam = (c.lam_alpha, c.lam) if actor else (c.lam_critic_alpha, c.lam_critic)
    arm = "skip" if c.credit is Credit.token and c.token_steps is TokenSteps.action else c.credit.value
    if alpha > 0.0:
        lam = advantage.adaptive_lambda(_steps(chunks, arm), alpha)
    return turn_boundary_gae_chunks(
        chunks,
        gamma=c.gamma,
        lam=lam,
        credit=arm,
        linked=c.chunks is Chunks.link,
        truncated=behind is not None,
        bootstrap_value=behind or 0.0,
        bootstrap_at=c.bootstrap_at.value,
    )


def _steps(chunks: Sequence[ChunkInput], arm: str) -> int:
    """How many steps of an arm a trajectory has: turns, action tokens, or all positions from the first action to the last."""
    on = [np.flatnonzero(chunk.action_mask) for chunk in chunks]
    if arm == "tb":
        return len({int(turn) for chunk, at in zip(chunks, on, strict=True) for turn in np.asarray(chunk.turn_ids)[at]})
    return sum(len(at) if arm == "skip" else int(at[-1] - at[0]) + 1 for at in on if len(at))


def _one_more(sample: Sample) -> Sample:
    """With one action token more, whose value is that of the whole sample: what it is makes no difference."""
    return Sample(
        (*sample.ids, sample.ids[-1]),
        (*sample.mask, 1),
        (*sample.turn_ids, sample.turn_ids[-1]),
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        temperature=sample.temperature,
    )
