"""Losses against numbers worked by hand; no split of a batch changes a gradient; DPPO's five behaviours, TVPO's budget, SAT."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from termrsi.algo import whole
from termrsi.algo.loss import (
    SAMPLER_KINDS,
    Correction,
    DppoForm,
    KlKind,
    LossKind,
    contraction,
    correction_weights,
    dppo_mask,
    kl_terms,
    policy_loss,
    row_tv,
    sft_loss,
    tis_weights,
    tvpo_mask,
    value_loss,
)
from termrsi.errors import ConfigError
from termrsi.records import Sample

KINDS: tuple[LossKind, ...] = get_args(LossKind)
ROLLOUT_KINDS = ("grpo", "reterm", "gspo", "dr_grpo")
CLIPPED = tuple(kind for kind in KINDS if kind not in SAMPLER_KINDS)

OPTIONS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "max_tokens": 10}


def log(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def random_batch(seed: int, rows: int = 6, length: int = 7) -> dict[str, Any]:  # Any: it is passed on by **
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=g) < 0.6
    mask[0] = True
    mask[-1] = False  # a rollout without action tokens
    old = -2 * torch.rand(rows, length, generator=g, dtype=torch.float64) - 0.05
    return {
        "logp": old + 0.3 * torch.randn(rows, length, generator=g, dtype=torch.float64).clamp(-2, 0.1),
        "old_logp": old,
        "advantages": torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, length),
        "mask": mask,
    }


def _rows(values: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {key: value[rows] if isinstance(value, Tensor) else value for key, value in values.items()}


def gradient(kind: LossKind, batch: dict[str, Any], parts: list[list[int]], more: Any = None) -> tuple[float, Tensor]:
    """Loss and gradient with the rows handed over in `parts`, each with the whole batch's denominator."""
    logp = batch["logp"].clone().requires_grad_()
    tokens, rollouts = float(batch["mask"].sum()), float(batch["mask"].any(1).sum())
    total = 0.0
    for rows in parts:
        loss = policy_loss(
            kind,
            logp[rows],
            batch["old_logp"][rows],
            batch["advantages"][rows],
            batch["mask"][rows],
            clip_low=0.2,
            clip_high=0.28,
            delta=0.1,
            max_tokens=11,
            denominator=rollouts if kind in ROLLOUT_KINDS else tokens,
            **_rows(more or {}, rows),
        )
        loss.backward()
        total += float(loss.detach())
    assert logp.grad is not None
    return total, logp.grad


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), data=st.data())
@settings(max_examples=100)
def test_no_split_changes_loss_or_gradient(seed: int, kind: LossKind, data: st.DataObject) -> None:
    batch = random_batch(seed)
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    parts = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 6])]
    whole = gradient(kind, batch, [list(range(6))])
    split = gradient(kind, batch, parts)
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=1e-12)
    default = policy_loss(kind, **batch, clip_low=0.2, clip_high=0.28, delta=0.1, max_tokens=11)
    assert float(default) == pytest.approx(whole[0], abs=1e-12)


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), data=st.data())
@settings(max_examples=60)
def test_no_split_changes_what_is_corrected_or_held_near_a_reference(seed: int, kind: LossKind, data: st.DataObject) -> None:
    batch, other = random_batch(seed), random_batch(seed + 1)
    more: dict[str, Any] = {"kl": 0.3, "ref_logp": other["old_logp"], "kl_kind": data.draw(st.sampled_from(["k1", "k2", "k3"]))}
    if kind == "dppo":
        more["dppo_form"] = data.draw(st.sampled_from(["ratio", "capped"]))
    elif kind not in SAMPLER_KINDS:
        correction = data.draw(st.sampled_from(["tis", "icepop", "sequence"]))
        more |= {"tis_cap": 1.5, "sampler_logp": other["logp"], "correction": correction, "correction_low": 0.7}
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    parts = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 6])]
    whole, split = gradient(kind, batch, [list(range(6))], more), gradient(kind, batch, parts, more)
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=1e-12)
    assert bool((whole[1][~batch["mask"]] == 0).all())


