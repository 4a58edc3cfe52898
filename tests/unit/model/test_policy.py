"""PolicyModel on the tiny model: right numbers, learning, splitting, and files that come back bit for bit."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from termrsi.errors import CheckpointError, ConfigError
from termrsi.model.checkpoint import checksum, tiny_model
from termrsi.model.masters import Compute
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample

Make = Callable[..., list[Sample]]
COMPUTE: tuple[Compute, ...] = ("bf16", "fp32")


def with_logp(samples: list[Sample], logps: list[list[float]]) -> list[Sample]:
    return [dataclasses.replace(s, old_logp=tuple(lp), sampler_logp=tuple(lp)) for s, lp in zip(samples, logps, strict=True)]


def fp32_weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return policy._masters.weights()


def test_logp_equals_the_full_softmax(tiny: Path, make_samples: Make) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    samples = make_samples()
    got = PolicyModel(tiny, compute="fp32", micro_tokens=40).logp(samples)
    for sample, row in zip(samples, got, strict=True):
        with torch.no_grad():
            full = torch.log_softmax(model(torch.tensor([sample.ids])).logits[0], 1)
        want = [full[t - 1, i].item() if m else 0.0 for t, (i, m) in enumerate(zip(sample.ids, sample.mask, strict=True))]
        assert row == pytest.approx(want, abs=1e-5)
    half = PolicyModel(tiny, compute="bf16").logp(samples)
    for a, b in zip(got, half, strict=True):
        assert a == pytest.approx(b, abs=0.05)


@pytest.mark.parametrize("kind", ["ppo", "grpo", "dapo", "dr_grpo", "gspo", "dppo", "reterm"])
def test_micro_batches_change_nothing(tiny: Path, make_samples: Make, kind: str) -> None:
    """One micro-batch, and one row at a time."""
    after = []
    for budget in (10_000, 1):
        policy = PolicyModel(tiny, compute="fp32", micro_tokens=budget)
        samples = with_logp(make_samples(), policy.logp(make_samples()))
        metrics = policy.update(samples, {"kind": kind, "max_tokens": 30}, lr=1e-3)
        assert metrics.extra["micro_batches"] == (1 if budget > 1 else 5)
        assert metrics.tokens == sum(sum(s.mask) for s in samples)
        after.append((metrics, fp32_weights(policy)))
    (one, weights), (many, others) = after
    assert one.loss == pytest.approx(many.loss, abs=1e-6)
    assert one.grad_norm == pytest.approx(many.grad_norm, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-4)


LOSSES: list[dict[str, object]] = [
    {"kind": "tvpo", "delta": 0.1},
    {"kind": "dis", "clip_low": 0.2, "clip_high": 0.2},
    {"kind": "grpo", "anchor": "sampler", "sat": 0.6},
    {"kind": "gspo", "anchor": "sampler", "sat": 0.6, "clip_low": 0.001, "clip_high": 0.002},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss["kind"]))
def test_what_is_of_the_whole_batch_is_not_of_a_micro_batch(tiny: Path, make_samples: Make, loss: dict[str, object]) -> None:
    """Two prompts, whose rollouts stand in different micro-batches; the sampler was at some distance, from one of them far."""
    after = []
    for budget in (10_000, 1):
        policy = PolicyModel(tiny, compute="fp32", micro_tokens=budget)
        samples = []
        for i, (sample, logp) in enumerate(zip(make_samples(), policy.logp(make_samples()), strict=True)):
            moved = [(0.4 if i % 2 else 0.1) * math.sin(3.0 * k + i) for k in range(len(logp))]
            mu = tuple(x - d if m else 0.0 for x, d, m in zip(logp, moved, sample.mask, strict=True))
            samples.append(dataclasses.replace(sample, group_id=f"g{i % 2}", sampler_logp=mu))
        idle = dataclasses.replace(samples[1], advantages=(0.0,) * len(samples[1].ids))  # without advantage, and part of its prompt
        metrics = policy.update([samples[0], idle, *samples[2:]], loss, lr=1e-3)
        after.append((metrics, fp32_weights(policy)))
    (one, weights), (many, others) = after
    assert one.loss == pytest.approx(many.loss, abs=1e-6)
    assert one.grad_norm == pytest.approx(many.grad_norm, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-4)
    for name in ("mask_fraction", "clip_fraction", "prompt_tv_max"):
        assert one.extra.get(name) == pytest.approx(many.extra.get(name))
    assert 0.0 < one.extra.get("mask_fraction", one.extra.get("clip_fraction", 0.0)) < 1.0
    if loss["kind"] == "tvpo":  # |e^d - 1| / 2 of both rollouts of the far prompt, the idle one too
        far = [(s, p) for s, p in zip(make_samples(), PolicyModel(tiny, compute="fp32").logp(make_samples()), strict=True)][1::2]
        tv = [
            [abs(math.exp(0.4 * math.sin(3.0 * k + i)) - 1) / 2 for k, m in enumerate(sample.mask) if m]
            for i, (sample, _) in zip((1, 3), far, strict=True)
        ]
        assert one.extra["prompt_tv_max"] == pytest.approx(sum(sum(x) / len(x) for x in tv) / 2, rel=1e-4)


@pytest.mark.parametrize("compute", COMPUTE)
def test_update_moves_the_policy_towards_the_advantages(tiny: Path, make_samples: Make, compute: Compute) -> None:
    policy = PolicyModel(tiny, compute=compute)
    before = policy.logp(make_samples())
    samples = with_logp(make_samples(), before)
    first = policy.update(samples, {"kind": "ppo"}, lr=3e-3)
    assert first.extra["ratio_mean"] == pytest.approx(1.0)  # the same micro-batches as in `logp`
    assert first.extra["clip_fraction"] == first.extra["sampler_k3"] == 0.0
    second = policy.update(samples, {"kind": "ppo"}, lr=3e-3)
    assert second.loss < first.loss
    assert second.extra["ratio_max"] > 1.0
    assert second.extra["sampler_k3"] > 0.0
    after = policy.logp(samples)
    gain = sum(
        (b - a) * adv for s, x, y in zip(samples, before, after, strict=True) for a, b, adv in zip(x, y, s.advantages, strict=True)
    )
    assert gain > 0


def test_fit_lowers_the_cross_entropy(tiny: Path, make_samples: Make) -> None:
    policy = PolicyModel(tiny, micro_tokens=40)
    samples = make_samples()
    tokens = sum(sum(s.mask) for s in samples)
    assert policy.fit(samples, lr=0.0).loss == pytest.approx(-sum(map(sum, policy.logp(samples))) / tokens, rel=1e-4)
    losses = [policy.fit(samples, lr=3e-3).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_anchor_current_equals_a_fresh_old_logp(tiny: Path, make_samples: Make) -> None:
    checksums = []
    for anchor in ("old", "current"):
        policy = PolicyModel(tiny, compute="fp32")
        samples = make_samples() if anchor == "current" else with_logp(make_samples(), policy.logp(make_samples()))
        policy.update(samples, {"kind": "grpo", "anchor": anchor}, lr=1e-3)
        checksums.append(policy.checksum())
    assert checksums[0] == checksums[1]


def test_a_divergence_holds_the_policy_near_its_reference(tiny: Path, make_samples: Make) -> None:
    """Without advantages, an update moves a policy back towards the reference that it had left."""
    policy = PolicyModel(tiny, compute="fp32")
    start = policy.logp(make_samples())
    policy.fit(make_samples(), lr=3e-3)

    def away() -> float:
        now = policy.logp(make_samples())
        return sum(abs(a - b) for x, y in zip(now, start, strict=True) for a, b in zip(x, y, strict=True))

    near = [dataclasses.replace(s, ref_logp=tuple(x)) for s, x in zip(make_samples(), start, strict=True)]
    samples = [dataclasses.replace(s, advantages=(0.0,) * len(s.ids)) for s in near]
    left = away()
    metrics = policy.update(samples, {"kind": "grpo", "anchor": "current", "kl": 1.0, "kl_kind": "k2"}, lr=1e-3)
    assert metrics.tokens > 0
    assert metrics.loss > 0.0
    assert away() < left
    still = policy.checksum()
    assert policy.update(samples, {"kind": "grpo", "anchor": "current"}, lr=1e-3).tokens == 0
    assert policy.checksum() == still


def test_small_steps_add_up_in_the_masters(tiny: Path, make_samples: Make) -> None:
    """Steps far below bf16's resolution are kept, and show once there are enough of them."""
    policy = PolicyModel(tiny, compute="bf16")
    samples, start, masters = make_samples(), policy.checksum(), fp32_weights(policy)
    policy.fit(samples, lr=1e-9)
    assert any((masters[name] != weight).any() for name, weight in fp32_weights(policy).items())
    for _ in range(5):
        policy.fit(samples, lr=1e-5)
    assert policy.checksum() != start


