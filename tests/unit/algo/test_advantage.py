"""Turn-boundary GAE against its definition: the token loop, the turn form, and the invariants I1-I12."""

import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from array_api_compat import array_namespace
from hypothesis import given, settings
from hypothesis import strategies as st

from termrsi.algo.advantage import (
    BootstrapAt,
    Credit,
    _fill,
    adaptive_lambda,
    group_relative,
    overlong_penalty,
    repetition_penalty,
    turn_boundary_gae,
    turn_boundary_gae_batch,
    whiten,
    whiten_batch,
)
from termrsi.algo.chunks import ChunkInput, chunk_carry, turn_boundary_gae_chunks

ARMS: tuple[Credit, ...] = ("tb", "skip", "token")
LINKS: tuple[BootstrapAt, ...] = ("first", "last")


@dataclass
class Trajectory:
    rewards: np.ndarray
    values: np.ndarray
    turn_ids: np.ndarray
    mask: np.ndarray

    @property
    def args(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.rewards, self.values, self.turn_ids, self.mask


def loop(
    t: Trajectory,
    gamma: float,
    lam: float,
    credit: Credit = "tb",
    truncated: bool = False,
    boot: float = 0.0,
    at: BootstrapAt = "first",
):
    """The definition: a backward scan over the steps. `at` last: a link across turns reads the value at the next one's last token,
    and the trace is what the next turn's return has over that."""
    steps = np.flatnonzero(t.mask)
    if credit == "token" and len(steps):
        steps = np.arange(steps[0], steps[-1] + 1)
    advantages, returns = np.zeros(len(t.mask)), np.zeros(len(t.mask))
    next_value, next_advantage, next_turn = boot, 0.0, None
    linked = boot  # of the turn after: the value at its last token
    for k in steps[::-1]:
        if next_turn is None:
            g, trace = (gamma if truncated else 0.0), 0.0
        elif credit == "tb" and t.turn_ids[k] == next_turn:
            g, trace = 1.0, 1.0
        else:
            g, trace = gamma, lam
            if credit == "tb" and at == "last":
                next_value, next_advantage = linked, next_value + next_advantage - linked
        if next_turn is None or t.turn_ids[k] != next_turn:
            linked = t.values[k]
        after = g * next_value if g else 0.0
        next_advantage = t.rewards[k] + after - t.values[k] + g * trace * next_advantage
        next_value, next_turn = t.values[k], t.turn_ids[k]
        advantages[k], returns[k] = next_advantage, next_advantage + next_value
    return np.where(t.mask, advantages, 0.0), np.where(t.mask, returns, 0.0)


def draw(rng: np.random.Generator, turns: int, *, dense: bool = True, longest: int = 6) -> Trajectory:
    """Prompt, then turns of 1..longest action tokens with 0..longest observation tokens between; some ids are skipped."""
    mask, ids, turn = [0] * int(rng.integers(1, 4)), [], 0
    ids = [0] * len(mask)
    for _ in range(turns):
        actions, seen = int(rng.integers(1, longest + 1)), int(rng.integers(0, longest + 1))
        mask += [1] * actions + [0] * seen
        ids += [turn] * (actions + seen)
        turn += int(rng.integers(1, 3))
    n = len(mask)
    on = np.array(mask)
    rewards = rng.normal(size=n) * on if dense else np.zeros(n)
    rewards[np.flatnonzero(on)[-1]] += 1.0
    return Trajectory(rewards, rng.normal(size=n), np.array(ids), on)


trajectories = st.builds(lambda seed, turns: draw(np.random.default_rng(seed), turns), st.integers(0, 10**6), st.integers(1, 8))
weights = st.floats(0.0, 1.0)


def turn_form(t: Trajectory) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Token positions of each turn, rho and F."""
    at = np.flatnonzero(t.mask)
    turns = [at[t.turn_ids[at] == u] for u in np.unique(t.turn_ids[at])]
    return turns, np.array([t.rewards[u].sum() for u in turns]), np.array([t.values[u[0]] for u in turns])


@given(
    t=trajectories,
    gamma=weights,
    lam=weights,
    credit=st.sampled_from(ARMS),
    cut=st.booleans(),
    boot=st.floats(-3, 3),
    at=st.sampled_from(LINKS),
)
@settings(max_examples=200)
def test_loop_equals_vector_form(
    t: Trajectory, gamma: float, lam: float, credit: Credit, cut: bool, boot: float, at: BootstrapAt
) -> None:
    want = loop(t, gamma, lam, credit, cut, boot, at)
    got = turn_boundary_gae(*t.args, gamma=gamma, lam=lam, credit=credit, truncated=cut, bootstrap_value=boot, bootstrap_at=at)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    assert (got[0][t.mask == 0] == 0).all()
    assert (got[1][t.mask == 0] == 0).all()


@given(
    rows=st.lists(trajectories, min_size=1, max_size=5),
    gamma=weights,
    lam=weights,
    credit=st.sampled_from(ARMS),
    cuts=st.lists(st.booleans(), min_size=5, max_size=5),
    kind=st.sampled_from(["numpy", "torch"]),
    at=st.sampled_from(LINKS),
)
@settings(max_examples=100)
def test_batch_equals_loop(
    rows: list[Trajectory], gamma: float, lam: float, credit: Credit, cuts: list[bool], kind: str, at: BootstrapAt
) -> None:
    longest = max(len(t.mask) for t in rows) + 2
    arrays = [np.stack([np.pad(t.args[i], (0, longest - len(t.mask))) for t in rows]) for i in range(4)]
    boots = [0.5 * i for i in range(len(rows))]
    given_arrays = arrays if kind == "numpy" else [torch.from_numpy(a) for a in arrays]
    advantages, returns = turn_boundary_gae_batch(
        *given_arrays,
        gamma=gamma,
        lam=lam,
        credit=credit,
        truncated=cuts[: len(rows)],
        bootstrap_value=boots,
        bootstrap_at=at,
    )
    assert type(advantages) is type(given_arrays[0])
    for b, t in enumerate(rows):
        want = loop(t, gamma, lam, credit, cuts[b], boots[b], at)
        np.testing.assert_allclose(np.asarray(advantages[b])[: len(t.mask)], want[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.asarray(returns[b])[: len(t.mask)], want[1], rtol=0, atol=1e-12)
        assert not np.asarray(advantages[b])[len(t.mask) :].any()


@given(t=trajectories, gamma=weights, lam=weights)
def test_i1_first_tokens_are_classic_gae_over_turns(t: Trajectory, gamma: float, lam: float) -> None:
    advantages, _ = turn_boundary_gae(*t.args, gamma=gamma, lam=lam)
    turns, rho, first = turn_form(t)
    classic, after = 0.0, 0.0
    for u in reversed(range(len(turns))):
        classic = rho[u] + gamma * after - first[u] + gamma * lam * classic
        after = first[u]
        assert advantages[turns[u][0]] == pytest.approx(classic, abs=1e-12)


@given(t=trajectories, gamma=weights, lam=weights)
def test_i1_last_tokens_are_classic_gae_where_links_read_them(t: Trajectory, gamma: float, lam: float) -> None:
    """Of rewards on last tokens: what was booked before a token is not in its advantage."""
    turns, rho, _ = turn_form(t)
    t.rewards[:] = 0.0
    for turn, reward in zip(turns, rho, strict=True):
        t.rewards[turn[-1]] = reward
    advantages, _ = turn_boundary_gae(*t.args, gamma=gamma, lam=lam, bootstrap_at="last")
    classic, after = 0.0, 0.0
    for turn, reward in zip(turns[::-1], rho[::-1], strict=True):
        last = t.values[turn[-1]]
        classic = reward + gamma * after - last + gamma * lam * classic
        after = last
        assert advantages[turn[-1]] == pytest.approx(classic, abs=1e-12)


@given(t=trajectories, gamma=weights, lam=weights)
def test_i2_one_return_per_turn(t: Trajectory, gamma: float, lam: float) -> None:
    at = np.flatnonzero(t.mask)
    t.rewards[:] = 0.0
    t.rewards[at[-1]] = 1.0  # on the last token: nothing is booked before any token of its turn
    _, returns = turn_boundary_gae(*t.args, gamma=gamma, lam=lam)
    for turn in turn_form(t)[0]:
        assert np.ptp(returns[turn]) < 1e-12


@given(t=trajectories, gamma=weights, lam=weights, credit=st.sampled_from(["tb", "skip"]), extra=st.integers(0, 5))
def test_i3_i10_observations_are_never_read(t: Trajectory, gamma: float, lam: float, credit: Credit, extra: int) -> None:
    want = turn_boundary_gae(*t.args, gamma=gamma, lam=lam, credit=credit)
    off = t.mask == 0
    for junk in (np.nan, np.inf):
        dirty = Trajectory(np.where(off, junk, t.rewards), np.where(off, junk, t.values), np.where(off, -7, t.turn_ids), t.mask)
        got = turn_boundary_gae(*dirty.args, gamma=gamma, lam=lam, credit=credit)
        np.testing.assert_array_equal(got, want)
    # More observation tokens after every turn: the values at the action tokens stay.
    on = np.flatnonzero(t.mask)
    ends = on[np.append(t.turn_ids[on][1:] != t.turn_ids[on][:-1], True)] + 1
    longer = Trajectory(*(np.insert(a, np.repeat(ends, extra), 0) for a in t.args))
    got = turn_boundary_gae(*longer.args, gamma=gamma, lam=lam, credit=credit)
    np.testing.assert_allclose(got[0][longer.mask == 1], want[0][t.mask == 1], rtol=0, atol=1e-13)


@given(t=trajectories, gamma=weights, lam=weights, value=st.floats(-5, 5), at=st.sampled_from(LINKS), data=st.data())
def test_i4_a_token_inserted_after_the_first_changes_no_other(
    t: Trajectory, gamma: float, lam: float, value: float, at: BootstrapAt, data: st.DataObject
) -> None:
    """Or before the last, where links read the values of the last."""
    want, _ = turn_boundary_gae(*t.args, gamma=gamma, lam=lam, bootstrap_at=at)
    k = data.draw(st.sampled_from(np.flatnonzero(t.mask).tolist()))
    place = k + 1 if at == "first" else k
    more = Trajectory(*(np.insert(a, place, new) for a, new in zip(t.args, (0.0, value, t.turn_ids[k], 1), strict=True)))
    got, _ = turn_boundary_gae(*more.args, gamma=gamma, lam=lam, bootstrap_at=at)
    np.testing.assert_allclose(np.delete(got, place), want, rtol=0, atol=1e-12)


@given(t=trajectories, cut=st.booleans())
def test_i5_no_decay_is_the_plain_return(t: Trajectory, cut: bool) -> None:
    advantages, _ = turn_boundary_gae(*t.args, gamma=1.0, lam=1.0, truncated=cut, bootstrap_value=0.25)
    on = t.mask == 1
    to_go = np.cumsum(np.where(on, t.rewards, 0.0)[::-1])[::-1] + (0.25 if cut else 0.0)
    np.testing.assert_allclose(advantages[on], (to_go - t.values)[on], rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10**6), gamma=weights, lam=weights)
def test_i6_one_token_per_turn_and_one_turn(seed: int, gamma: float, lam: float) -> None:
    t = draw(np.random.default_rng(seed), 6, longest=1)
    plain = turn_boundary_gae(*t.args, gamma=gamma, lam=lam, credit="skip")
    np.testing.assert_allclose(turn_boundary_gae(*t.args, gamma=gamma, lam=lam), plain, rtol=0, atol=1e-12)
    single = draw(np.random.default_rng(seed), 1)
    on = single.mask == 1
    to_go = np.cumsum(np.where(on, single.rewards, 0.0)[::-1])[::-1]
    advantages, _ = turn_boundary_gae(*single.args, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages[on], (to_go - single.values)[on], rtol=0, atol=1e-12)


@given(t=trajectories, gamma=weights, at=st.sampled_from(LINKS))
def test_i7_lambda_zero_is_turn_td(t: Trajectory, gamma: float, at: BootstrapAt) -> None:
    advantages, _ = turn_boundary_gae(*t.args, gamma=gamma, lam=0.0, bootstrap_at=at)
    turns, _, _ = turn_form(t)
    for u, turn in enumerate(turns):
        after = gamma * t.values[turns[u + 1][0 if at == "first" else -1]] if u + 1 < len(turns) else 0.0
        to_go = np.cumsum(t.rewards[turn][::-1])[::-1]
        np.testing.assert_allclose(advantages[turn], to_go + after - t.values[turn], rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10**6), turns=st.integers(1, 8), gamma=st.floats(0.1, 1.0), lam=weights)
def test_i8_exact_values_leave_no_advantage(seed: int, turns: int, gamma: float, lam: float) -> None:
    t = draw(np.random.default_rng(seed), turns, dense=False)
    parts, _, _ = turn_form(t)
    for u, turn in enumerate(parts):
        t.values[turn] = gamma ** (len(parts) - 1 - u)
    advantages, _ = turn_boundary_gae(*t.args, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, 0.0, rtol=0, atol=1e-12)


@given(t=trajectories, other=st.integers(0, 10**6), gamma=weights, lam=weights, credit=st.sampled_from(ARMS))
def test_i9_linear(t: Trajectory, other: int, gamma: float, lam: float, credit: Credit) -> None:
    rng = np.random.default_rng(other)
    r, v = rng.normal(size=len(t.mask)), rng.normal(size=len(t.mask))

    def run(rewards: np.ndarray, values: np.ndarray, boot: float) -> np.ndarray:
        out = turn_boundary_gae(
            rewards, values, t.turn_ids, t.mask, gamma=gamma, lam=lam, credit=credit, truncated=True, bootstrap_value=boot
        )
        return np.stack(out)

    both = run(2 * t.rewards - 3 * r, 2 * t.values - 3 * v, 2 * 0.5 - 3 * 0.25)
    np.testing.assert_allclose(both, 2 * run(t.rewards, t.values, 0.5) - 3 * run(r, v, 0.25), rtol=0, atol=1e-11)
    assert not run(0 * r, 0 * v, 0.0).any()


@given(
    t=trajectories,
    gamma=weights,
    lam=weights,
    credit=st.sampled_from(["tb", "skip"]),
    cut=st.booleans(),
    at=st.sampled_from(LINKS),
    data=st.data(),
)
def test_i11_linked_chunks_equal_the_uncut_trajectory(
    t: Trajectory, gamma: float, lam: float, credit: Credit, cut: bool, at: BootstrapAt, data: st.DataObject
) -> None:
    options = {"gamma": gamma, "lam": lam, "credit": credit, "truncated": cut, "bootstrap_value": 0.7, "bootstrap_at": at}
    want = turn_boundary_gae(*t.args, **options)  # pyright: ignore[reportArgumentType]: each of its own type
    # Anywhere: at turn boundaries, inside turns, inside the prompt (then a chunk holds no action token).
    cuts = sorted(data.draw(st.sets(st.integers(1, len(t.mask) - 1), max_size=4)))
    pieces = list(zip(*(np.split(a, cuts) for a in t.args), strict=True))
    got = turn_boundary_gae_chunks([ChunkInput(*piece) for piece in pieces], **options)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(np.concatenate([a for a, _ in got]), want[0], rtol=0, atol=1e-12)
    # The earlier chunk's targets hold the carry too: they are the uncut ones.
    np.testing.assert_allclose(np.concatenate([r for _, r in got]), want[1], rtol=0, atol=1e-12)


def test_i12_weight_of_the_terminal_reward() -> None:
    turns, per_turn = 20, 300
    ids = np.repeat(np.arange(turns), per_turn)
    rewards = np.zeros(turns * per_turn)
    rewards[-1] = 1.0
    mask, zeros = np.ones(len(ids), int), np.zeros(len(ids))
    by_turn, _ = turn_boundary_gae(rewards, zeros, ids, mask, gamma=1.0, lam=0.95)
    assert by_turn[0] == pytest.approx(0.95**19, rel=1e-12)
    assert round(float(by_turn[0]), 3) == 0.377
    by_token, _ = turn_boundary_gae(rewards, zeros, ids, mask, gamma=1.0, lam=0.95, credit="skip")
    assert by_token[0] == pytest.approx(0.95**5999, rel=1e-9)


@pytest.mark.parametrize("credit", ARMS)
def test_three_hundred_turns_and_a_hundred_thousand_tokens(credit: Credit) -> None:
    t = draw(np.random.default_rng(0), 300, longest=330)
    assert len(t.mask) > 90_000
    got = turn_boundary_gae(*t.args, gamma=0.99, lam=0.5, credit=credit, truncated=True, bootstrap_value=2.0)
    np.testing.assert_allclose(got, loop(t, 0.99, 0.5, credit, True, 2.0), rtol=0, atol=1e-9)


def test_worked_by_hand() -> None:
    # Two turns of two tokens with an observation between; reward 1 at the end; gamma 0.5, lam 0.5.
    rewards, values = np.array([0, 0, 0, 0, 0, 1.0]), np.array([9, 0.2, 0.4, 9, 0.6, 0.8])
    ids, mask = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 1, 0, 1, 1])
    advantages, returns = turn_boundary_gae(rewards, values, ids, mask, gamma=0.5, lam=0.5)
    # G_1 = 1, G_0 = 0.5 (0.5 * 0.6 + 0.5 * 1) = 0.4
    np.testing.assert_allclose(returns, [0, 0.4, 0.4, 0, 1, 1])
    np.testing.assert_allclose(advantages, [0, 0.2, 0.0, 0, 0.4, 0.2], atol=1e-15)


def test_worked_by_hand_where_links_read_last_tokens() -> None:
    # As above: G_1 = 1, and G_0 = 0.5 (0.5 * 0.8 + 0.5 * 1) = 0.45.
    rewards, values = np.array([0, 0, 0, 0, 0, 1.0]), np.array([9, 0.2, 0.4, 9, 0.6, 0.8])
    ids, mask = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 1, 0, 1, 1])
    options = {"gamma": 0.5, "lam": 0.5, "bootstrap_at": "last"}
    advantages, returns = turn_boundary_gae(rewards, values, ids, mask, **options)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(returns, [0, 0.45, 0.45, 0, 1, 1])
    np.testing.assert_allclose(advantages, [0, 0.25, 0.05, 0, 0.4, 0.2], atol=1e-15)
    # Cut inside the second turn, and not linked: the first part ends with gamma times the next one's value, without trace.
    parts = [ChunkInput(*(a[piece] for a in (rewards, values, ids, mask))) for piece in (slice(0, 4), slice(4, 6))]
    cut = turn_boundary_gae_chunks(parts, **options, linked=False)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(cut[0][1], [0, 0.4, 0.4, 0])
    first = turn_boundary_gae_chunks(parts, gamma=0.5, lam=0.5, linked=False)
    np.testing.assert_allclose(first[0][1], [0, 0.3, 0.3, 0])


@given(t=trajectories, gamma=weights, lam=weights, credit=st.sampled_from(["skip", "token"]))
def test_arms_without_turns_have_no_place_to_link_to(t: Trajectory, gamma: float, lam: float, credit: Credit) -> None:
    first, last = (turn_boundary_gae(*t.args, gamma=gamma, lam=lam, credit=credit, bootstrap_at=at) for at in LINKS)
    np.testing.assert_array_equal(first, last)


@pytest.mark.parametrize("credit", ARMS)
def test_no_action_token_gives_zeros(credit: Credit) -> None:
    nan = np.full(4, np.nan)
    out = turn_boundary_gae(nan, nan, np.array([3, 2, 1, 0]), np.zeros(4), gamma=1.0, lam=1.0, credit=credit)
    assert not np.stack(out).any()
    empty = np.zeros(0)
    assert turn_boundary_gae(empty, empty, empty, empty, gamma=1.0, lam=1.0)[0].shape == (0,)
    rows = turn_boundary_gae_batch(*(np.zeros((2, 3)) for _ in range(4)), gamma=1.0, lam=1.0, credit=credit)
    assert rows[0].shape == (2, 3)


@pytest.mark.parametrize("credit", ARMS)
def test_decreasing_ids_raise(credit: Credit) -> None:
    x = np.ones(3)
    with pytest.raises(ValueError, match="must not decrease"):
        turn_boundary_gae(x, x, np.array([1, 0, 0]), x, gamma=1.0, lam=1.0, credit=credit)
    two = [np.stack([x, x]), np.stack([x, x]), np.array([[5, 5, 5], [0, 0, 0]]), np.stack([x, x])]
    turn_boundary_gae_batch(*two, gamma=1.0, lam=1.0, credit=credit)  # a new row may start lower
    with pytest.raises(ValueError, match="must not decrease"):
        turn_boundary_gae_chunks(
            [ChunkInput(x, x, np.ones(3), x), ChunkInput(x, x, np.zeros(3), x)], gamma=1.0, lam=1.0, credit=credit
        )


def test_unknown_arm_raises() -> None:
    x = np.ones(2)
    with pytest.raises(ValueError, match="unknown credit"):
        turn_boundary_gae(x, x, x, x, gamma=1.0, lam=1.0, credit="turn")  # pyright: ignore[reportArgumentType]: the point
    with pytest.raises(ValueError, match="unknown bootstrap_at"):
        turn_boundary_gae(x, x, x, x, gamma=1.0, lam=1.0, bootstrap_at="mid")  # pyright: ignore[reportArgumentType]: the point


def test_an_ended_row_does_not_read_its_bootstrap() -> None:
    x = np.ones(3)
    assert np.isfinite(turn_boundary_gae(x, x, np.zeros(3), x, gamma=1.0, lam=1.0, bootstrap_value=np.nan)).all()


@given(rows=st.lists(trajectories, min_size=1, max_size=4), lam=weights, credit=st.sampled_from(ARMS), at=st.sampled_from(LINKS))
@settings(max_examples=50)
def test_the_path_of_accelerators(rows: list[Trajectory], lam: float, credit: Credit, at: BootstrapAt) -> None:
    """torch operations throughout, all rows at once: on a CPU tensors are otherwise worked on as numpy arrays."""
    longest = max(len(t.mask) for t in rows)
    tensors = [torch.from_numpy(np.stack([np.pad(t.args[i], (0, longest - len(t.mask))) for t in rows])) for i in range(4)]
    out = torch.zeros(2, len(rows), longest, dtype=torch.float64)
    last = torch.zeros(len(rows), dtype=torch.float64)
    r, v, ids, on = tensors
    xp = array_namespace(v)
    _fill(xp, r, v, ids, on, out[0], out[1], last_B=last, gamma=0.9, lam=lam, credit=credit, bootstrap_at=at)
    for b, t in enumerate(rows):
        np.testing.assert_allclose(out[:, b, : len(t.mask)].numpy(), loop(t, 0.9, lam, credit, at=at), rtol=0, atol=1e-12)


def test_half_precision_values_are_taken() -> None:
    values = torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)
    advantages, _ = turn_boundary_gae_batch(torch.ones(1, 2), values, torch.zeros(1, 2), torch.ones(1, 2), gamma=1, lam=1)
    assert advantages.tolist() == [[1.5, 0.75]]


def test_float32_in_float32_out_and_no_gradient() -> None:
    t = draw(np.random.default_rng(1), 5)
    want = loop(t, 0.9, 0.8)[0]
    values = torch.tensor(t.values, dtype=torch.float32, requires_grad=True)[None]
    rest = [torch.from_numpy(a)[None] for a in (t.rewards, t.turn_ids, t.mask)]
    advantages, _ = turn_boundary_gae_batch(rest[0], values, rest[1], rest[2], gamma=0.9, lam=0.8)
    assert advantages.dtype == torch.float32
    assert not advantages.requires_grad
    np.testing.assert_allclose(advantages[0].numpy(), want, atol=1e-6)


def test_chunk_carry() -> None:
    assert chunk_carry(0.5, 0.25, gamma=0.9, lam=0.5, same_turn=False) == pytest.approx(0.9 * (0.5 + 0.125))
    assert chunk_carry(0.5, 0.25, gamma=0.9, lam=0.5, same_turn=True) == 0.75
    assert chunk_carry(0.5, 0.25, gamma=0.9, lam=0.5, same_turn=False, linked_value=0.1) == pytest.approx(0.9 * (0.05 + 0.375))
    assert chunk_carry(0.5, 0.25, gamma=0.9, lam=0.5, same_turn=True, linked_value=0.1) == 0.75


def test_overlong_penalty() -> None:
    """DAPO's own numbers: 16,384 expected, a cache of 4,096 behind them."""
    lengths = (0, 16384, 17408, 18432, 20480, 99999)
    assert [overlong_penalty(n, longest=20480, cache=4096) for n in lengths] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    for cache in (0, 20481):
        with pytest.raises(ValueError, match="at most 20480"):
            overlong_penalty(1, longest=20480, cache=cache)


def test_adaptive_lambda() -> None:
    assert [adaptive_lambda(turns, 0.5) for turns in (0, 1, 2, 4, 20)] == [0.0, 0.0, 0.0, 0.5, 0.9]
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            adaptive_lambda(3, alpha)


def test_group_relative() -> None:
    np.testing.assert_allclose(group_relative(np.array([1.0, 0, 0, 0]), normalise=False), [0.75, -0.25, -0.25, -0.25])
    # population std of (1, 0, 0, 0) is sqrt(3) / 4
    np.testing.assert_allclose(group_relative(np.array([1.0, 0, 0, 0]), std_floor=0.0), np.array([3, -1, -1, -1]) / 3**0.5)
    for value in (0.0, 0.1, 1.0):  # the mean of seven 0.1 rounds
        assert not group_relative(np.full(7, value)).any()
    assert group_relative(np.zeros(0)).shape == (0,)


def test_repetition_penalty() -> None:
    same = ["ls -la /tmp", "ls -la /tmp", "ls -la /tmp"]
    assert repetition_penalty(same, ["total 4", "total 9", "total 4"]) == [0.0, -0.05, -0.05]  # digits are one
    assert repetition_penalty(same, ["a b", "c d", "a b"]) == [0.0, 0.0, -0.05]  # a changed observation is no repeat
    assert repetition_penalty(["", None, " "], ["x", "x", "x"]) == [0.0, 0.0, 0.0]
    assert repetition_penalty(["make", "make"], ["", ""]) == [0.0, -0.05]
    words = "a b c d e f g h"  # 8 of 10 words are shared: 0.8 exactly is no repeat
    assert repetition_penalty(["x", "x"], [f"{words} i", f"{words} j"]) == [0.0, 0.0]
    assert repetition_penalty(["x", "x"], [f"{words} i", f"{words} i"]) == [0.0, -0.05]
    stamped = ["\x1b[31m2026-01-02 03:04:05 ERROR\x1b[0m disk", "2026-11-12T13:14:15.5Z error disk"]
    assert repetition_penalty(["tail log", "TAIL log"], stamped) == [0.0, -0.05]
    # Both conditions must hold against one and the same earlier turn.
    assert repetition_penalty(["a", "b", "a"], ["p", "q", "q"]) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="zip"):
        repetition_penalty(["a"], [])


