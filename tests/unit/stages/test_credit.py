"""From scored rollouts to samples: one reward on the last action token, group advantages, explained variance."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from termrsi.config.choices import BootstrapAt, Chunks, Credit, LimitEnds, TokenSteps
from termrsi.config.stages import CreditConfig
from termrsi.records import Chunk, Rollout, Routing, Sample, ScoredRollout, StopReason, Turn, Verdict, WeightsVersion
from termrsi.stages import credit
from termrsi.stages.credit import Batch, Values
from termrsi.stages.sft import learning_rate


def _sample(group: str = "g", turns: int = 1, rollout: str = "r", first: int = 0) -> Sample:
    ids, mask, turn_ids = [9], [0], [first]
    for turn in range(first, first + turns):
        ids += [1, 2, 7]
        mask += [1, 1, 0]
        turn_ids += [turn] * 3
    return Sample(tuple(ids), tuple(mask), tuple(turn_ids), rollout_id=rollout, group_id=group)


def _batch(*samples: Sample, **rewards: float) -> Batch:
    return Batch(list(samples), rewards)


def _nothing(batch: Batch) -> Values:
    return Values([[0.0] * len(sample.ids) for sample in batch.samples])


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
    batch = _batch(_sample(turns=2), r=1.0)
    (made,) = credit.with_values(batch, _nothing(batch), config)
    assert made.returns == (0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    assert made.advantages == (0.0, 0.5, 0.5, 0.0, 1.0, 1.0, 0.0)


def test_whitening_is_over_the_batch_and_leaves_targets_alone() -> None:
    config = CreditConfig(gamma=1.0, lam=1.0)
    batch = _batch(_sample(rollout="a"), _sample(rollout="b"), a=1.0, b=0.0)
    made = credit.with_values(batch, _nothing(batch), config)
    assert [m.returns[1] for m in made] == [1.0, 0.0]
    assert [m.advantages[1] for m in made] == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("arm", [Credit.tb, Credit.skip])  # of `token` an observation is a step, which a cut takes away
def test_chunks_of_one_trajectory_are_one(arm: Credit) -> None:
    """A history that was rewritten between two turns changes no credit, and the reward is booked once."""
    config = CreditConfig(credit=arm, gamma=0.9, lam=0.5, lam_critic=0.7, whiten=False)
    draw = np.random.default_rng(0)
    whole = _sample(turns=4)
    values = [float(v) for v in draw.normal(size=len(whole.ids))]
    parts = [_sample(turns=1), _sample(turns=2, first=1), _sample(turns=1, first=3)]
    places = [i for i, m in enumerate(whole.mask) if m]
    at = iter(places)
    split = [[values[next(at)] if m else np.nan for m in part.mask] for part in parts]
    (uncut,) = credit.with_values(_batch(whole, r=0.8), Values([values]), config)
    made = credit.with_values(_batch(*parts, r=0.8), Values(split), config)
    for name in ("advantages", "returns"):
        expected = [getattr(uncut, name)[i] for i in places]
        found = [x for m in made for x, one in zip(getattr(m, name), m.mask, strict=True) if one]
        assert found == pytest.approx(expected, abs=1e-12)


def test_chunks_that_are_cut_end_with_the_next_ones_value() -> None:
    config = CreditConfig(gamma=0.5, lam=0.9, lam_critic=0.9, chunks=Chunks.cut, whiten=False)
    batch = _batch(_sample(turns=1), _sample(turns=1, first=1), r=1.0)
    first, second = credit.with_values(batch, Values([[0.0, 0.25, 0.5, 0.0], [0.0, 0.6, 0.1, 0.0]]), config)
    assert first.returns == pytest.approx((0.0, 0.3, 0.3, 0.0))  # gamma x 0.6
    assert first.advantages == pytest.approx((0.0, 0.05, -0.2, 0.0))
    assert second.returns == (0.0, 1.0, 1.0, 0.0)


def test_credit_may_link_to_the_next_turns_last_token() -> None:
    """lambda 0: the first turn's return is gamma times the value at the first, or the last, token of the second; cut or not."""
    batch = _batch(_sample(turns=2), r=1.0)
    values = Values([[0.0, 0.1, 0.2, 0.0, 0.6, 0.8, 0.0]])
    parts, split = _batch(_sample(turns=1), _sample(first=1), r=1.0), Values([[0.0, 0.1, 0.2, 0.0], [0.0, 0.6, 0.8, 0.0]])
    for at, wanted in ((BootstrapAt.first, 0.3), (BootstrapAt.last, 0.4)):
        config = CreditConfig(gamma=0.5, lam=0.0, lam_critic=0.0, bootstrap_at=at, whiten=False)
        (made,) = credit.with_values(batch, values, config)
        assert made.returns == pytest.approx((0.0, wanted, wanted, 0.0, 1.0, 1.0, 0.0))
        first, _ = credit.with_values(parts, split, config)
        assert first.returns == pytest.approx((0.0, wanted, wanted, 0.0))


