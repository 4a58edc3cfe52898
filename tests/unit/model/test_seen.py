"""What an update reports of its batch: worked by hand, and shares that agree with the gradient of the loss itself."""

import math

import pytest
import torch

from termrsi.algo import loss as losses
from termrsi.algo.batch import MicroBatch
from termrsi.model.policy import _Seen

# Two sequences, of three and of two action tokens. Ratios to the old policy; sampler against old: 1, 3, 1, 1, 3.
RATIOS = [[1.0, 1.5, 1.5, 1.5], [1.0, 0.5, 1.0, 1.0]]
MASK = [[0, 1, 1, 1], [0, 1, 1, 0]]
ADVANTAGES = [[0.0, 1.0, -1.0, 1.0], [0.0, -1.0, -1.0, 0.0]]
OLD = [[0.0, -3.0, -2.0, -3.0], [0.0, -1.0, -1.0, 0.0]]
WEIGHTS = [[1.0, 1.0, 3.0, 1.0], [1.0, 1.0, 3.0, 1.0]]


def _columns() -> dict[str, torch.Tensor]:
    old = torch.tensor(OLD)
    return {
        "logp": old + torch.tensor(RATIOS).log(),
        "old": old,
        "sampler_logp": old - torch.tensor(WEIGHTS).log(),
        "advantages": torch.tensor(ADVANTAGES),
    }


def _report(options: dict[str, object], *, apart: bool = False) -> dict[str, float]:
    """Of both sequences in one micro-batch, or of each in its own."""
    seen, columns, mask = _Seen(), _columns(), torch.tensor(MASK).bool()
    for rows in ([0], [1]) if apart else ([0, 1],):
        own = {name: column[rows] for name, column in columns.items()}
        given = {name: own[name] for name in ("sampler_logp", "advantages")}
        micro = MicroBatch(tuple(rows), torch.zeros(len(rows), 4), mask[rows], torch.ones(len(rows)), given)
        seen.add(micro, own["logp"], torch.ones(int(mask[rows].sum())), own["old"])
    return seen.report(options)


@pytest.mark.parametrize("kind", ["ppo", "grpo", "reterm", "dapo", "dr_grpo"])
def test_the_clip_is_on_tokens(kind: str) -> None:
    """Clipped: 1.5 upwards twice, 0.5 downwards once; of five."""
    report = _report({"kind": kind})
    assert report["clip_fraction"] == pytest.approx(3 / 5)
    assert report["ratio_max"] == pytest.approx(1.5)
    assert report["ratio_mean"] == pytest.approx((3 * 1.5 + 0.5 + 1.0) / 5)
    assert "mask_fraction" not in report


@pytest.mark.parametrize("apart", [False, True])
def test_the_clip_of_gspo_is_on_sequences(apart: bool) -> None:
    """Ratios 1.5 with a mean advantage of 1/3, clipped, and sqrt(0.5) with -1: clipped at 0.2, within the radius at 0.3."""
    report = _report({"kind": "gspo"}, apart=apart)
    assert report["clip_fraction"] == 1.0
    assert report["ratio_mean"] == pytest.approx((1.5 + math.sqrt(0.5)) / 2)
    assert _report({"kind": "gspo", "clip_low": 0.3}, apart=apart)["clip_fraction"] == 0.5


def test_dppo_masks_and_does_not_clip() -> None:
    """|mu - pi| with mu the sampler's: of the five only e^-1 -> 0.5 e^-1 is over 0.1 and moves away from it."""
    columns = _columns() | {"sampler_logp": torch.tensor(OLD)}
    seen, mask = _Seen(), torch.tensor(MASK).bool()
    given = {name: columns[name] for name in ("sampler_logp", "advantages")}
    seen.add(MicroBatch((0, 1), torch.zeros(2, 4), mask, torch.ones(2), given), columns["logp"], torch.ones(5), columns["old"])
    report = seen.report({"kind": "dppo", "delta": 0.1})
    assert report["mask_fraction"] == pytest.approx(1 / 5)
    assert "clip_fraction" not in report