def samples_of(batch: dict[str, Any], groups: list[str]) -> tuple[list[Sample], list[list[float]]]:
    """The rows as samples whose sampler's log-probabilities are the old ones, and the present ones beside them."""
    made = [
        Sample((0,) * len(mask), tuple(mask), (0,) * len(mask), f"r{i}", group, sampler_logp=tuple(old))
        for i, (mask, old, group) in enumerate(zip(batch["mask"].int().tolist(), batch["old_logp"].tolist(), groups, strict=True))
    ]
    return made, batch["logp"].tolist()


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=60)
def test_no_split_changes_which_prompts_are_over_their_budget(seed: int, data: st.DataObject) -> None:
    """A prompt's rollouts may stand in different parts: its divergence is taken from all of them before."""
    batch = random_batch(seed)
    samples, logp = samples_of(batch, data.draw(st.lists(st.sampled_from("pqr"), min_size=6, max_size=6)))
    tv = whole.prompt_tv(samples, logp)
    more = {"prompt_tv": torch.tensor(tv, dtype=torch.float64)}
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    parts = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 6])]
    one, split = gradient("tvpo", batch, [list(range(6))], more), gradient("tvpo", batch, parts, more)
    assert split[0] == pytest.approx(one[0], abs=1e-12)
    torch.testing.assert_close(split[1], one[1], rtol=0, atol=1e-12)
    away = batch["advantages"] * (batch["logp"] - batch["old_logp"]) > 0
    frozen = batch["mask"] & away & (more["prompt_tv"] > 0.1).unsqueeze(1)  # `gradient` has a budget of 0.1
    assert bool(((one[1] == 0) == (frozen | ~batch["mask"])).all())


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(CLIPPED), data=st.data())
@settings(max_examples=60)
def test_no_split_changes_which_clips_contract(seed: int, kind: LossKind, data: st.DataObject) -> None:
    batch = random_batch(seed)
    samples, logp = samples_of(batch, ["g"] * 6)
    bound = whole.log_ratio_bound(samples, logp, 0.6, of_sequences=kind == "gspo")
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    parts = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 6])]
    more = {"anchor": "sampler", "sat": 0.6, "sat_bound": bound}
    one, split = gradient(kind, batch, [list(range(6))], more), gradient(kind, batch, parts, more)
    assert split[0] == pytest.approx(one[0], abs=1e-12)
    torch.testing.assert_close(split[1], one[1], rtol=0, atol=1e-12)
    of_itself = gradient(kind, batch, [list(range(6))], {"anchor": "sampler", "sat": 0.6})
    assert of_itself[0] == pytest.approx(one[0], abs=1e-12)
    assert one[0] >= gradient(kind, batch, [list(range(6))])[0] - 1e-12  # a smaller interval never raises the objective


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "gspo"])
def test_a_rollout_in_two_rows_equals_one_row(kind: LossKind) -> None:
    batch = random_batch(3, rows=2, length=8)
    batch["mask"][:] = True
    options: dict[str, Any] = {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "max_tokens": 9,
        "denominator": 1.0 if kind in ROLLOUT_KINDS else 8.0,
    }
    row = {name: column[:1] for name, column in batch.items()}
    one = policy_loss(kind, **row, **options)
    tv = row_tv(row["logp"], row["old_logp"], row["mask"])  # of the rollout, and of its prompt
    cut = {name: torch.cat([column[:, :3], column[:, 3:6]]) for name, column in row.items()}
    rest = {name: column[:, 6:] for name, column in row.items()}
    split = policy_loss(kind, **cut, **options, rollout_tokens=torch.tensor([8, 8]), prompt_tv=tv.repeat(2))
    split = split + policy_loss(kind, **rest, **options, rollout_tokens=torch.tensor([8]), prompt_tv=tv)
    torch.testing.assert_close(split, one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_actions_is_inert_and_nothing_off_the_mask_is_read(kind: LossKind) -> None:
    batch = random_batch(1)
    options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "max_tokens": 5}
    clean = policy_loss(kind, **{name: column[:-1] for name, column in batch.items()}, **options)
    for junk in (math.nan, math.inf, -math.inf):
        dirty = {n: c if n == "mask" else torch.where(batch["mask"], c, junk) for n, c in batch.items()}
        dirty["logp"].requires_grad_()
        loss = policy_loss(kind, **dirty, **options)
        loss.backward()
        torch.testing.assert_close(loss.detach(), clean)
        grad = dirty["logp"].grad
        assert grad is not None
        assert torch.isfinite(grad).all()
        assert not grad[~batch["mask"]].any()
    empty = policy_loss(kind, **{name: column[-1:] for name, column in batch.items()}, **options)
    assert float(empty) == 0.0


