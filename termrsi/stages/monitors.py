"""What a training step is watched by beside its losses: how its episodes ended, what each family earned, where credit varies.

The quantities are those that Terminal-RSI (arXiv 2610.22192, Fig. 11, Table 5) shows or plans to, the definitions ours. What a
batch does not define (no failure, a family without a report, fewer than two tokens so far from the end) has no key.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from termrsi.records import Sample, ScoredRollout, StopReason
from termrsi.stages.base import Context

Reward = Callable[[ScoredRollout], float]

TURNS_LEFT = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8-15": 8, "16+": 16}  # the least number of turns of each bucket


def batch(
    ctx: Context, scored: Sequence[ScoredRollout], samples: Sequence[Sample], reward: Reward, *, asked: int
) -> dict[str, float]:
    """All figures of one step; `samples`: those that the learner takes, with their advantages. See `rollouts` for the rest."""
    return rollouts(ctx, scored, reward, asked=asked) | advantage_variance(scored, samples)


def rollouts(ctx: Context, scored: Sequence[ScoredRollout], reward: Reward, *, asked: int) -> dict[str, float]:
    """What the rollouts of one step tell by themselves; `asked`: the episodes that were to be run for it."""
    known = {task_id: len(task.checks) for task_id, task in ctx.checks.items()}
    return (
        ends(scored, asked=asked)
        | early_failures(scored, max_turns=ctx.limits().max_turns)
        | families(scored, [reward(s) for s in scored], known)
        | versions(scored)
    )


def ends(scored: Sequence[ScoredRollout], *, asked: int) -> dict[str, float]:
    """`stop/<reason>` of each reason, and `stop/dropped`: shares of the `asked` episodes, 1 together.

    Dropped are those that the machine lost. A group that it lost whole was replaced: neither was asked for by this step.
    """
    if asked < 1:
        return {}
    counts = Counter(s.rollout.stop for s in scored)
    shares = {f"stop/{reason.value}": counts[reason] / asked for reason in StopReason}
    return shares | {"stop/dropped": (asked - len(scored)) / asked}


def early_failures(scored: Sequence[ScoredRollout], *, max_turns: int) -> dict[str, float]:
    """Of the rollouts without strict success, the shares that ended within the first quarter of `max_turns`.

    `early_failure`: something ended them (context, time, format, a spoiled sandbox). `early_submission`: they said that they
    were done; apart, because the fault is another, and because a short task is rightly done by then. Shares of failures, since
    those of all rollouts fall by success alone. The turns of a task of several steps are counted together.
    """
    failed = [s.rollout for s in scored if not s.verdict.strict]
    if not failed:
        return {}
    early = [rollout.stop for rollout in failed if 4 * len(rollout.turns) <= max_turns]
    submitted = early.count(StopReason.done)
    return {"early_failure": (len(early) - submitted) / len(failed), "early_submission": submitted / len(failed)}


def families(scored: Sequence[ScoredRollout], rewards: Sequence[float], known: Mapping[str, int]) -> dict[str, float]:
    """`reward/<family>`: mean shaped reward. `checks/<family>`: checks passed over all checks, pooled over the rollouts.

    `known`: how many checks a task has. Those that a report lacks (tests that broke off, a spoiled sandbox without any) count
    as not passed. A success without a report is not counted: what it passed was not told.
    """
    earned: dict[str, list[float]] = {}
    passed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for s, reward in zip(scored, rewards, strict=True):
        family, verdict = s.rollout.family, s.verdict
        earned.setdefault(family, []).append(reward)
        told = len(verdict.passed) + len(verdict.failed) + len(verdict.skipped)
        if told or not verdict.strict:
            passed[family] += len(verdict.passed)
            total[family] += max(told, known.get(s.rollout.task_id, 0))
    means = {f"reward/{family}": sum(values) / len(values) for family, values in sorted(earned.items())}
    return means | {f"checks/{family}": passed[family] / count for family, count in sorted(total.items()) if count}


def versions(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """`versions/behind`: how many weights versions a sampled token is behind the newest that sampled one here, mean over tokens.
    `versions/mixed`: the share of turns that more than one version sampled. Of turns whose versions are known."""
    turns = [turn.weights for s in scored for turn in s.rollout.turns if turn.weights]
    if not turns:
        return {}
    spans = [span for turn in turns for span in turn]
    newest, tokens = max(version for version, _ in spans), sum(count for _, count in spans)
    behind = sum((newest - version) * count for version, count in spans)
    return {"versions/behind": behind / tokens, "versions/mixed": sum(len(turn) > 1 for turn in turns) / len(turns)}


def advantage_variance(scored: Sequence[ScoredRollout], samples: Sequence[Sample]) -> dict[str, float]:
    """`advantage_var/turns_left_<bucket>`: population variance over the action tokens so many turns before the last one.

    Of the advantages as they stand in `samples`, whitened where the stage does that. Only turns with an action token count, as in
    the credit itself; those of all chunks of a rollout, of which `samples` may hold a part. One token has no variance.
    Raises KeyError for a sample of none of the rollouts.
    """
    turns = {s.rollout.id: _turns(s) for s in scored}
    found: list[list[np.ndarray]] = [[] for _ in TURNS_LEFT]
    for sample in samples:
        of_rollout = turns[sample.rollout_id]
        on = np.asarray(sample.mask, bool)
        left = len(of_rollout) - 1 - np.searchsorted(of_rollout, np.asarray(sample.turn_ids)[on])
        bucket = np.searchsorted(list(TURNS_LEFT.values()), left, side="right") - 1
        advantages = np.asarray(sample.advantages, np.float64)[on]
        for place, tokens in enumerate(found):
            tokens.append(advantages[bucket == place])
    pooled = {name: np.concatenate(tokens) for name, tokens in zip(TURNS_LEFT, found, strict=True) if tokens}
    return {f"advantage_var/turns_left_{name}": float(values.var()) for name, values in pooled.items() if len(values) > 1}


def _turns(scored: ScoredRollout) -> np.ndarray:
    """The numbers of its turns with action tokens, in order."""
    return np.unique([turn for chunk in scored.rollout.chunks for turn, m in zip(chunk.turn_ids, chunk.mask, strict=True) if m])