def test_penalty_after_normalisation_survives_an_equal_group() -> None:
    advantage = group_relative(np.array([1.0, 1.0]))[0]
    assert advantage + repetition_penalty(["x", "x"], ["y", "y"])[1] == -0.05


def test_whiten() -> None:
    rows = [np.array([9.0, 1.0, 3.0]), np.array([5.0, np.nan])]
    masks = [np.array([0, 1, 1]), np.array([1, 0])]
    whitened = whiten(rows, masks, std_floor=0.0)
    scale = np.sqrt(8 / 3)  # of (1, 3, 5)
    np.testing.assert_allclose(whitened[0], [0, -2 / scale, 0], atol=1e-15)
    np.testing.assert_allclose(whitened[1], [2 / scale, 0])
    assert not whiten([np.full(3, 0.1)], [np.ones(3)])[0].any()
    assert whiten([], []) == []


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["float32", "float64"]), as_torch=st.booleans())
def test_whitening_of_padded_rows_is_that_of_ragged_ones(seed: int, kind: str, as_torch: bool) -> None:
    """Whatever stands off the mask, a NaN too."""
    draw = np.random.default_rng(seed)
    masks = draw.random((4, 7)) < 0.5
    rows = np.where(masks, draw.normal(size=(4, 7)), np.nan).astype(kind)
    wanted = np.stack(whiten(list(rows), list(masks)))
    given = (torch.from_numpy(rows).requires_grad_(), torch.from_numpy(masks)) if as_torch else (rows, masks)
    found = whiten_batch(*given)
    assert isinstance(found, torch.Tensor) is as_torch
    assert str(found.dtype).endswith(kind)
    assert not getattr(found, "requires_grad", False)
    np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-6 if kind == "float32" else 1e-12)