def test_a_refit_is_to_whole_returns_of_rollouts_that_ended() -> None:
    """Values 0.2 and 0.6 against returns 0 and 1: a = 2.5, b = -0.5; what was cut short, and lambda, have no part in it."""
    samples = [_sample(rollout="a"), _sample(rollout="b"), _sample(rollout="c")]
    batch = replace(_batch(*samples, a=0.0, b=1.0, c=1.0), cut=frozenset({"c"}))
    values = Values([[0.0, v, v, 0.0] for v in (0.2, 0.6, 5.0)], {"c": 3.0})
    config = CreditConfig(lam_critic=0.0, limit_ends=LimitEnds.truncate)
    assert credit.refit(batch, values, config) == (pytest.approx(2.5), pytest.approx(-0.5))
    assert credit.refit(replace(batch, cut=frozenset("abc")), values, config) == (1.0, 0.0)


def test_length_costs_by_the_action_tokens_of_all_chunks() -> None:
    """Two tokens a turn: 2, 4 and, in two chunks, 6; free up to 3, and 1 at 5 and beyond."""
    samples = [_sample(rollout="a"), _sample(turns=2, rollout="b"), _sample(turns=2, rollout="c"), _sample(rollout="c", first=2)]
    assert credit.overlong(_batch(*samples, a=1.0, b=1.0, c=1.0), longest=5, cache=2) == {"a": 0.0, "b": -0.5, "c": -1.0}


class _Critic:
    """Says how many tokens stand before each action token, in tenths."""

    async def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [[0.1 * i * m for i, m in enumerate(sample.mask)] for sample in samples]

    async def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> object:
        raise NotImplementedError

    async def publish(self) -> WeightsVersion:
        raise NotImplementedError

    async def pull(self, weights: WeightsVersion) -> None: ...

    async def save(self, directory: str) -> str:
        raise NotImplementedError

    async def load(self, directory: str) -> str:
        raise NotImplementedError

    async def checksum(self) -> str:
        raise NotImplementedError


async def test_a_rollout_that_met_a_limit_may_be_valued_beyond_it() -> None:
    """What stands behind its last observation is asked for; its reward is not booked."""
    batch = replace(_batch(_sample(rollout="a"), _sample(rollout="b"), a=1.0, b=0.25), cut=frozenset({"b"}))
    values = await credit.valued(_Critic(), batch)  # pyright: ignore[reportArgumentType]: of values alone
    assert values.behind == {"b": pytest.approx(0.4)}
    assert [len(v) for v in values.of] == [4, 4]
    config = CreditConfig(gamma=0.5, lam=1.0, lam_critic=1.0, whiten=False, limit_ends=LimitEnds.truncate)
    ended, cut = credit.with_values(batch, values, config)
    assert ended.returns == (0.0, 1.0, 1.0, 0.0)
    assert cut.returns == pytest.approx((0.0, 0.2, 0.2, 0.0))


@pytest.mark.parametrize(("ends", "cut"), [(LimitEnds.terminal, set()), (LimitEnds.truncate, {"turn_limit", "time_limit"})])
def test_which_ends_are_none(ends: LimitEnds, cut: set[str]) -> None:
    class Plain:
        def reward(self, scored: ScoredRollout) -> float:
            return scored.verdict.reward

    chunk = Chunk((5, 6), (0, 1), (0, 0), (-0.5,))
    scored = [
        ScoredRollout(Rollout(stop.value, "g", "t", "f", "react", (chunk, chunk), (), stop), Verdict(False, 0.5))
        for stop in (StopReason.done, StopReason.turn_limit, StopReason.time_limit, StopReason.format_errors)
    ]
    batch = credit.batch_of(scored, Plain(), 1.0, CreditConfig(limit_ends=ends))  # pyright: ignore[reportArgumentType]: of reward alone
    assert batch.cut == cut
    assert batch.rewards == dict.fromkeys(("done", "turn_limit", "time_limit", "format_errors"), 0.5)
    assert [sample.rollout_id for sample in batch.samples[:3]] == ["done", "done", "turn_limit"]


@pytest.mark.parametrize(("arm", "steps"), [(Credit.skip, 4), (Credit.token, 5)])
def test_lambda_follows_the_steps_of_each_arm(arm: Credit, steps: int) -> None:
    """Two turns of two tokens, with one of an observation between them."""
    batch = _batch(_sample(turns=2), r=1.0)
    by_length = credit.with_values(batch, _nothing(batch), CreditConfig(credit=arm, lam_alpha=1.0, whiten=False))
    fixed = credit.with_values(batch, _nothing(batch), CreditConfig(credit=arm, lam=1 - 1 / steps, whiten=False))
    assert by_length[0].advantages == fixed[0].advantages