def test_worked_by_hand() -> None:
    # Row 1: rho 1.5 and 1.1 with A = 1; row 2: rho 0.5 with A = -2.
    old = torch.zeros(2, 2, dtype=torch.float64)
    logp = torch.stack([log(1.5, 1.1), log(0.5, 1.0)])
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    args, options = (logp, old, advantages, mask), OPTIONS
    # Terms: min(1.5, 1.28), 1.1 and min(-1, -1.6).
    first, second, third = 1.28, 1.1, -1.6
    for kind in ("ppo", "dapo"):
        assert float(policy_loss(kind, *args, **options)) == pytest.approx(-(first + second + third) / 3)
    for kind in ("grpo", "reterm"):
        assert float(policy_loss(kind, *args, **options)) == pytest.approx(-((first + second) / 2 + third) / 2)
    assert float(policy_loss("dr_grpo", *args, **options)) == pytest.approx(-(first + second + third) / 20)
    # Sequence ratios sqrt(1.65) > 1.28 and 0.5.
    assert float(policy_loss("gspo", *args, **options)) == pytest.approx(-(1.28 - 1.6) / 2)


def test_pooled_groups_are_a_mean_over_all_rollouts() -> None:
    """ReTerm: original and recovery groups pooled, with M_R = 0 it is GRPO."""
    batch = random_batch(5)
    both = policy_loss("reterm", **batch, clip_low=0.2, clip_high=0.28)
    parts = [{n: c[rows] for n, c in batch.items()} for rows in (slice(0, 2), slice(2, 6))]
    sizes = [float(p["mask"].any(1).sum()) for p in parts]
    means = [float(policy_loss("grpo", **p, clip_low=0.2, clip_high=0.28)) for p in parts]
    assert float(both) == pytest.approx(sum(m * s for m, s in zip(means, sizes, strict=True)) / sum(sizes))


def test_dppo_five_behaviours() -> None:
    def kept(mu: float, pi: float, advantage: float, delta: float = 0.1) -> bool:
        return bool(dppo_mask(log(pi), log(mu), torch.tensor([advantage]), delta=delta)[0])

    assert kept(1e-4, 1e-3, 1.0)  # r = 10, but D = 9e-4
    assert not kept(0.99, 0.80, -1.0)  # r = 0.81, D = 0.19
    assert kept(0.99, 0.80, 1.0)  # back towards the sampler
    assert kept(0.1, 0.9, -1.0)
    assert not kept(0.1, 0.9, 1.0)
    assert kept(0.5, 0.5, 1.0)
    assert kept(0.1, 0.9, 0.0)
    assert kept(0.5, 0.6, 1.0)  # D = delta exactly
    assert kept(0.4, 0.5, 1.0)
    for mu, pi in itertools.pairwise([0.1, 0.2, 0.3, 0.4, 0.5]):  # in float32 too, where log and exp round
        f32 = [torch.tensor([p], dtype=torch.float32).log() for p in (pi, mu)]
        assert bool(dppo_mask(f32[0], f32[1], torch.ones(1)))
    assert not kept(0.5, 0.601, 1.0)


def test_dppo_kl_is_the_bernoulli_divergence() -> None:
    mu, pi = 0.5, 0.8
    divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    for delta, want in ((divergence * 1.001, 1.0), (divergence * 0.999, 0.0)):
        assert float(dppo_mask(log(pi), log(mu), torch.ones(1), delta=delta, divergence="kl")) == want
    ends = torch.tensor([0.0, -100.0])
    assert torch.isfinite(dppo_mask(ends, ends.flip(0), torch.ones(2), divergence="kl")).all()