def test_tvpo_and_dis_mask_instead() -> None:
    """Ratios 1.5 three times, 0.5 and 1: TV is 0.25 in both rows. Beyond 0.2 the tokens with A (pi - mu) > 0 are frozen."""
    mask = torch.tensor(MASK).bool()

    def masked(options: dict[str, object], tv: torch.Tensor | None = None) -> dict[str, float]:
        columns, seen = _columns(), _Seen()
        given = {name: columns[name] for name in ("sampler_logp", "advantages")}
        micro = MicroBatch((0, 1), torch.zeros(2, 4), mask, torch.ones(2), given)
        seen.add(micro, columns["logp"], torch.ones(5), columns["old"], tv)
        return seen.report(options)

    over = masked({"kind": "tvpo", "delta": 0.2}, torch.tensor([0.25, 0.1]))
    assert over["mask_fraction"] == pytest.approx(2 / 5)
    assert over["prompt_tv_max"] == pytest.approx(0.25)
    assert masked({"kind": "tvpo", "delta": 0.2}, torch.tensor([0.19, 0.3]))["mask_fraction"] == pytest.approx(1 / 5)
    assert masked({"kind": "tvpo", "delta": 0.3}, torch.tensor([0.25, 0.25]))["mask_fraction"] == 0.0
    assert masked({"kind": "dis", "clip_low": 0.2, "clip_high": 2.0})["mask_fraction"] == pytest.approx(1 / 5)
    assert masked({"kind": "dis", "clip_low": 0.7, "clip_high": 0.4})["mask_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("kind", ["ppo", "grpo", "reterm", "dapo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("sat", [0.0, 0.4])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.6), (0.6, 0.2), (0.3, 0.3)])
def test_what_is_clipped_has_no_gradient(kind: str, clip: tuple[float, float], sat: float) -> None:
    """The share of tokens, in gspo of sequences, that the loss gives no gradient; here no advantage is 0."""
    columns, mask = _columns(), torch.tensor(MASK).bool()
    logp = columns["logp"].clone().requires_grad_()
    low, high = clip
    losses.policy_loss(
        kind,  # pyright: ignore[reportArgumentType]: one of them
        logp,
        columns["old"],
        columns["advantages"],
        mask,
        clip_low=low,
        clip_high=high,
        max_tokens=4,
        anchor="sampler" if sat else "old",
        sat=sat,
        sat_bound=0.1,
    ).backward()
    assert logp.grad is not None
    still = logp.grad == 0.0
    wanted = still[mask].double().mean() if kind != "gspo" else (still | ~mask).all(1).double().mean()
    options: dict[str, object] = {"kind": kind, "clip_low": low, "clip_high": high}
    options |= {"sat_bound": 0.1} if sat else {}
    assert _report(options)["clip_fraction"] == pytest.approx(float(wanted))


def test_truncated_weights_are_counted_where_there_is_a_cap() -> None:
    """pi_old / mu is 3 on two of five tokens."""
    assert _report({"kind": "ppo", "tis_cap": 2.0})["tis_truncated"] == pytest.approx(2 / 5)
    assert _report({"kind": "gspo", "tis_cap": 2.0})["tis_truncated"] == pytest.approx(2 / 5)
    assert _report({"kind": "ppo", "tis_cap": 4.0})["tis_truncated"] == 0.0
    assert "tis_truncated" not in _report({"kind": "ppo"})


def test_what_a_correction_leaves_out_is_counted() -> None:
    """pi_old / mu of the tokens: WEIGHTS; of the sequences their geometric means."""
    first, second = ([w for w, m in zip(weights, mask, strict=True) if m] for weights, mask in zip(WEIGHTS, MASK, strict=True))
    tokens = [*first, *second]
    icepop = {"kind": "ppo", "tis_cap": 2.0, "correction": "icepop", "correction_low": 0.5}
    assert _report(icepop) | {"correction_dropped": sum(not 0.5 <= w <= 2.0 for w in tokens) / 5} == _report(icepop)
    means = [math.prod(row) ** (1 / len(row)) for row in (first, second)]
    for cap in (min(means) + 0.01, max(means) + 0.01):
        dropped = sum(len(row) for row, mean in zip((first, second), means, strict=True) if mean > cap) / 5
        found = _report({"kind": "ppo", "tis_cap": cap, "correction": "sequence", "correction_low": 0.0})
        assert found["correction_dropped"] == pytest.approx(dropped)
        assert "tis_truncated" not in found


def test_the_gap_is_between_learner_and_sampler() -> None:
    """d = log(ratio x weight) on the five tokens."""
    d = [math.log(x) for x in (1.5, 4.5, 1.5, 0.5, 3.0)]
    report = _report({"kind": "ppo"})
    assert report["sampler_gap_mean"] == pytest.approx(sum(map(abs, d)) / 5)
    assert report["sampler_gap_max"] == pytest.approx(math.log(4.5))
    assert report["sampler_k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 5)
    assert report["entropy"] == 1.0


def test_an_update_that_saw_nothing_reports_nothing() -> None:
    assert _Seen().report({"kind": "ppo"}) == {}
