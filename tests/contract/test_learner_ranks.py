"""A learner over 2 and 4 processes (gloo) against one process alone: the same losses, gradients, weights and files."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from termrsi.model import routing
from termrsi.model.checkpoint import tiny_model
from termrsi.model.lora import Lora
from termrsi.model.policy import PolicyModel
from termrsi.model.ranks import open_store
from termrsi.records import Sample
from tests.moe_models import EXPERTS, LAYERS, TOP_K, tiny_moe
from tests.ranks_side import Case, Outcome, hand_on, main, play, refit

SIZES = (2, 4)
LOSSES: dict[str, dict[str, object]] = {
    "ppo": {"kind": "ppo", "tis_cap": 2.0, "correction": "sequence", "correction_low": 0.9},
    "grpo": {"kind": "grpo"},
    "reterm": {"kind": "reterm", "kl": 0.1},
    "gspo": {"kind": "gspo", "anchor": "sampler", "sat": 0.6, "clip_low": 0.001, "clip_high": 0.002},
    "dppo": {"kind": "dppo", "delta": 0.01},
    "tvpo": {"kind": "tvpo", "delta": 0.1},
}
CASES = (*LOSSES, "sft", "critic", "single", "idle", "prefix", "checkpointing", "offload", "experts")
ADAPTERS = ("adapters", "adapters all", "adapters experts")
LOADS = """
import re
from transformers import AutoModelForCausalLM
from termrsi.model.learning import load_module
from termrsi.model.ranks import Ranks

def held():  # bytes that are this process's own, and no file's
    return 1024 * int(re.search("^Anonymous: +([0-9]+)", open("/proc/self/smaps_rollup").read(), re.MULTILINE)[1])

before = held()
model = load_module(AutoModelForCausalLM, {directory!r}, Ranks(0, {processes}))
print(held() - before)
"""
Played = dict[int, dict[str, Any]]  # Any: outcomes of several types, by name


def make_samples(num: int = 7) -> list[Sample]:
    """Of three groups and of uneven lengths, each with a common beginning; one without advantage."""
    g = torch.Generator().manual_seed(0)
    samples = []
    for i in range(num):
        n = 14 + 4 * i
        ids = [*range(20 + i % 3, 32 + i % 3), *torch.randint(0, 256, (n,), generator=g).tolist()]
        mask = [int(k >= 14 and k % 5 != 0) for k in range(len(ids))]
        told = torch.randn(len(ids), generator=g) * torch.tensor(mask) * (i != 2)
        column = tuple(told.tolist())
        sample = Sample(tuple(ids), tuple(mask), (0,) * len(ids), rollout_id=f"r{i}", group_id=f"g{i % 3}")
        samples.append(dataclasses.replace(sample, advantages=column, returns=column))
    return samples


def anchored(model: str, samples: list[Sample]) -> tuple[Sample, ...]:
    """With what the losses compare with: the sampler and the old policy at some distance from the learner."""
    done = []
    for i, (sample, logp) in enumerate(zip(samples, PolicyModel(model, compute="fp32").logp(samples), strict=True)):
        moved = [(0.4 if i % 3 else 0.1) * math.sin(3.0 * k + i) for k in range(len(logp))]
        near, far = (tuple(x - d * f if m else 0.0 for x, d, m in zip(logp, moved, sample.mask, strict=True)) for f in (0.5, 1.0))
        done.append(dataclasses.replace(sample, old_logp=near, sampler_logp=far, ref_logp=far, old_values=(0.0,) * len(logp)))
    return tuple(done)


def routed(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    g = torch.Generator().manual_seed(1)
    records = []
    for sample in samples:
        chosen = torch.rand(len(sample.ids), LAYERS, EXPERTS, generator=g).argsort(-1)[..., :TOP_K]
        records.append(dataclasses.replace(sample, routing=routing.record(chosen.numpy(), EXPERTS)))
    return tuple(records)


def make_cases(folder: Path) -> dict[str, Case]:
    tiny, moe = str(tiny_model(folder / "tiny")), str(tiny_moe(folder / "moe"))
    samples = anchored(tiny, make_samples())
    silent = dataclasses.replace(samples[0], mask=(0,) * len(samples[0].mask))
    cases = {name: Case(tiny, samples, loss) for name, loss in LOSSES.items()}
    some = Lora(4, targets=("q_proj", "o_proj"))
    return cases | {
        "sft": Case(tiny, samples),
        "critic": Case(tiny, samples, critic=True, options={"layers": 1}),
        "single": Case(tiny, (silent, samples[-1]), LOSSES["grpo"]),  # of four processes three have nothing
        "idle": Case(tiny, (silent,), LOSSES["grpo"]),
        "prefix": Case(tiny, samples, LOSSES["grpo"], options={"share_prefix": True}),
        "half": Case(tiny, samples, LOSSES["grpo"], options={"compute": "bf16"}),
        "checkpointing": Case(tiny, samples, LOSSES["grpo"], options={"gradient_checkpointing": True}),
        "offload": Case(tiny, samples, LOSSES["grpo"], options={"offload_activations": True, "offload_optimizer": True}),
        "experts": Case(moe, routed(samples), LOSSES["grpo"], options={"routing_replay": True, "gradient_checkpointing": True}),
        "adapters": Case(tiny, samples, options={"adapters": Lora(6, targets=("q_proj", "down_proj"))}),
        "adapters half": Case(tiny, samples, LOSSES["grpo"], options={"compute": "bf16", "adapters": Lora(4)}),
        "adapters all": Case(
            tiny, samples, LOSSES["grpo"], options={"adapters": Lora(4), "gradient_checkpointing": True, "share_prefix": True}
        ),
        "adapters experts": Case(moe, routed(samples), LOSSES["grpo"], options={"adapters": some, "routing_replay": True}),
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Outcomes by number of processes. Training goes from one process to two to four through its files."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = make_cases(folder)
    torch.save(cases, folder / "cases.pt")
    given = (cases["sft"].model, cases["sft"].samples)
    alone: dict[str, Any] = {name: play(case) for name, case in cases.items()}  # Any: see Played
    alone["refit"] = refit(*given)
    alone["handed"] = hand_on(*given, None, folder / "state-1")
    outcomes, source = {1: alone}, folder / "state-1"
    for size in SIZES:
        target = folder / f"state-{size}"
        store = open_store("127.0.0.1", 60.0)
        spawn(main, (size, store.port, folder, given, source, target), nprocs=size)
        outcomes[size] = torch.load(folder / f"outcomes-{size}.pt", weights_only=False)
        outcomes[size]["alone"] = hand_on(*given, source, folder / f"alone-{size}")
        source = target
    outcomes[0] = {"handed": hand_on(*given, source, folder / "state-0")}
    return outcomes


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*CASES, *ADAPTERS])
def test_processes_change_nothing(played: Played, size: int, name: str) -> None:
    one: Outcome = played[1][name]
    many: Outcome = played[size][name]
    assert flat(many.before) == pytest.approx(flat(one.before), abs=1e-5)
    for own, theirs in zip(one.metrics, many.metrics, strict=True):
        assert theirs.tokens == own.tokens
        assert theirs.loss == pytest.approx(own.loss, abs=2e-6)
        assert theirs.grad_norm == pytest.approx(own.grad_norm, rel=1e-4)
        assert theirs.extra.keys() == own.extra.keys()
        for key in own.extra.keys() - {"micro_batches", "padded_tokens"}:
            assert theirs.extra[key] == pytest.approx(own.extra[key], rel=1e-4, abs=1e-5), key
    assert (one.metrics[0].grad_norm > 0.0) == (name != "idle")
    assert many.weights.keys() == one.weights.keys()
    for key, weight in one.weights.items():
        torch.testing.assert_close(many.weights[key], weight, rtol=0, atol=1e-4)
    assert flat(many.after) == pytest.approx(flat(one.after), abs=2e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["half", "adapters half"])
def test_half_precision_is_that_of_one_process(played: Played, size: int, name: str) -> None:
    """bf16 rounds sums in another order; the masters are float32 and keep steps far below bf16's resolution."""
    one, many = played[1][name], played[size][name]
    assert flat(many.before) == pytest.approx(flat(one.before), abs=0.05)
    for own, theirs in zip(one.metrics, many.metrics, strict=True):
        assert theirs.loss == pytest.approx(own.loss, abs=0.01)
        assert theirs.grad_norm == pytest.approx(own.grad_norm, rel=0.05)
    for key, weight in many.weights.items():
        assert weight.dtype == torch.float32
        assert (weight != weight.to(torch.bfloat16).float()).any()
        torch.testing.assert_close(weight, one.weights[key], rtol=0, atol=4.1e-3)  # two steps of 1e-3 apart in sign at most


