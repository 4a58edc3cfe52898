"""Adapters on a tiny model: what is trained, what is handed out, what is saved and gone on from."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from termrsi import weights
from termrsi.errors import CheckpointError, ConfigError, WeightsError
from termrsi.model import lora
from termrsi.model.checkpoint import checksum, tiny_model
from termrsi.model.lora import Lora
from termrsi.model.masters import Compute
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample
from tests.moe_models import tiny_moe

Make = Callable[..., list[Sample]]
COMPUTE: tuple[Compute, ...] = ("bf16", "fp32")
SOME = Lora(4, alpha=16.0, targets=("q_proj", "down_proj"))
TARGETED = {f"model.layers.{k}.{name}.weight" for k in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}


def trained(tiny: Path, samples: list[Sample], compute: Compute = "fp32", lr: float = 1e-2) -> PolicyModel:
    policy = PolicyModel(tiny, compute=compute, adapters=SOME)
    for _ in range(3):
        policy.fit(samples, lr)
    return policy


def by_hand(base: Mapping[str, Tensor], masters: Mapping[str, Tensor], adapters: Lora) -> dict[str, Tensor]:
    """W + alpha / rank x B A in float64, for the targeted ones."""
    made = {name: weight.double() for name, weight in base.items()}
    for name in masters:
        if ".lora_A." in name:
            layer, other = name.partition(".lora_A.")[0], masters[name.replace(".lora_A.", ".lora_B.")]
            made[f"{layer}.weight"] += adapters.alpha / adapters.rank * other.double() @ masters[name].double()
    return made


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


@pytest.mark.parametrize("compute", COMPUTE)
def test_new_adapters_change_nothing(tiny: Path, make_samples: Make, compute: Compute) -> None:
    plain, policy = PolicyModel(tiny, compute=compute), PolicyModel(tiny, compute=compute, adapters=Lora(4))
    assert policy.checksum() == plain.checksum()
    assert policy.state().keys() == plain.state().keys()
    assert policy.logp(make_samples()) == plain.logp(make_samples())


@pytest.mark.parametrize("compute", COMPUTE)
def test_adapters_alone_are_trained(tiny: Path, make_samples: Make, compute: Compute) -> None:
    """Base as it was, in bf16; masters and moments for A and B of every targeted layer, float32."""
    policy = trained(tiny, make_samples(), compute=compute)
    base = {n: p for n, p in policy._module.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in base.values()} == {torch.bfloat16 if compute == "bf16" else torch.float32}
    source = PolicyModel(tiny).state()
    assert {n.replace(".base_layer.", "."): n for n in base}.keys() == source.keys()
    assert all(torch.equal(p.bfloat16(), source[n.replace(".base_layer.", ".")]) for n, p in base.items())
    masters = policy._masters.weights()
    layers = {name.removesuffix(".weight") for name in TARGETED}
    assert masters.keys() == {f"{layer}.lora_{x}.default.weight" for layer in layers for x in "AB"}
    assert {w.dtype for w in masters.values()} == {torch.float32}
    assert sum(len(optimizer.state) for _, optimizer in policy._masters._buckets) == len(masters)
    assert all((w != 0).any() for w in masters.values())


def test_an_update_is_that_of_the_chain_rule(tiny: Path, make_samples: Make) -> None:
    """B begins at 0: its first gradient is alpha / rank x dW A^T, and A's is 0, with dW the full model's own."""
    samples, seen = make_samples(), {}
    for adapters in (None, SOME):
        policy = PolicyModel(tiny, compute="fp32", adapters=adapters, max_grad_norm=1e9)
        masters = policy._masters
        step = masters.step
        policy._masters.step = lambda lr, step=step, masters=masters: (  # type: ignore[method-assign]  # to look in between
            seen.update({n: p.grad.clone() for n, p in masters._masters.items() if p.grad is not None}) or step(lr)
        )
        policy.fit(samples, lr=0.0)
    start = PolicyModel(tiny, adapters=SOME)._masters.weights()
    for name in TARGETED:
        layer = name.removesuffix(".weight")
        a = start[f"{layer}.lora_A.default.weight"]
        wanted = SOME.alpha / SOME.rank * seen[name] @ a.T
        torch.testing.assert_close(seen[f"{layer}.lora_B.default.weight"], wanted, rtol=1e-4, atol=1e-7)
        assert not seen[f"{layer}.lora_A.default.weight"].any()


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_is_published_is_merged(tiny: Path, make_samples: Make, compute: Compute) -> None:
    """Exactly the targeted tensors differ from the base's, and are W + alpha / rank x B A of the masters, cast once."""
    base = {name: tensor.clone() for name, tensor in PolicyModel(tiny).state().items()}
    policy = trained(tiny, make_samples(), compute=compute)
    state = policy.state()
    assert {name for name in base if not torch.equal(base[name], state[name])} == TARGETED
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    exact = by_hand(base, policy._masters.weights(), SOME)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor.double(), exact[name], rtol=2**-8, atol=1e-8)  # half a step of bf16, and its float32
    assert policy.checksum() == checksum(state) != checksum(base)


