"""Against the functions of verl and TRL themselves, under the interpreter of .venv-peers: where they compute what we do, they
find the same; where they do not, a test says what differs. Skipped where `launch/test.sh` could not install them.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from termrsi.algo.advantage import group_relative, turn_boundary_gae_batch, whiten
from termrsi.algo.loss import LossKind, policy_loss, tis_weights, value_loss
from termrsi.algo.metrics import logp_gap

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="no verl and no TRL: launch/test.sh makes .venv-peers where it can install them"
    ),
]

SEEDS = (0, 1, 2)
ROWS, LENGTH = 6, 48
NUMBERS = {"gamma": 0.97, "lam": 0.9, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 2.0, "tis_cap": 2.0, "delta": 0.1}
COUNTS = {"max_tokens": 100, "batch_tokens": 500, "batch_rollouts": 16}
Arrays = dict[str, Any]  # numpy arrays, and numbers by the names above


def draw(seed: int) -> Arrays:
    """Rows of a prompt and turns; the last row has no action token. Ratios reach beyond every clip."""
    rng = np.random.default_rng(seed)
    mask, turn_ids = np.zeros((ROWS, LENGTH)), np.zeros((ROWS, LENGTH), np.int64)
    for row in range(ROWS - 1):
        at, turn = int(rng.integers(1, 6)), 0
        while at < LENGTH - 8 * (row % 3):
            actions, seen = int(rng.integers(1, 9)), int(rng.integers(0, 6))
            mask[row, at : at + actions] = 1
            turn_ids[row, at : at + actions + seen] = turn
            at, turn = at + actions + seen, turn + 1
        turn_ids[row, at:] = turn
    shape = mask.shape
    old_logp = -rng.exponential(1.0, shape)
    moved = rng.normal(0, 0.4, (ROWS, 1)) + rng.normal(0, 0.8, shape)  # whole rollouts too, for the clip of sequences
    logp = np.minimum(old_logp + moved, -1e-3)
    advantages = rng.normal(size=shape)
    row_advantages = np.repeat(rng.normal(size=(ROWS, 1)), LENGTH, 1)
    arrays = {"mask": mask, "turn_ids": turn_ids, "old_logp": old_logp, "logp": logp}
    arrays |= {"advantages": advantages, "row_advantages": row_advantages}
    arrays["sampler_logp"] = np.minimum(old_logp + rng.normal(0, 0.5, shape), -1e-3)
    arrays |= {name: rng.normal(size=shape) for name in ("rewards", "values", "targets")}
    arrays["new_values"] = arrays["values"] + rng.normal(0, 0.4, shape)
    arrays |= {"outcomes": rng.random(9), "groups": np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])}
    return arrays | {"value_clip": 0.2} | NUMBERS | COUNTS


def ask(verb: str, directory: Path, batches: list[Arrays]) -> list[Arrays]:
    """What the peer answers to each."""
    paths = [directory / f"{number}.npz" for number in range(len(batches))]
    for path, batch in zip(paths, batches, strict=True):
        np.savez(path, **batch)
    command = [str(PYTHON), str(ROOT / "tests" / "peer_side.py"), verb, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = []
    for path in paths:
        with np.load(path.with_suffix(f".{verb}.npz")) as stored:
            answers.append(dict(stored))
    return answers


@pytest.fixture(scope="module")
def batches() -> list[Arrays]:
    return [draw(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def verl(batches: list[Arrays], tmp_path_factory: pytest.TempPathFactory) -> list[Arrays]:
    """verl's answers; the one after those of `batches` is to the first of them with NaN values off the mask."""
    holed = batches[0] | {"values": np.where(batches[0]["mask"] == 1, batches[0]["values"], np.nan)}
    return ask("verl", tmp_path_factory.mktemp("verl"), [*batches, holed])


@pytest.fixture(scope="module")
def trl(batches: list[Arrays], tmp_path_factory: pytest.TempPathFactory) -> list[Arrays]:
    return ask("trl", tmp_path_factory.mktemp("trl"), batches)