def test_a_gradient_that_is_not_finite_changes_nothing(tiny: Path, make_samples: Make) -> None:
    policy = PolicyModel(tiny)
    start = policy.checksum()
    samples = with_logp(make_samples(), policy.logp(make_samples()))
    bad = [dataclasses.replace(s, advantages=(float("nan"),) * len(s.ids)) for s in samples]
    assert math.isnan(policy.update(bad, {"kind": "ppo"}, lr=1.0).grad_norm)
    assert policy.checksum() == start
    assert policy.fit(samples, lr=1e-3).grad_norm > 0


def test_samples_without_actions_are_inert(tiny: Path, make_samples: Make) -> None:
    samples = make_samples()
    idle = Sample((1, 2, 3), (0, 0, 0), (0, 0, 0), "idle", advantages=(5.0,) * 3)
    checksums = []
    for extra in ([], [idle]):
        policy = PolicyModel(tiny, compute="fp32")
        policy.update([*samples, *extra], {"kind": "grpo", "anchor": "current"}, lr=1e-3)
        checksums.append(policy.checksum())
    assert checksums[0] == checksums[1]
    assert policy.logp([idle]) == [[0.0, 0.0, 0.0]]
    empty = policy.update([idle], {"kind": "grpo", "anchor": "current"}, lr=1e-3)
    assert (empty.loss, empty.tokens) == (0.0, 0)
    assert policy.checksum() == checksums[0]


