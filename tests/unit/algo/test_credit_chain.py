"""The parts of the credit experiment, against slower forms and against what may not differ."""

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from termrsi.algo.advantage import Credit, turn_boundary_gae, whiten
from tests.bench import credit_chain
from tests.bench.credit_chain import ARMS, LAM, Chain, Critic, Layout, Learner, Row, Signal, Updates

SVG = "{http://www.w3.org/2000/svg}"


def learner(critic: Critic, layout: Layout, seeds: int) -> Learner:
    """Any policy and any values, not those of the start."""
    rng = np.random.default_rng(5)
    shape = seeds, layout.luck.shape[1]
    return Learner(critic, "skip", rng.normal(size=shape), rng.random((*shape, 2)))


def rows() -> list[Row]:
    """Two horizons; at the second nothing but "tb" learns without sight of the choice."""
    found = []
    for turns in (2, 20):
        for critic in credit_chain.CRITICS:
            late = turns == 20 and critic == "blind"
            updates = dict.fromkeys(ARMS, Updates(20.0, 15.0, 30.0))
            if late:
                updates["skip"] = updates["token"] = Updates(math.inf, math.inf, math.inf)
            found.append(Row(f"lambda {LAM}", critic, turns, dict.fromkeys(ARMS, Signal(0.5, 5.0)), updates))
    return found


def test_a_layout_holds_every_turn_once_and_in_order() -> None:
    layout = credit_chain.lay(np.random.default_rng(0), Chain(5, 4, 3), 200)
    for ids, mask, starts, last in zip(layout.turn_ids, layout.mask, layout.starts, layout.last, strict=True):
        at = np.flatnonzero(mask)
        assert last == at[-1]
        assert starts.tolist() == [at[ids[at] == turn][0] for turn in range(5)]
        assert (np.diff(ids[: last + 1]) >= 0).all()
    counts = [np.bincount(ids[mask], minlength=5) for ids, mask in zip(layout.turn_ids, layout.mask, strict=True)]
    assert (np.min(counts), np.max(counts)) == (1, 4)
    seen = layout.last + 1 - layout.mask.sum(axis=1)
    assert 0 <= seen.min() < seen.max() <= 4 * 3


@pytest.mark.parametrize(("chain", "lam"), [(Chain(6, 1, 0), LAM), (Chain(6), 1.0)], ids=["one token per turn", "lambda 1"])
def test_where_the_arms_may_not_differ_they_learn_the_same(chain: Chain, lam: float) -> None:
    learners = credit_chain.learn(chain, lam=lam, seeds=3, limit=40)
    for critic in credit_chain.CRITICS:
        first, *others = (one for one in learners if one.critic == critic)
        assert np.isfinite(first.reached).all()
        for other in others:
            assert other.reached.tolist() == first.reached.tolist()
            np.testing.assert_allclose(other.logit, first.logit, rtol=0, atol=1e-9)
            np.testing.assert_allclose(other.table, first.table, rtol=0, atol=1e-9)
        signals = [credit_chain.signal(chain, critic, arm, lam=lam, rollouts=200) for arm in ARMS]
        assert {round(found.to_noise, 9) for found in signals} == {round(signals[0].to_noise, 9)}


def test_a_blind_critic_tells_the_arms_apart() -> None:
    blind = {one.arm: one.reached for one in credit_chain.learn(Chain(6), seeds=3, limit=100) if one.critic == "blind"}
    assert blind["tb"].max() < blind["skip"].min() <= blind["skip"].max() < blind["token"].min()


@pytest.mark.parametrize("turns", [2, 7, 30])
def test_the_signal_per_turn_depends_on_the_number_of_turns_only(turns: int) -> None:
    for chain in (Chain(turns, 1, 0), Chain(turns), Chain(turns, 40, 5)):
        found = credit_chain.signal(chain, "blind", "tb", value_error=0.0, rollouts=100)
        assert found.size == pytest.approx(LAM ** (turns - 1), rel=1e-12)
    short, long = (credit_chain.signal(Chain(turns, n), "blind", "skip", value_error=0.0, rollouts=100) for n in (4, 40))
    assert long.size < short.size / 2


def test_the_other_arms_decay_by_the_tokens_between() -> None:
    layout = credit_chain.lay(np.random.default_rng(3), Chain(4), 50, value_error=0.0)
    rewards = (layout.luck[:, 0] < 0.5).astype(float)
    known = np.full((50, 4), 0.5)
    tokens: dict[Credit, np.ndarray] = {"skip": layout.mask.sum(axis=1) - 1, "token": layout.last}
    for arm, between in tokens.items():
        found = credit_chain.advantages(layout, known, rewards, arm, LAM)[:, 0]
        np.testing.assert_allclose(found, LAM**between * (rewards - 0.5), rtol=0, atol=1e-12)