def skip(x: Arrays, **changed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    given = x | changed
    return turn_boundary_gae_batch(
        given["rewards"], given["values"], given["turn_ids"], given["mask"], gamma=x["gamma"], lam=x["lam"], credit="skip"
    )


def ours(x: Arrays, kind: LossKind, advantages: str = "advantages", **options: Any) -> tuple[float, np.ndarray]:
    """Our loss and its gradient by the log-probabilities."""
    logp = torch.tensor(x["logp"], requires_grad=True)
    old_logp, given, mask = (torch.tensor(x[name]) for name in ("old_logp", advantages, "mask"))
    clips = {"clip_low": x["clip_low"], "clip_high": x["clip_high"]}
    loss = policy_loss(kind, logp, old_logp, given, mask, **clips, **options)
    loss.backward()
    assert logp.grad is not None
    return float(loss.detach()), logp.grad.numpy()


def assert_same_loss(theirs: Arrays, name: str, found: tuple[float, np.ndarray], rtol: float = 1e-10) -> None:
    np.testing.assert_allclose(theirs[name], found[0], rtol=rtol)
    np.testing.assert_allclose(theirs[f"{name} gradient"], found[1], rtol=rtol, atol=1e-15)


@pytest.fixture(scope="module", params=SEEDS)
def case(request: pytest.FixtureRequest, batches: list[Arrays], verl: list[Arrays]) -> tuple[Arrays, Arrays]:
    """A batch, and what verl answers."""
    at = SEEDS.index(request.param)
    return batches[at], verl[at]


def test_verls_advantages_are_the_skip_arm(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    on = x["mask"] == 1
    advantages, returns = skip(x)
    np.testing.assert_allclose(theirs["returns"][on], returns[on], rtol=0, atol=1e-12)
    whitened = np.stack(whiten(list(advantages), list(x["mask"])))
    # Both whiten over the batch; verl by the sample deviation, which divides by one token less.
    bessel = np.sqrt((on.sum() - 1) / on.sum())
    np.testing.assert_allclose(theirs["advantages"][on], whitened[on] * bessel, rtol=0, atol=1e-7)


def test_verl_leaves_numbers_off_the_mask_where_ours_are_zero(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    off = x["mask"] == 0
    assert (theirs["returns"][off] != 0).any()
    assert (theirs["advantages"][off] != 0).any()
    assert not any(found[off].any() for found in skip(x))


def test_verl_reads_values_off_the_mask_where_we_do_not(batches: list[Arrays], verl: list[Arrays]) -> None:
    x, theirs = batches[0], verl[len(SEEDS)]
    on = x["mask"] == 1
    assert np.isnan(theirs["returns"][on]).any()
    holed = skip(x, values=np.where(on, x["values"], np.nan))
    for found, whole in zip(holed, skip(x), strict=True):
        np.testing.assert_array_equal(found, whole)


def test_verls_group_advantages_divide_by_the_sample_deviation_ours_by_that_of_the_group(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    for group in (0, 1):
        at = x["groups"] == group
        np.testing.assert_allclose(theirs["group centred"][at], group_relative(x["outcomes"][at], normalise=False), rtol=1e-6)
        shrunk = group_relative(x["outcomes"][at]) * np.sqrt((at.sum() - 1) / at.sum())
        np.testing.assert_allclose(theirs["group"][at], shrunk, rtol=1e-5)
    # A group of one has nothing to compare with: no signal of ours, the reward itself in verl.
    assert theirs["group centred"][-1] == pytest.approx(x["outcomes"][-1])
    assert group_relative(x["outcomes"][-1:]) == 0.0


# Options of ours beside verl's settings. verl adds 1e-8 to the number of tokens of a rollout: hence the tolerance.
SAME_LOSSES: dict[str, tuple[LossKind, dict[str, Any], float]] = {
    "ppo": ("ppo", {}, 1e-10),
    "ppo of more": ("ppo", {"denominator": COUNTS["batch_tokens"]}, 1e-10),
    "grpo": ("grpo", {}, 1e-7),
    "grpo of more": ("grpo", {"denominator": COUNTS["batch_rollouts"]}, 1e-7),
    "dr_grpo": ("dr_grpo", {"max_tokens": COUNTS["max_tokens"]}, 1e-10),
    "gspo": ("gspo", {"advantages": "row_advantages"}, 1e-7),
}


@pytest.mark.parametrize("name", SAME_LOSSES)
def test_verls_loss_and_gradient_are_ours(case: tuple[Arrays, Arrays], name: str) -> None:
    kind, options, rtol = SAME_LOSSES[name]
    assert_same_loss(case[1], name, ours(case[0], kind, **options), rtol)


def test_verls_dual_clip_caps_what_the_papers_loss_does_not(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    capped = (x["mask"] == 1) & (x["advantages"] < 0) & (x["logp"] - x["old_logp"] > np.log(x["dual_clip"]))
    gradient = ours(x, "ppo")[1]
    assert capped.any()
    np.testing.assert_allclose(theirs["ppo dual gradient"], np.where(capped, 0.0, gradient), rtol=1e-10, atol=1e-15)
    assert (gradient[capped] != 0).all()


def test_verls_gspo_gives_each_token_its_own_advantage_ours_that_of_the_rollout(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    on = x["mask"][0] == 1
    assert np.ptp(theirs["gspo by token gradient"][0][on]) > 1e-3
    assert np.ptp(ours(x, "gspo")[1][0][on]) < 1e-15


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_verls_dppo_has_our_gradient_but_another_value(case: tuple[Arrays, Arrays], divergence: str) -> None:
    x, theirs = case
    value, gradient = ours(x, "dppo", delta=x["delta"], divergence=divergence)
    np.testing.assert_allclose(theirs[f"dppo {divergence} gradient"], gradient, rtol=1e-10, atol=1e-15)
    # Its ratio is a constant before log pi; ours carries the gradient itself.
    assert theirs[f"dppo {divergence}"] != pytest.approx(value, rel=1e-3)


def test_verls_truncated_importance_weights_are_ours(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    on = x["mask"] == 1
    old_logp, sampler_logp = torch.tensor(x["old_logp"]), torch.tensor(x["sampler_logp"])
    np.testing.assert_allclose(theirs["tis"][on], tis_weights(old_logp, sampler_logp, cap=x["tis_cap"])[on], rtol=1e-12)
    assert (theirs["tis"][on] == x["tis_cap"]).any()
    assert_same_loss(theirs, "ppo tis", ours(x, "ppo", sampler_logp=sampler_logp, tis_cap=x["tis_cap"]))


def test_verls_value_loss_is_ours(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    new, targets, old, mask = (torch.tensor(x[name]) for name in ("new_values", "targets", "values", "mask"))
    assert theirs["value"] == pytest.approx(float(value_loss(new, targets, old, mask, clip=x["value_clip"])), rel=1e-12)


def test_verls_kl_estimators_are_those_of_our_metrics(case: tuple[Arrays, Arrays]) -> None:
    x, theirs = case
    on = x["mask"] == 1
    gap = logp_gap(x["logp"][on], x["sampler_logp"][on])
    assert gap.mean == pytest.approx(theirs["abs"][on].mean(), rel=1e-12)
    assert gap.max == pytest.approx(np.abs(theirs["k1"][on]).max(), rel=1e-12)
    assert gap.max == pytest.approx(np.sqrt(2 * theirs["k2"][on].max()), rel=1e-12)
    own = [logp_gap(pair[:1], pair[1:]).k3 for pair in np.stack([x["logp"], x["sampler_logp"]], -1)[on]]
    assert gap.k3 == pytest.approx(np.mean(own), rel=1e-12)
    np.testing.assert_allclose(theirs["k3"][on], np.minimum(own, 10.0), rtol=1e-9)  # verl cuts each token's k3 at 10


# TRL divides by all rollouts; ours leaves those without action tokens out, and the last row has none.
TRL_LOSSES: dict[str, tuple[LossKind, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "dapo": ("dapo", {}),
    "grpo": ("grpo", {"denominator": ROWS}),
    "dr_grpo": ("dr_grpo", {"denominator": ROWS, "max_tokens": COUNTS["max_tokens"]}),
    "gspo": ("gspo", {"denominator": ROWS, "advantages": "row_advantages"}),
}


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_trls_loss_and_gradient_are_ours(batches: list[Arrays], trl: list[Arrays], name: str) -> None:
    kind, options = TRL_LOSSES[name]
    for x, theirs in zip(batches, trl, strict=True):
        assert_same_loss(theirs, name, ours(x, kind, **options))


def test_trl_counts_rollouts_without_action_tokens_where_we_do_not(batches: list[Arrays], trl: list[Arrays]) -> None:
    for x, theirs in zip(batches, trl, strict=True):
        assert theirs["grpo"] == pytest.approx(ours(x, "grpo")[0] * (ROWS - 1) / ROWS, rel=1e-10)