def test_dppo_gradient_is_vanilla_at_the_sampler_and_counts_masked_tokens() -> None:
    logp = log(0.3, 0.7)[None].requires_grad_()
    advantages, mask = torch.tensor([[2.0, -1.0]]), torch.ones(1, 2)
    policy_loss("dppo", logp, logp.detach(), advantages, mask, delta=0.1).backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-1.0, 0.5]], dtype=torch.float64))  # -A / 2
    # The second token is masked (D = 0.19, A < 0): its term is 0, the denominator is still 2, and r is not clipped.
    logp = log(0.6, 0.80)[None].requires_grad_()
    loss = policy_loss("dppo", logp, log(0.59, 0.99)[None], advantages, mask, delta=0.1)
    assert float(loss.detach()) == pytest.approx(-(0.6 / 0.59) * 2 / 2)
    loss.backward()
    assert logp.grad is not None
    assert float(logp.grad[0, 1]) == 0.0


def test_tvpo_freezes_what_leads_away_where_a_prompt_is_over_its_budget() -> None:
    """r = 2 and 0.5 in both rows: a divergence of 0.375. Frozen tokens keep their value, count, and carry no gradient."""
    mu, pi = log(0.3, 0.6), log(0.6, 0.3)
    assert row_tv(pi[None], mu[None], torch.ones(1, 2)).tolist() == pytest.approx([0.375])

    def of(advantage: float, delta: float, tv: float | None = None) -> tuple[float, list[float]]:
        logp = pi[None].clone().requires_grad_()
        given_tv = None if tv is None else torch.tensor([tv])
        advantages = torch.full((1, 2), advantage)
        loss = policy_loss("tvpo", logp, mu[None], advantages, torch.ones(1, 2), delta=delta, prompt_tv=given_tv)
        loss.backward()
        assert logp.grad is not None
        return float(loss.detach()), logp.grad[0].tolist()

    value = -(2 * math.log(0.6) + 0.5 * math.log(0.3)) / 2
    assert of(1.0, 0.4) == (pytest.approx(value), pytest.approx([-1.0, -0.25]))
    assert of(1.0, 0.3) == (pytest.approx(value), pytest.approx([0.0, -0.25]))
    assert of(-1.0, 0.3) == (pytest.approx(-value), pytest.approx([1.0, 0.0]))
    assert of(1.0, 0.3, tv=0.3) == of(1.0, 0.4)  # its prompt's other rollouts are nearer: D = delta is within
    assert of(1.0, 0.4, tv=0.41) == of(1.0, 0.3)
    assert of(0.0, 0.3)[1] == [0.0, 0.0]


def test_tvpo_takes_a_ratio_of_at_most_twenty() -> None:
    logp = log(0.5)[None].requires_grad_()
    policy_loss("tvpo", logp, log(0.01)[None], torch.ones(1, 1), torch.ones(1, 1), delta=99.0).backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(-20.0)


def test_the_mask_of_tvpo() -> None:
    mu, pi = log(0.3, 0.6, 0.5).repeat(2, 1), log(0.6, 0.3, 0.5).repeat(2, 1)
    for sign, frozen in ((1.0, [False, True, True]), (-1.0, [True, False, True])):
        kept = tvpo_mask(pi, mu, torch.full((2, 3), sign), torch.tensor([0.03, 0.02]))
        assert kept.tolist() == [frozen, [True] * 3]


@pytest.mark.parametrize(("low", "high"), [(0.3, 5.0), (0.8, 3.0)])  # SAO's, for mathematics and for code
def test_dis_drops_what_is_outside_of_its_range_whatever_the_advantage(low: float, high: float) -> None:
    ratios = [low - 0.01, low + 0.01, 1.0, high - 0.01, high + 0.01]
    mask = torch.ones(2, 5)
    old = torch.full((2, 5), 0.1, dtype=torch.float64).log()
    logp = (old + log(*ratios)).requires_grad_()
    advantages = torch.tensor([[1.0], [-2.0]]).expand(2, 5)
    options: dict[str, Any] = {"clip_low": 1 - low, "clip_high": high - 1}
    policy_loss("dis", logp, old, advantages, mask, **options).backward()
    assert logp.grad is not None
    weights = torch.tensor([0.0, *ratios[1:4], 0.0], dtype=torch.float64)
    torch.testing.assert_close(logp.grad, torch.stack([-weights, 2 * weights]) / 10)
    # With one update per batch, IcePop's weights on the usual loss have that gradient.
    again = logp.detach().clone().requires_grad_()
    more: dict[str, Any] = {"sampler_logp": old, "tis_cap": high, "correction": "icepop", "correction_low": low}
    policy_loss("ppo", again, again.detach(), advantages, mask, **more).backward()
    torch.testing.assert_close(again.grad, logp.grad)