@pytest.mark.parametrize("size", [*SIZES, 0])
@pytest.mark.parametrize("name", ["policy", "critic", "adapters"])
def test_training_goes_on_in_another_number_of_processes(played: Played, size: int, name: str) -> None:
    """What is found is what was left, the update on it is the one that one process alone makes of the same files."""
    before = {2: 1, 4: 2, 0: 4}[size]
    here, there = played[size]["handed"][name], played[before]["handed"][name]
    assert here.saved == here.found == there.left
    assert here.left != there.left
    for key, weight in played[size].get("alone", {}).get(name, here).weights.items():
        torch.testing.assert_close(here.weights[key], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_refit_and_a_hand_over_reach_every_part(played: Played, size: int) -> None:
    start, refitted, back = map(flat, played[size]["refit"])
    for one, many in zip(played[1]["refit"], played[size]["refit"], strict=True):
        assert flat(many) == pytest.approx(flat(one), abs=1e-6)
    assert refitted != pytest.approx(start, abs=1e-3)
    assert back == pytest.approx(start, abs=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_wrong_with_a_batch_is_said_by_every_process(played: Played, size: int) -> None:
    errors = played[size]["error"]
    assert len(errors) == size
    assert set(errors) == {"r0: old_logp holds 0 entries, 26 are needed"}


def test_several_processes_map_a_models_files_and_one_reads_them(tmp_path: Path) -> None:
    """Else each of a node's would hold all of the model in float32 as it starts."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, vocab_size=8192
    )
    LlamaForCausalLM(config).to(dtype=torch.bfloat16).save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]: as in checkpoint
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    held = {}
    for processes in (1, 2):
        code = LOADS.format(processes=processes, directory=str(tmp_path))
        held[processes] = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert size > 40e6
    assert held[1] > 1.9 * size, "in float32, of a file in bf16"
    assert held[2] < 0.5 * size
