"""From scored rollouts to samples: one reward on the last action token, group advantages, explained variance."""

import pytest

from termrsi.config.schema import CreditConfig
from termrsi.records import Chunk, Rollout, Routing, Sample, ScoredRollout, StopReason, Verdict
from termrsi.stages import credit
from termrsi.stages.sft import learning_rate


def _sample(group: str = "g", turns: int = 1) -> Sample:
    ids, mask, turn_ids = [9], [0], [0]
    for turn in range(turns):
        ids += [1, 2, 7]
        mask += [1, 1, 0]
        turn_ids += [turn] * 3
    return Sample(tuple(ids), tuple(mask), tuple(turn_ids), group_id=group)


def test_sampler_logprobs_lie_on_the_sampled_tokens() -> None:
    routing = Routing(b"\0\1\2", 1, 1)
    chunk = Chunk((5, 6, 7, 8), (0, 1, 0, 1), (0, 0, 0, 1), (-0.5, -0.25), routing)
    rollout = Rollout("r", "g", "t", "f", "react", (chunk,), (), StopReason.done)
    (sample,) = credit.samples_of(ScoredRollout(rollout, Verdict(True, 1.0)), 0.5)
    assert sample.temperature == 0.5
    assert sample.sampler_logp == (0.0, -0.5, 0.0, -0.25)
    assert (sample.rollout_id, sample.group_id, sample.routing) == ("r", "g", routing)


def test_every_token_of_a_turn_shares_one_return() -> None:
    """gamma 1, lam_critic 1: the return of each action token is the reward; lam 0.5 halves what crosses a turn."""
    config = CreditConfig(gamma=1.0, lam=0.5, lam_critic=1.0, whiten=False)
    values = [0.0] * 7
    (made,) = credit.with_values([_sample(turns=2)], [values], [1.0], config)
    assert made.returns == (0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    assert made.advantages == (0.0, 0.5, 0.5, 0.0, 1.0, 1.0, 0.0)


def test_whitening_is_over_the_batch_and_leaves_targets_alone() -> None:
    config = CreditConfig(gamma=1.0, lam=1.0)
    made = credit.with_values([_sample(), _sample()], [[0.0] * 4] * 2, [1.0, 0.0], config)
    assert [m.returns[1] for m in made] == [1.0, 0.0]
    assert [m.advantages[1] for m in made] == pytest.approx([1.0, -1.0])


def test_group_advantages_are_relative_to_their_own_group() -> None:
    samples = [_sample("a"), _sample("a"), _sample("b"), _sample("b")]
    made = credit.group_advantages(samples, [1.0, 0.0, 1.0, 1.0])
    assert [m.advantages[1] for m in made] == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    assert all(m.advantages[0] == 0.0 for m in made)


def test_equal_targets_leave_explained_variance_undefined() -> None:
    made = credit.with_values([_sample(), _sample()], [[0.0] * 4] * 2, [1.0, 1.0], CreditConfig())
    assert credit.explained(made) == (None, None)


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(step, 10, 1.0, 0.2) for step in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 9)