def test_a_clip_contracts_on_the_side_to_which_its_token_has_moved() -> None:
    below, above = contraction(torch.tensor([0.1, 0.4, -0.4, 0.2, -0.6]), 0.2)
    assert below.tolist() == pytest.approx([1, 1, 0.2, 1, 0.1])
    assert above.tolist() == pytest.approx([1, 0.2, 1, 1, 1])
    assert torch.stack(contraction(torch.tensor([0.1, -3.0]), 0.0)).unique().tolist() == [1.0]  # most tokens did not move


def test_contracted_clips_worked_by_hand() -> None:
    """Nine tokens at 0.05 and one at 0.15: the bound is 0.05, and the last one's radius a tenth of 0.2: 1.02 instead of e^0.15."""
    old = torch.full((1, 10), -1.0, dtype=torch.float64)
    d = torch.tensor([[0.05] * 9 + [0.15]], dtype=torch.float64)
    for kind in ("ppo", "grpo"):
        logp = (old + d).requires_grad_()
        args = (logp, old, torch.ones(1, 10), torch.ones(1, 10))
        loss = policy_loss(kind, *args, clip_low=0.2, clip_high=0.2, anchor="sampler", sat=0.9)
        assert float(loss.detach()) == pytest.approx(-(9 * math.exp(0.05) + 1.02) / 10)
        loss.backward()
        assert logp.grad is not None
        assert logp.grad[0].tolist() == pytest.approx([-math.exp(0.05) / 10] * 9 + [0.0])
    # Of sequences: ten of one token, and the mean ratio of the last is clipped.
    rows = (old.T + d.T, old.T, torch.ones(10, 1), torch.ones(10, 1))
    found = policy_loss("gspo", *rows, clip_low=0.2, clip_high=0.2, anchor="sampler", sat=0.9)
    assert float(found) == pytest.approx(-(9 * math.exp(0.05) + 1.02) / 10)


@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_one_every_gradient_is_the_policy_gradient(kind: LossKind) -> None:
    logp = log(0.3, 0.7)[None].requires_grad_()
    policy_loss(kind, logp, logp.detach(), torch.full((1, 2), 3.0), torch.ones(1, 2), max_tokens=2).backward()
    torch.testing.assert_close(logp.grad, torch.full((1, 2), -1.5, dtype=torch.float64))


def test_tis() -> None:
    old, sampler = log(0.5, 0.9, 0.1), log(0.5, 0.1, 0.2)
    torch.testing.assert_close(tis_weights(old, sampler, cap=2.0), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    logp = old[None].clone().requires_grad_()
    loss = policy_loss("ppo", logp, old[None], torch.ones(1, 3), torch.ones(1, 3), sampler_logp=sampler[None], tis_cap=2.0)
    assert float(loss.detach()) == pytest.approx(-3.5 / 3)
    loss.backward()
    torch.testing.assert_close(logp.grad, -torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64) / 3)


def test_tokens_or_rows_that_are_far_off_the_sampler_say_nothing() -> None:
    """w = 1, 9, 0.5 in the first row, and 1, 1, 0.8 in the second, whose last token is none."""
    old, sampler = log(0.5, 0.9, 0.1, 0.5, 0.5, 0.4).view(2, 3), log(0.5, 0.1, 0.2, 0.5, 0.5, 0.5).view(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])

    def weights(kind: Correction, low: float, high: float) -> list[list[float]]:
        found = correction_weights(kind, old, sampler, mask, low=low, high=high)
        assert not found.requires_grad
        return [[round(float(w), 6) for w in row] for row in found]

    assert weights("tis", 0.6, 2.0) == [[1.0, 2.0, 0.5], [1.0, 1.0, 0.8]]
    assert weights("icepop", 0.6, 2.0)[0] == [1.0, 0.0, 0.0]
    assert weights("icepop", 0.5 - 1e-9, 10.0)[0] == [1.0, 9.0, 0.5]
    mean = 4.5 ** (1 / 3)
    assert weights("sequence", 0.5, mean + 1e-6) == [[1.0] * 3, [1.0] * 3]
    assert weights("sequence", 0.5, mean - 1e-6) == [[0.0] * 3, [1.0] * 3]
    assert weights("sequence", 1.1, 2.0) == [[1.0] * 3, [0.0] * 3]
    with pytest.raises(ConfigError, match="one of tis, icepop, sequence"):
        correction_weights("none", old, sampler, mask)  # pyright: ignore[reportArgumentType]: the point