def test_whitening_of_nothing_or_of_equals_is_zeros() -> None:
    for mask in (np.zeros((2, 3)), np.ones((2, 3))):
        assert (whiten_batch(np.full((2, 3), 4.0), mask) == 0.0).all()


def test_decisive_early_turn_does_not_fade_with_length() -> None:
    """A chain with one decisive early turn: its advantage depends on the number of turns, not on tokens."""

    def first(per_turn: int, credit: Credit) -> float:
        ids = np.repeat(np.arange(10), per_turn)
        rewards = np.zeros(len(ids))
        rewards[-1] = 1.0
        ones, zeros = np.ones(len(ids)), np.zeros(len(ids))
        return float(turn_boundary_gae(rewards, zeros, ids, ones, gamma=1.0, lam=0.9, credit=credit)[0][0])

    assert first(5, "tb") == pytest.approx(first(500, "tb"), rel=1e-12)
    assert first(500, "skip") < 1e-100 < first(5, "skip")


def test_no_torch_comes_along() -> None:
    code = (
        "import sys, numpy as np\n"
        "from termrsi.algo.advantage import turn_boundary_gae\n"
        "import termrsi.algo.metrics, termrsi.queues.recovery, termrsi.queues.buffer\n"
        "x = np.ones(3); turn_boundary_gae(x, x, x, x, gamma=1.0, lam=1.0)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
