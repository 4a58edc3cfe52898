"""CriticModel on the tiny model: the prefix before a token is what it values; hand-off; files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from termrsi.errors import CheckpointError, ConfigError
from termrsi.model.checkpoint import tiny_model
from termrsi.model.critic import CriticModel
from termrsi.model.masters import Compute
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample

Make = Callable[..., list[Sample]]
COMPUTE: tuple[Compute, ...] = ("bf16", "fp32")


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_value_knows_what_lies_before_its_token_and_nothing_else(tiny: Path, make_samples: Make, compute: Compute) -> None:
    critic = CriticModel(tiny, compute=compute)
    (sample,) = make_samples(1)
    (values,) = critic.values([sample])
    assert [v != 0.0 for v in values] == [bool(m) for m in sample.mask]
    for k in (i for i, m in enumerate(sample.mask) if m):
        later = dataclasses.replace(sample, ids=(*sample.ids[:k], *(255 - i for i in sample.ids[k:])))
        assert critic.values([later])[0][k] == pytest.approx(values[k], abs=1e-6)
        before = dataclasses.replace(sample, ids=(*sample.ids[: k - 1], 255 - sample.ids[k - 1], *sample.ids[k:]))
        assert critic.values([before])[0][k] != pytest.approx(values[k], abs=1e-6)


def test_values_are_the_head_at_the_hidden_state_before(tiny: Path, make_samples: Make) -> None:
    critic = CriticModel(tiny, compute="fp32", micro_tokens=40)
    samples = make_samples()
    for sample, row in zip(samples, critic.values(samples), strict=True):
        with torch.no_grad():
            states = critic._body(input_ids=torch.tensor([sample.ids])).last_hidden_state[0]
            want = critic._head(states)[:, 0]
        assert row == pytest.approx([float(want[t - 1]) * m for t, m in enumerate(sample.mask)], abs=1e-6)


@pytest.mark.parametrize("compute", COMPUTE)
def test_update_learns_the_returns(tiny: Path, make_samples: Make, compute: Compute) -> None:
    critic = CriticModel(tiny, compute=compute, micro_tokens=40)
    samples = [dataclasses.replace(s, returns=tuple(0.5 * m for m in s.mask)) for s in make_samples()]
    samples[0] = dataclasses.replace(samples[0], returns=tuple(-0.5 * m for m in samples[0].mask))
    first = critic.update(samples, lr=1e-3, value_clip=0.0)
    assert first.loss == pytest.approx(0.125, rel=0.1)  # values start near 0
    for _ in range(29):
        critic.update(samples, lr=1e-3, value_clip=0.0)
    last = critic.update(samples, lr=1e-3, value_clip=0.0)
    assert last.loss < first.loss / 3
    assert last.extra["explained_variance"] > 0.2
    constant = [dataclasses.replace(s, returns=tuple(0.1 * m for m in s.mask)) for s in samples]
    assert "explained_variance" not in critic.update(constant, lr=0.0, value_clip=0.0).extra


def test_micro_batches_change_nothing(tiny: Path, make_samples: Make) -> None:
    results = []
    for budget in (10_000, 1):
        critic = CriticModel(tiny, compute="fp32", micro_tokens=budget)
        metrics = critic.update(make_samples(), lr=1e-3, value_clip=0.2)
        results.append((metrics.loss, metrics.grad_norm, critic.weights_only()))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    for name, weight in results[0][2].items():
        torch.testing.assert_close(weight, results[1][2][name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("compute", COMPUTE)
def test_hand_off_is_equal_weights_and_a_fresh_optimizer(tiny: Path, make_samples: Make, compute: Compute) -> None:
    old, new = (CriticModel(tiny, compute=compute, seed=seed) for seed in (0, 1))
    for critic in (old, new):
        critic.update(make_samples(), lr=1e-3, value_clip=0.2)
        assert not critic.fresh_optimizer
    weights = old.weights_only()
    assert new.load_weights(weights) == old.checksum()
    assert new.fresh_optimizer
    assert new.values(make_samples()) == old.values(make_samples())
    for name, weight in new.weights_only().items():
        assert torch.equal(weight, weights[name])
    new.update(make_samples(), lr=1e-2, value_clip=0.2)  # copies: the old critic does not move
    assert new.checksum() != old.checksum()
    for name, weight in old.weights_only().items():
        assert torch.equal(weight, weights[name])
    with pytest.raises(CheckpointError, match="another model"):
        new.load_weights({"value_head.bias": torch.zeros(1)})


@pytest.mark.parametrize("compute", COMPUTE)
def test_save_and_load(tiny: Path, tmp_path: Path, make_samples: Make, compute: Compute) -> None:
    critic = CriticModel(tiny, compute=compute)
    critic.update(make_samples(), lr=1e-3, value_clip=0.2)
    saved = critic.save(tmp_path / "critic")
    other = CriticModel(tmp_path / "critic", compute=compute, seed=9)
    assert other.checksum() == saved == critic.checksum()
    assert other.fresh_optimizer
    if compute == "bf16":  # the values come from bf16 copies, so the round trip is exact
        assert other.values(make_samples()) == critic.values(make_samples())
    (tmp_path / "critic" / "manifest.json").unlink()
    (tmp_path / "critic" / "value_head.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="value head"):
        CriticModel(tmp_path / "critic")


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_refit_is_of_the_head_alone(tiny: Path, make_samples: Make, compute: Compute) -> None:
    critic = CriticModel(tiny, compute=compute)
    critic.update(make_samples(), lr=1e-2, value_clip=0.0)
    before, weights = critic.values(make_samples()), critic.weights_only()
    critic.refit(-2.5, 0.75)
    assert critic.fresh_optimizer
    for row, old, sample in zip(critic.values(make_samples()), before, make_samples(), strict=True):
        assert row == pytest.approx([(-2.5 * v + 0.75) * m for v, m in zip(old, sample.mask, strict=True)], abs=1e-5)
    for name, weight in critic.weights_only().items():
        assert torch.equal(weight, weights[name]) != name.startswith("value_head.")
    refitted = critic.checksum()
    critic.update(make_samples(), lr=1e-2, value_clip=0.0)  # the refitted head is the one that learns
    assert critic.checksum() != refitted
    with pytest.raises(ValueError, match="must be finite"):
        critic.refit(float("nan"), 0.0)


def test_actor_and_critic_share_nothing(tiny: Path, make_samples: Make) -> None:
    policy, critic = PolicyModel(tiny), CriticModel(tiny)
    start = policy.checksum(), critic.checksum()
    for _ in range(4):  # calibration: the actor stays bit for bit
        critic.update(make_samples(), lr=1e-3, value_clip=0.2)
    assert policy.checksum() == start[0]
    calibrated = critic.checksum()
    assert calibrated != start[1]
    policy.fit(make_samples(), lr=1e-3)
    assert critic.checksum() == calibrated


def test_a_new_head_is_small_and_seeded(tiny: Path, tmp_path: Path) -> None:
    heads = [CriticModel(tiny, seed=seed).weights_only() for seed in (0, 0, 1)]
    weights = [head["value_head.weight"] for head in heads]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert float(weights[0].abs().max()) < 0.01
    assert float(heads[0]["value_head.bias"]) == 0.0
    broken = tiny_model(tmp_path / "broken")
    (broken / "manifest.json").unlink()
    (broken / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        CriticModel(broken)


def test_a_new_critic_may_keep_the_first_blocks_only(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    """Its values are the head on the shallower body; a saved one keeps its depth, and is handed on to its like alone."""
    whole, short = CriticModel(tiny, compute="fp32"), CriticModel(tiny, compute="fp32", layers=1)
    kept = short.weights_only()
    assert set(kept) < set(whole.weights_only())
    assert all(torch.equal(weight, whole.weights_only()[name]) for name, weight in kept.items())
    assert {name.split(".")[2] for name in kept if name.startswith("body.layers.")} == {"0"}
    (sample,) = make_samples(1)
    with torch.no_grad():
        states = whole._body(input_ids=torch.tensor([sample.ids]), output_hidden_states=True)
        want = short._head(whole._body.get_submodule("norm")(states.hidden_states[1][0]))[:, 0]
    assert short.values([sample])[0] == pytest.approx([float(want[t - 1]) * m for t, m in enumerate(sample.mask)], abs=1e-6)
    short.save(tmp_path / "critic")
    for layers in (0, 2):
        assert CriticModel(tmp_path / "critic", layers=layers).weights_only().keys() == kept.keys()
    with pytest.raises(CheckpointError, match="another model"):
        whole.load_weights(kept)
    with pytest.raises(ConfigError, match="critic_layers=3") as caught:
        CriticModel(tiny, layers=3)
    assert "0 (all) to 2" in str(caught.value)


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_resumed_critic_goes_on_bit_for_bit(tiny: Path, tmp_path: Path, make_samples: Make, compute: Compute) -> None:
    """Head, body and both moments; of a critic of another depth it is refused."""
    critic = CriticModel(tiny, compute=compute, layers=1)
    for seed in range(2):
        critic.update(make_samples(seed=seed), lr=1e-3, value_clip=0.0)
    assert critic.save_training(tmp_path / "training") == critic.checksum()
    other = CriticModel(tiny, compute=compute, layers=1)
    assert other.load_training(tmp_path / "training") == critic.checksum()
    assert not other.fresh_optimizer
    for model in (critic, other):
        model.update(make_samples(seed=3), lr=1e-3, value_clip=0.0)
    for name, weight in critic.weights_only().items():
        assert torch.equal(weight, other.weights_only()[name])
    with pytest.raises(CheckpointError, match="of another model"):
        CriticModel(tiny, compute=compute).load_training(tmp_path / "training")