def test_a_rejected_row_counts_in_the_denominator() -> None:
    logp = log(0.5, 0.9)[None].repeat(2, 1).requires_grad_()
    sampler = torch.stack([log(0.5, 0.9), log(0.1, 0.1)])
    options: dict[str, Any] = {"sampler_logp": sampler, "tis_cap": 2.0, "correction": "sequence"}
    loss = policy_loss("grpo", logp, logp.detach(), torch.ones(2, 2), torch.ones(2, 2), **options)
    assert float(loss.detach()) == pytest.approx(-0.5)
    loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-0.25, -0.25], [0.0, 0.0]], dtype=torch.float64))


def test_estimates_of_the_divergence() -> None:
    """d = ln 2 and -ln 2."""
    logp, ref = log(0.6, 0.2), log(0.3, 0.4)
    d = math.log(2)
    assert kl_terms(logp, ref, "k1").tolist() == pytest.approx([d, -d])
    assert kl_terms(logp, ref, "k2").tolist() == pytest.approx([d * d / 2, d * d / 2])
    assert kl_terms(logp, ref, "k3").tolist() == pytest.approx([0.5 - 1 + d, 2 - 1 - d])
    with pytest.raises(ConfigError, match="one of k1, k2, k3"):
        kl_terms(logp, ref, "k4")  # pyright: ignore[reportArgumentType]: the point


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimates_have_the_divergence_as_their_mean(kind: KlKind) -> None:
    """Exact, over a distribution of five."""
    pi, ref = torch.softmax(torch.arange(5.0).double(), 0), torch.softmax(torch.tensor([1.0, 3, 0, 2, 2]).double(), 0)
    exact = float((pi * (pi / ref).log()).sum())
    assert float((pi * kl_terms(pi.log(), ref.log(), kind)).sum()) == pytest.approx(exact)


def test_the_gradient_of_k2_is_the_divergences() -> None:
    """On policy: the score-weighted sum over a distribution of five."""
    logits, ref = torch.arange(5.0).double().requires_grad_(), torch.softmax(torch.tensor([1.0, 3, 0, 2, 2]).double(), 0)
    pi = torch.softmax(logits, 0)
    (pi * (pi / ref).log()).sum().backward()
    assert logits.grad is not None
    exact, logits.grad = logits.grad.clone(), None
    logp = torch.log_softmax(logits, 0)
    (pi.detach() * kl_terms(logp, ref.log(), "k2")).sum().backward()
    torch.testing.assert_close(logits.grad, exact)


@pytest.mark.parametrize(("kind", "share"), [("ppo", 1 / 3), ("grpo", 1 / 2)])
def test_the_divergence_has_the_objectives_denominator(kind: LossKind, share: float) -> None:
    """Two rollouts of one and two tokens; without advantages only the divergence is left."""
    logp, ref = torch.full((2, 2), math.log(0.6)), torch.full((2, 2), math.log(0.3))
    mask = torch.tensor([[1, 0], [1, 1]])
    zero = torch.zeros(2, 2)
    loss = policy_loss(kind, logp, logp, zero, mask, kl=0.5, kl_kind="k1", ref_logp=ref)
    assert float(loss) == pytest.approx(0.5 * math.log(2))
    first = torch.tensor([[1, 0], [0, 0]])
    one = policy_loss(kind, logp, logp, zero, first, kl=0.5, kl_kind="k1", ref_logp=ref, denominator=1 / share)
    assert float(one) == pytest.approx(0.5 * math.log(2) * share)


