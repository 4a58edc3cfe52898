"""What waits in CPU memory changes no number (but for the last bits: where memory lies changes sums); what is away has no bytes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from termrsi.model import masters, offload
from termrsi.model.critic import CriticModel
from termrsi.model.masters import Compute
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample

Make = Callable[..., list[Sample]]
HERE: dict[str, Any] = {}  # Any: options of several types
AWAY: dict[str, Any] = {"offload_activations": True, "offload_optimizer": True}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that the tiny model goes beyond."""
    monkeypatch.setattr(masters, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(offload.activations, "__defaults__", (0,))


def learn(policy: PolicyModel, samples: list[Sample]) -> list[float]:
    found = [policy.fit(samples, lr=1e-3), policy.update(samples, {"kind": "grpo", "anchor": "current"}, lr=1e-3)]
    return [value for one in found for value in (one.loss, one.grad_norm)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_policy_learns_the_same(tiny: Path, make_samples: Make, compute: Compute, checkpointing: bool) -> None:
    samples, found = make_samples(), []
    for options in (HERE, AWAY):
        policy = PolicyModel(tiny, compute=compute, micro_tokens=40, gradient_checkpointing=checkpointing, **options)
        found.append((learn(policy, samples), policy.logp(samples), policy._masters.training_state()))
    (metrics, logp, state), (away_metrics, away_logp, away_state) = found
    assert away_metrics == pytest.approx(metrics, rel=1e-5)
    assert [x for row in away_logp for x in row] == pytest.approx([x for row in logp for x in row], abs=1e-5)
    torch.testing.assert_close(away_state, state, rtol=1e-5, atol=1e-5)


def test_a_critic_learns_the_same(tiny: Path, make_samples: Make) -> None:
    found = []
    for options in (HERE, AWAY):
        critic = CriticModel(tiny, micro_tokens=40, **options)
        metrics = [critic.update(make_samples(), 1e-3, 0.2).loss for _ in range(2)]
        critic.load_weights(critic.weights_only())
        critic.refit(2.0, 0.5)
        metrics.append(critic.update(make_samples(), 1e-3, 0.0).loss)
        found.append([*metrics, *(value for row in critic.values(make_samples()) for value in row)])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize(("compute", "bytes_each"), [("bf16", 0), ("fp32", 4)])
def test_what_is_away_has_no_bytes(tiny: Path, make_samples: Make, compute: Compute, bytes_each: int) -> None:
    """fp32 computes on the masters, which stay."""
    policy = PolicyModel(tiny, compute=compute, offload_optimizer=True)
    held = policy._masters
    for _ in range(2):
        assert {master.untyped_storage().nbytes() for master in held._masters.values()} == (
            {0} if bytes_each == 0 else {4 * master.numel() for master in held._masters.values()}
        )
        policy.fit(make_samples(), lr=1e-3)
    assert len(held._buckets) > 2
    moments = [held._state_of(name)[key] for name in held._masters for key in ("exp_avg", "exp_avg_sq")]
    assert {moment.untyped_storage().nbytes() for moment in moments} == {0}


def test_training_goes_on_with_it_and_without(tiny: Path, tmp_path: Path, make_samples: Make) -> None:
    ends = []
    for number, (first, then) in enumerate((({}, {}), (AWAY, {}), (HERE, AWAY))):
        policy = PolicyModel(tiny, **first)
        learn(policy, make_samples())
        policy.save_training(tmp_path / str(number))
        other = PolicyModel(tiny, **then)
        assert other.load_training(tmp_path / str(number)) == policy.checksum()
        learn(other, make_samples(seed=1))
        ends.append(other._masters.training_state())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-5)


def test_moments_that_are_read_again_are_put_away_one_by_one(
    tiny: Path, make_samples: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fits with its optimizer away goes on where it fits."""
    policy = PolicyModel(tiny, **AWAY)
    learn(policy, make_samples())
    state = policy._masters.training_state()
    held, there = policy._masters, []

    def cut(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        moments = [moment for name in held._masters for moment in held._state_of(name).values() if moment.dim()]
        there.append(sum(moment.untyped_storage().nbytes() > 0 for moment in moments))
        return value

    monkeypatch.setattr(masters, "part_of", cut)
    held.load_training_state(state)
    assert len(there) > 3 * len(held._masters)
    assert set(there) == {0}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("away", [False, True])
def test_an_update_moves_its_activations(
    tiny: Path, make_samples: Make, monkeypatch: pytest.MonkeyPatch, away: bool, checkpointing: bool
) -> None:
    moved = []
    monkeypatch.setattr(offload, "_buffer", lambda like: moved.append(like.shape) or torch.empty_like(like, device="cpu"))
    policy = PolicyModel(tiny, micro_tokens=40, gradient_checkpointing=checkpointing, offload_activations=away)
    policy.fit(make_samples(), lr=1e-3)
    assert bool(moved) == away
    moved.clear()
    CriticModel(tiny, micro_tokens=40, offload_activations=away).update(make_samples(), 1e-3, 0.2)
    assert bool(moved) == away


def test_activations_go_and_parameters_stay() -> None:
    layer = torch.nn.Linear(3, 4)
    given, seen = torch.randn(2, 3, requires_grad=True), []
    hooks = offload.activations(small_bytes=20)
    pack, unpack = hooks.pack_hook, hooks.unpack_hook  # pyright: ignore[reportAttributeAccessIssue]: torch's own
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(pack(tensor)) or seen[-1], unpack):
        loss = layer(given.tanh()).sum()
    moved = [tuple(tensor.shape) for device, tensor in seen if device is not None]
    assert moved == [(2, 3), (2, 3)]  # of tanh, and of the product
    assert any(device is None for device, _ in seen)
    loss.backward()
    torch.testing.assert_close(given.grad, (1 - given.detach().tanh() ** 2) * layer.weight.detach().sum(0))


FREED = """
import os, torch
from termrsi.model.learning import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
start = resident()
kept, freed = [], []
for _ in range(48):
    freed.append(torch.ones(1 << 19))
    kept.append(torch.ones(300))
freed.clear()
print(resident() - start)
return_freed_memory()
print(resident() - start)
"""
KEEPS = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}  # what it comes to by itself, at once


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="glibc's own way to keep memory")
def test_freed_memory_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True, env={**os.environ, **KEEPS})
    kept, left = map(int, done.stdout.split())
    assert left < 8 < 64 < kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_room_between_steps(tiny: Path, make_samples: Make) -> None:
    found = []
    for options in (HERE, AWAY):
        policy = PolicyModel(tiny, device="cuda", **options)
        metrics = learn(policy, make_samples())
        found.append((metrics, torch.cuda.memory_allocated()))
        del policy
    assert found[1][0] == found[0][0]
    assert found[1][1] < found[0][1]