def test_what_is_published_has_the_adapters_in_it(tiny: Path, make_samples: Make) -> None:
    """An engine that kept the base would have other digests, and the comparison name a targeted tensor."""
    policy = trained(tiny, make_samples())
    published, base = (weights.facts_of(weights.pack(one.state())) for one in (policy, PolicyModel(tiny)))
    assert weights.checksum(published) != weights.checksum(base)
    assert weights.checksum(published) == policy.checksum()
    with pytest.raises(WeightsError, match=r"layers\.0\.(self_attn\.q_proj|mlp\.down_proj)\.weight differs"):
        weights.compare(weights.digests(published), weights.digests(base))


def test_the_merged_model_is_the_one_with_adapters(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    """In float32 to rounding; saved in bf16, within what bf16 resolves."""
    policy, samples = trained(tiny, make_samples(), lr=3e-2), make_samples(seed=1)
    wanted, before = flat(policy.logp(samples)), flat(PolicyModel(tiny, compute="fp32").logp(samples))
    assert max(abs(a - b) for a, b in zip(wanted, before, strict=True)) > 0.1
    base = {name: tensor.float() for name, tensor in PolicyModel(tiny).state().items()}
    whole = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    made = by_hand(base, policy._masters.weights(), SOME)
    whole.load_state_dict({name: tensor.float() for name, tensor in made.items()}, strict=False)
    whole.save_pretrained(tmp_path / "whole")
    assert flat(PolicyModel(tmp_path / "whole", compute="fp32").logp(samples)) == pytest.approx(wanted, abs=1e-5)
    policy.save(tmp_path / "policy")
    assert flat(PolicyModel(tmp_path / "policy", compute="fp32").logp(samples)) == pytest.approx(wanted, abs=0.01)


def test_a_saved_policy_is_a_plain_one_with_the_adapters_beside(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    policy = trained(tiny, make_samples())
    saved = policy.save(tmp_path / "policy")
    assert saved == policy.checksum() == checksum(load_file(tmp_path / "policy" / "model.safetensors"))
    assert PolicyModel(tmp_path / "policy").checksum() == saved, "without adapters: as any other model"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    found = PeftModel.from_pretrained(base, tmp_path / "policy" / "adapter")
    ids = torch.tensor([make_samples(1)[0].ids])
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=0.02)
        torch.testing.assert_close(found(input_ids=ids).logits, policy._module(input_ids=ids).logits, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "policy" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny)


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_saved_policy_goes_on_with_its_adapters(tiny: Path, tmp_path: Path, make_samples: Make, compute: Compute) -> None:
    """By the learner that saved it or another of the same base; not rounded on the way. The base itself begins anew."""
    policy = trained(tiny, make_samples(), compute=compute)
    start, saved, masters = PolicyModel(tiny).checksum(), policy.save(tmp_path / "policy"), policy._masters.weights()
    other = PolicyModel(tiny, compute=compute, adapters=SOME)
    for learner in (other, policy):
        learner.fit(make_samples(seed=1), lr=1e-2)
        assert learner.load(tmp_path / "policy") == saved
        assert not learner._masters.has_moments
        assert all(torch.equal(weight, masters[name]) for name, weight in learner._masters.weights().items())
    assert other.save(tmp_path / "again") == saved
    assert policy.load(tiny) == start
    assert not any(weight.any() for name, weight in policy._masters.weights().items() if "lora_B" in name)


def test_adapters_of_other_settings_or_another_base_are_part_of_a_new_base(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    saved = trained(tiny, make_samples()).save(tmp_path / "policy")
    elsewhere = tiny_model(tmp_path / "elsewhere", seed=1)
    settings = (dataclasses.replace(SOME, rank=2), dataclasses.replace(SOME, alpha=8.0), Lora(4, alpha=16.0))
    for base, adapters in [*((tiny, one) for one in settings), (elsewhere, SOME)]:
        policy = PolicyModel(base, compute="fp32", adapters=adapters)
        assert policy.load(tmp_path / "policy") == saved
        assert policy._base.directory == tmp_path / "policy"
        assert not any(weight.any() for name, weight in policy._masters.weights().items() if "lora_B" in name)
        policy.fit(make_samples(), lr=1e-2)
        assert policy.checksum() != saved


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_resumed_run_goes_on_bit_for_bit(tiny: Path, tmp_path: Path, make_samples: Make, compute: Compute) -> None:
    """What is kept for that is of the adapters alone."""
    policy = trained(tiny, make_samples(), compute=compute)
    assert policy.save_training(tmp_path / "training") == policy.checksum()
    kept = load_file(tmp_path / "training" / "training-00000.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name for name in kept)
    other = PolicyModel(tiny, compute=compute, adapters=SOME)
    assert other.load_training(tmp_path / "training") == policy.checksum()
    for model in (policy, other):
        model.fit(make_samples(seed=1), lr=1e-3)
    assert policy.checksum() == other.checksum()
    for name, weight in policy._masters.weights().items():
        assert torch.equal(weight, other._masters.weights()[name])
    with pytest.raises(CheckpointError, match="of another model"):
        PolicyModel(tiny, adapters=Lora(2)).load_training(tmp_path / "training")


def test_checkpointing_and_shared_beginnings_change_nothing(tiny: Path, make_samples: Make) -> None:
    samples = [dataclasses.replace(s, ids=(*range(60, 64), *s.ids[4:])) for s in make_samples(6)]
    found = []
    for checkpointing, sharing in ((False, False), (True, False), (False, True)):
        policy = PolicyModel(tiny, compute="fp32", adapters=SOME, gradient_checkpointing=checkpointing, share_prefix=sharing)
        metrics = policy.update(samples, {"kind": "grpo", "anchor": "current"}, lr=1e-3)
        found.append((metrics.loss, metrics.grad_norm, flat(policy.logp(samples))))
    (loss, norm, after), *others = found
    assert norm > 0.0
    for other in others:
        assert (other[0], other[1]) == (pytest.approx(loss, abs=1e-6), pytest.approx(norm, rel=1e-4))
        assert other[2] == pytest.approx(after, abs=1e-3)


def test_every_linear_layer_but_the_head_unless_told(tiny: Path, tmp_path: Path) -> None:
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    policy = PolicyModel(tiny, adapters=Lora(1))
    assert set(policy._base.targets) == every
    assert len(policy._masters.weights()) == 2 * 2 * 7
    moe = tiny_moe(tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"lora_targets: experts get no adapters.*k_proj, o_proj, q_proj, v_proj"):
        PolicyModel(moe, adapters=Lora(2))
    policy = PolicyModel(moe, adapters=Lora(2, targets=("q_proj", "v_proj")))
    assert len(policy._masters.weights()) == 3 * 2 * 2


def test_refusals(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_targets: no linear layer is called 'lm_head'.*down_proj, gate_proj"):
        PolicyModel(tiny, adapters=Lora(2, targets=("q_proj", "lm_head")))


def test_the_same_adapters_every_time(tiny: Path) -> None:
    torch.manual_seed(7)
    first, state = PolicyModel(tiny, adapters=SOME)._masters.weights(), torch.get_rng_state()
    torch.manual_seed(8)
    second = PolicyModel(tiny, adapters=SOME)._masters.weights()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), state), "and the process's own generator is as it was"
    assert lora.FOLDER == "adapter"