@pytest.mark.parametrize("compute", COMPUTE)
def test_save_and_load_bit_for_bit(tiny: Path, tmp_path: Path, make_samples: Make, compute: Compute) -> None:
    policy = PolicyModel(tiny, compute=compute)
    policy.fit(make_samples(), lr=1e-3)
    state = {name: tensor.clone() for name, tensor in policy.state().items()}
    saved = policy.save(tmp_path / "out")
    assert saved == policy.checksum() == checksum(load_file(tmp_path / "out" / "model.safetensors"))
    other = PolicyModel(tiny, compute=compute)
    assert other.load(tmp_path / "out") == saved
    assert not other._masters.has_moments
    assert {name: t.dtype for name, t in other.state().items()} == dict.fromkeys(state, torch.bfloat16)
    for name, tensor in other.state().items():
        assert torch.equal(tensor, state[name])
    assert "lm_head.weight" not in state  # tied: once
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert plain.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("naïve\n")) == "naïve\n"
    policy.save(tmp_path / "out")  # over itself
    assert PolicyModel(tmp_path / "out").checksum() == saved


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_resumed_run_goes_on_bit_for_bit(tiny: Path, tmp_path: Path, make_samples: Make, compute: Compute) -> None:
    policy = PolicyModel(tiny, compute=compute)
    for _ in range(2):
        policy.fit(make_samples(), lr=1e-3)
    assert policy.save_training(tmp_path / "training") == policy.checksum()
    other = PolicyModel(tiny, compute=compute)
    assert other.load_training(tmp_path / "training") == policy.checksum()
    for model in (policy, other):
        model.fit(make_samples(seed=1), lr=1e-3)
    for name, weight in fp32_weights(policy).items():
        assert torch.equal(weight, fp32_weights(other)[name])


def test_gradient_checkpointing_changes_nothing(tiny: Path, make_samples: Make) -> None:
    checksums = set()
    for checkpointing in (False, True):
        policy = PolicyModel(tiny, compute="fp32", gradient_checkpointing=checkpointing)
        policy.fit(make_samples(), lr=1e-3)
        checksums.add(policy.checksum())
    assert len(checksums) == 1


def test_untied_head_trains_too(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "untied")
    policy = PolicyModel(tmp_path / "untied")
    before = policy.state()["lm_head.weight"].clone()
    policy.fit(make_samples(), lr=1e-2)
    assert not torch.equal(policy.state()["lm_head.weight"], before)