def test_with_a_critic_that_sees_the_choice_no_arm_fades_with_turns() -> None:
    for arm in ARMS:
        few, many = (credit_chain.signal(Chain(turns), "seeing", arm, value_error=0.0, rollouts=4000) for turns in (2, 30))
        assert many.size == pytest.approx(few.size, rel=0.02)


@pytest.mark.parametrize("critic", credit_chain.CRITICS)
def test_an_update_is_the_policy_gradient_and_the_mean_reward(critic: Critic) -> None:
    seeds, batch, turns = 2, 6, 3
    layout = credit_chain.lay(np.random.default_rng(1), Chain(turns), seeds * batch)
    one = learner(critic, layout, seeds)
    logit, table = one.logit.copy(), one.table.copy()
    credit_chain.update(one, layout, LAM)
    for s in range(seeds):
        p = 1 / (1 + np.exp(-logit[s]))
        raw, masks, chosen, places, visits = [], [], [], [], {}
        for r in range(s * batch, (s + 1) * batch):
            choice = layout.luck[r] < p
            known = [table[s, u, int(choice[0]) if critic == "seeing" and u > 0 else 0] for u in range(turns)]
            values = np.array(known)[layout.turn_ids[r]] + layout.error[r]
            rewards = np.zeros(len(values))
            rewards[layout.last[r]] = choice[0]
            a, _ = turn_boundary_gae(rewards, values, layout.turn_ids[r], layout.mask[r], gamma=1.0, lam=LAM, credit="skip")
            raw.append(a)
            masks.append(layout.mask[r])
            chosen.append(choice)
            places.append(layout.starts[r])
            for u in range(turns):
                visits.setdefault((u, int(choice[0]) if critic == "seeing" and u > 0 else 0), []).append(choice[0])
        gradient = sum(a[at] * (c - p) for a, c, at in zip(whiten(raw, masks), chosen, places, strict=True)) / batch
        np.testing.assert_allclose(one.logit[s], logit[s] + credit_chain.POLICY_LR * gradient, rtol=0, atol=1e-12)
        for cell in np.ndindex(turns, 2):
            old = table[s][cell]
            want = old + credit_chain.CRITIC_LR * (np.mean(visits[cell]) - old) if cell in visits else old
            assert one.table[s][cell] == pytest.approx(want, abs=1e-12)


def test_a_second_run_is_the_same_to_the_bit() -> None:
    first, second = (credit_chain.learn(Chain(4), seeds=2, limit=10) for _ in range(2))
    assert all((a.logit == b.logit).all() and (a.table == b.table).all() for a, b in zip(first, second, strict=True))


def test_over_seeds_a_limit_not_reached_is_larger_than_any_number() -> None:
    assert credit_chain.over_seeds(np.full(9, 7.0)) == Updates(7.0, 7.0, 7.0)
    assert credit_chain.over_seeds(np.array([5.0] + [math.inf] * 8)) == Updates(math.inf, math.inf, math.inf)
    mixed = credit_chain.over_seeds(np.array([1.0, 2.0, 3.0, math.inf, math.inf]))
    assert (mixed.median, mixed.low, mixed.high) == (3.0, 1.0, math.inf)
    assert ">9" in credit_chain.table([Row("a", "blind", 2, dict.fromkeys(ARMS, Signal(0, 0)), dict.fromkeys(ARMS, mixed))], 9)


def states_its_axes(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    said = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert said.count("horizon (turns, log scale)") == 2
    assert {"signal / noise at the decisive turn", "updates to 90 % success (log scale)"} < set(said)
    assert "prefers-color-scheme: dark" in svg
    assert len(svg) < 30_000
    return root


def test_the_figure_is_well_formed_and_states_its_axes() -> None:
    root = states_its_axes(credit_chain.figure(rows()))
    marks = [shape for shape in root.iter() if "dot" in shape.get("class", "")]
    assert len(marks) == 3 + 6 + 4  # legend; signals; updates, but for two
    assert len([shape for shape in root.iter() if "open" in shape.get("class", "")]) == 1 + 2
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx", "0")) < credit_chain.WIDTH
        assert 0 < float(circle.get("cy", "0")) < credit_chain.BASE


def test_the_figure_of_the_readme_is_one_of_these() -> None:
    root = states_its_axes(Path(credit_chain.__file__).with_suffix(".svg").read_text())
    ticks = {text.text for text in root.iter(f"{SVG}text")}
    assert {str(turns) for turns in credit_chain.HORIZONS} < ticks