def test_both_forms_of_dppo_have_one_gradient_up_to_the_cap() -> None:
    def of(form: DppoForm, mu: float) -> float:
        logp = log(0.3)[None].requires_grad_()
        policy_loss("dppo", logp, log(mu)[None], torch.ones(1, 1), torch.ones(1, 1), delta=0.5, dppo_form=form).backward()
        assert logp.grad is not None
        return float(logp.grad)

    assert of("ratio", 0.2) == pytest.approx(of("capped", 0.2)) == pytest.approx(-1.5)
    assert of("ratio", 0.01) == pytest.approx(-30.0)
    assert of("capped", 0.01) == pytest.approx(-10.0)


def test_refusals() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="unknown correction"):
        policy_loss("ppo", x, x, x, x, correction="clip")  # pyright: ignore[reportArgumentType]: the point
    with pytest.raises(ConfigError, match="unknown dppo_form"):
        policy_loss("dppo", x, x, x, x, dppo_form="log")  # pyright: ignore[reportArgumentType]: the point
    with pytest.raises(ConfigError, match="reference's log-prob"):
        policy_loss("ppo", x, x, x, x, kl=0.1)
    with pytest.raises(ConfigError, match="corrects twice"):
        policy_loss("ppo", x, x, x, x, sampler_logp=x, tis_cap=2.0, anchor="sampler")
    with pytest.raises(ConfigError, match="corrects twice"):
        policy_loss("dppo", x, x, x, x, sampler_logp=x, tis_cap=2.0)
    for kind in ("tvpo", "dis"):
        with pytest.raises(ConfigError, match="corrects twice"):
            policy_loss(kind, x, x, x, x, sampler_logp=x, tis_cap=2.0)
        with pytest.raises(ConfigError, match="a kind with a clip"):
            policy_loss(kind, x, x, x, x, anchor="sampler", sat=0.9)
    with pytest.raises(ConfigError, match="anchor=sampler"):
        policy_loss("ppo", x, x, x, x, sat=0.9)
    with pytest.raises(ConfigError, match="no quantile"):
        policy_loss("ppo", x, x, x, x, anchor="sampler", sat=1.0)
    with pytest.raises(ConfigError, match="sampler's log-prob"):
        policy_loss("ppo", x, x, x, x, tis_cap=2.0)
    with pytest.raises(ConfigError, match="constant length"):
        policy_loss("dr_grpo", x, x, x, x)
    with pytest.raises(ConfigError, match="one of ppo, grpo"):
        policy_loss("reinforce", x, x, x, x)  # pyright: ignore[reportArgumentType]: the point
    with pytest.raises(ConfigError, match="unknown anchor"):
        policy_loss("ppo", x, x, x, x, anchor="engine")  # pyright: ignore[reportArgumentType]: the point


def test_value_loss() -> None:
    values, returns = torch.tensor([[1.0, 0.5, 9.0]]), torch.tensor([[0.0, 1.0, math.nan]])
    old, mask = torch.tensor([[0.6, 0.4, 0.0]]), torch.tensor([[1, 1, 0]])
    # Clipped: 0.6 + 0.2 -> error 0.64 < 1; 0.4 + 0.1 -> the same 0.25.
    assert float(value_loss(values, returns, old, mask, clip=0.2)) == pytest.approx(0.5 * (1.0 + 0.25) / 2)
    # The clip bites where it makes the error larger: V jumped from 0 past the target's neighbourhood.
    one = torch.ones(1, 1)
    assert float(value_loss(one, one, 0 * one, one, clip=0.2)) == pytest.approx(0.5 * 0.64)
    assert float(value_loss(one, one, 0 * one, one, clip=0.0)) == 0.0
    assert float(value_loss(values, returns, old, mask, clip=0.2, denominator=10)) == pytest.approx(0.5 * 1.25 / 10)
    assert float(value_loss(values, returns, old, 0 * mask, clip=0.2)) == 0.0


def test_sft_loss() -> None:
    logp, mask = torch.tensor([[-1.0, math.nan], [-3.0, -2.0]]), torch.tensor([[1, 0], [1, 1]])
    assert float(sft_loss(logp, mask)) == pytest.approx(2.0)
    assert float(sft_loss(logp, mask, denominator=12)) == pytest.approx(0.5)
    assert float(sft_loss(logp, 0 * mask)) == 0.0