def test_refusals(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    policy = PolicyModel(tiny)
    samples = make_samples()
    with pytest.raises(ConfigError, match=r"clip_hgih.*did you mean clip_high"):
        policy.update(samples, {"kind": "ppo", "clip_hgih": 0.2}, lr=0.0)
    with pytest.raises(ConfigError, match="needs the key kind"):
        policy.update(samples, {}, lr=0.0)
    with pytest.raises(ConfigError, match="one of old, sampler, current"):
        policy.update(samples, {"kind": "ppo", "anchor": "new"}, lr=0.0)
    with pytest.raises(ValueError, match="old_logp holds 0"):
        policy.update(samples, {"kind": "ppo"}, lr=0.0)
    with pytest.raises(ConfigError, match="corrects twice"):
        policy.update(with_logp(samples, policy.logp(samples)), {"kind": "ppo", "anchor": "sampler", "tis_cap": 2.0}, lr=0.0)
    with pytest.raises(ConfigError, match="bf16 or fp32"):
        PolicyModel(tiny, compute="fp16")  # pyright: ignore[reportArgumentType]: the point
    with pytest.raises(CheckpointError, match="no model here"):
        PolicyModel(tmp_path)
    other = tiny_model(tmp_path / "other", seed=1)
    (other / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="not what was written"):
        policy.load(other)


def test_shared_beginnings_change_nothing(tiny: Path, make_samples: Make) -> None:
    """Log-probabilities, loss and the weights after a step are those of separate rows."""
    prompt = tuple(range(60, 100))
    samples = [
        dataclasses.replace(
            s,
            ids=(*prompt, *s.ids),
            mask=(*(0 for _ in prompt), *s.mask),
            turn_ids=(*(0 for _ in prompt), *s.turn_ids),
            advantages=(*(0.0 for _ in prompt), *s.advantages),
            group_id=f"g{i % 2}",
        )
        for i, s in enumerate(make_samples(6))
    ]
    results = []
    for share in (False, True):
        policy = PolicyModel(tiny, compute="fp32", micro_tokens=150, share_prefix=share)
        before = policy.logp(samples)
        metrics = policy.update(samples, {"kind": "ppo", "anchor": "current"}, lr=1e-3)
        results.append((before, metrics, policy.logp(samples)))
    (rows, apart, after), (shared_rows, shared, shared_after) = results
    assert [x for row in shared_rows for x in row] == pytest.approx([x for row in rows for x in row], abs=1e-5)
    assert shared.loss == pytest.approx(apart.loss, abs=1e-6)
    assert shared.grad_norm == pytest.approx(apart.grad_norm, rel=1e-4)
    assert shared.tokens == apart.tokens
    assert [x for row in shared_after for x in row] == pytest.approx([x for row in after for x in row], abs=1e-3)
    assert shared.extra["padded_tokens"] < 0.7 * apart.extra["padded_tokens"]


def test_samples_without_advantage_cost_nothing_and_count(tiny: Path, make_samples: Make) -> None:
    samples = make_samples(5)
    idle = [dataclasses.replace(s, advantages=(0.0,) * len(s.ids)) if i % 2 else s for i, s in enumerate(samples)]
    kept, alone = PolicyModel(tiny, compute="fp32"), PolicyModel(tiny, compute="fp32")
    loss = {"kind": "reterm", "anchor": "current"}
    whole = kept.update(idle, loss, lr=0.0)
    half = alone.update([s for i, s in enumerate(idle) if not i % 2], loss, lr=0.0)
    assert whole.tokens == half.tokens
    assert whole.grad_norm == pytest.approx(half.grad_norm * 3 / 5, rel=1e-4)  # the mean is over all five rollouts
    nothing = kept.update([idle[1], idle[3]], loss, lr=1.0)
    assert (nothing.tokens, nothing.grad_norm) == (0, 0.0)
    assert kept.checksum() == PolicyModel(tiny, compute="fp32").checksum()


def test_log_probabilities_are_of_the_samplers_temperature(tiny: Path, make_samples: Make) -> None:
    policy = PolicyModel(tiny, compute="fp32")
    (sample,) = make_samples(1)
    warm = dataclasses.replace(sample, temperature=2.0)
    with torch.no_grad():
        logits = policy._module(input_ids=torch.tensor([sample.ids])).logits[0, :-1] / 2.0
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.ids[1:]).unsqueeze(1)).squeeze(1)
    (row, cold) = policy.logp([warm, sample])
    on = [t for t, m in enumerate(sample.mask) if m]
    assert [row[t] for t in on] == pytest.approx([float(wanted[t - 1]) for t in on], abs=1e-5)
    assert row != cold