def test_lambda_may_follow_the_number_of_turns() -> None:
    """alpha 0.5 over 4 turns: 1 - 1 / 2."""
    batch = _batch(_sample(turns=2), _sample(turns=2, first=2), r=1.0)
    by_length = credit.with_values(batch, _nothing(batch), CreditConfig(lam=0.0, lam_alpha=0.5, whiten=False))
    fixed = credit.with_values(batch, _nothing(batch), CreditConfig(lam=0.5, whiten=False))
    assert [m.advantages for m in by_length] == [m.advantages for m in fixed]
    assert by_length[0].advantages[1] == 0.125


def test_steps_of_the_token_arm() -> None:
    batch = _batch(_sample(turns=2), r=1.0)
    made = {
        steps: credit.with_values(
            batch, _nothing(batch), CreditConfig(credit=Credit.token, token_steps=steps, lam=0.5, whiten=False)
        )[0].advantages[1]
        for steps in TokenSteps
    }
    assert made == {TokenSteps.all: 0.5**4, TokenSteps.action: 0.5**3}


def test_group_advantages_are_relative_to_their_own_group() -> None:
    samples = [_sample("a", rollout="1"), _sample("a", rollout="2"), _sample("b", rollout="3"), _sample("b", rollout="4")]
    made = credit.group_advantages(Batch(samples, {"1": 1.0, "2": 0.0, "3": 1.0, "4": 1.0}))
    assert [m.advantages[1] for m in made] == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    assert all(m.advantages[0] == 0.0 for m in made)


def test_a_rollout_of_many_chunks_counts_once_in_its_group() -> None:
    samples = [_sample(rollout="1"), _sample(rollout="1", first=1), _sample(rollout="1", first=2), _sample(rollout="2")]
    made = credit.group_advantages(Batch(samples, {"1": 1.0, "2": 0.0}), normalise=False)
    assert [m.advantages[1] for m in made] == [0.5, 0.5, 0.5, -0.5]


def test_a_repeated_turn_is_charged_after_normalisation() -> None:
    turns = (Turn("", "ls", "a b c"), Turn("", "ls", "a b c"), Turn("", "ls", "something else"))
    rollout = Rollout("1", "g", "t", "f", "react", (), turns, StopReason.done)
    penalty = credit.repetition(rollout, threshold=0.8, penalty=0.05)
    assert penalty == [0.0, -0.05, 0.0]
    samples = [_sample(turns=3, rollout="1"), _sample(turns=1, rollout="2")]
    made = credit.group_advantages(Batch(samples, {"1": 1.0, "2": 1.0}), penalties={"1": penalty})
    assert made[0].advantages == (0.0, 0.0, 0.0, 0.0, -0.05, -0.05, 0.0, 0.0, 0.0, 0.0)
    assert set(made[1].advantages) == {0.0}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_minibatches_hold_each_sample_once_and_rollouts_whole(count: int) -> None:
    samples = [_sample(rollout=f"{i % 5}", first=i) for i in range(12)]
    parts = credit.minibatches(samples, count, "seed")
    assert sorted(sample.turn_ids[0] for part in parts for sample in part) == list(range(12))
    assert len(parts) == min(count, 5)
    owners = [{sample.rollout_id for sample in part} for part in parts]
    assert sum(map(len, owners)) == 5
    assert credit.minibatches(samples, count, "seed") == parts


def test_minibatches_of_whole_prompts() -> None:
    samples = [_sample(f"g{i % 3}", rollout=f"{i // 2}/{i % 3}", first=i) for i in range(12)]
    parts = credit.minibatches(samples, 2, "seed", whole_prompts=True)
    assert sorted(sample.turn_ids[0] for part in parts for sample in part) == list(range(12))
    assert sorted(len({sample.group_id for sample in part}) for part in parts) == [1, 2]
    assert len(credit.minibatches([_sample("", rollout="a"), _sample("", rollout="b")], 2, "seed", whole_prompts=True)) == 2


def test_equal_targets_leave_explained_variance_undefined() -> None:
    batch = _batch(_sample(rollout="a"), _sample(rollout="b"), a=1.0, b=1.0)
    assert credit.explained(batch, _nothing(batch), CreditConfig()) == (None, None)


def test_explained_variance_is_of_the_whole_return() -> None:
    """Not of the critic's own targets, which at lambda 0 hold its next value."""
    batch = _batch(_sample(turns=2, rollout="a"), _sample(turns=2, rollout="b"), a=1.0, b=0.0)
    values = Values([[0.0, 0.5, 0.5, 0.0, 0.9, 0.9, 0.0], [0.0, 0.5, 0.5, 0.0, 0.1, 0.1, 0.0]])
    found = {lam: credit.explained(batch, values, CreditConfig(lam_critic=lam)) for lam in (0.0, 1.0)}
    assert found[0.0] == found[1.0]
    residual = np.array([0.5, 0.1, -0.5, -0.1])
    assert found[1.0][1] == pytest.approx(1.0 - np.var(residual) / np.var([1.0, 1.0, 0.0, 0.0]))


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(step, 10, 1.0, 0.2) for step in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 9)
