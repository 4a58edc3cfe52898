"""Bytes of roles by hand for a small model, and what the real masters keep."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from termrsi.model.checkpoint import tiny_model
from termrsi.model.lora import Lora
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample
from termrsi.sizing import memory, shapes
from termrsi.sizing.memory import GIB, Engine, Learning
from tests.small_shape import FIELDS, SHAPE

BLOCK = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = 2 * 64_000 + 2 * BLOCK + 64
ONE = Learning("bf16", 1024, 512, False, False, 1)


def parts(need: memory.Need) -> dict[str, int]:
    return dict(need.parts)


def test_a_trained_weight_costs_eighteen_bytes() -> None:
    found = parts(memory.policy(SHAPE, ONE))
    assert SHAPE.parameters == PARAMETERS
    weights = [found[name] for name in ("weights", "masters", "moments", "gradients")]
    assert weights == [2 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS, 4 * PARAMETERS]
    assert found["gathered"] == found["prefix mask"] == 0
    assert found["head"] == 10 * 64_000 + 3 * 64 * 2**20


def test_float32_masters_are_the_weights() -> None:
    found = parts(memory.policy(SHAPE, replace(ONE, compute="fp32")))
    assert (found["weights"], found["masters"]) == (0, 4 * PARAMETERS)
    assert found["activations"] == 2 * parts(memory.policy(SHAPE, ONE))["activations"]


def test_what_is_offloaded_is_there_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BUCKET_BYTES", 1000)
    how = replace(ONE, offload_optimizer=True, offload_activations=True)
    found = parts(memory.policy(SHAPE, how))
    assert (found["masters"], found["moments"], found["gradients"]) == (1000, 2000, 4 * PARAMETERS)
    assert found["activations"] == 1024 * (2 * 64 + SHAPE.blocks[0].kept_bytes)
    assert parts(memory.policy(SHAPE, replace(how, processes=4)))["masters"] == PARAMETERS


def test_processes_share_weights_and_not_activations() -> None:
    one, four = (parts(memory.policy(SHAPE, replace(ONE, processes=n))) for n in (1, 4))
    assert [4 * four[name] for name in ("masters", "moments", "gradients")] == [one[n] for n in ("masters", "moments", "gradients")]
    assert four["activations"] == one["activations"]
    assert four["gathered"] == 8 * BLOCK + 2 * 2 * 64_000


def test_checkpointing_keeps_inputs_and_one_block() -> None:
    per_token = SHAPE.blocks[0].kept_bytes
    assert memory.activations(SHAPE, ONE) == 1024 * 2 * per_token
    assert memory.activations(SHAPE, replace(ONE, checkpointing=True)) == 1024 * (2 * 2 * 64 + per_token)
    assert memory.activations(SHAPE, replace(ONE, longest=4096)) == 4096 * 2 * per_token, "a long sample is a micro-batch alone"


def test_a_critic_has_no_head_and_fewer_blocks() -> None:
    found = parts(memory.critic(SHAPE, ONE, layers=1))
    assert found["masters"] == 4 * (64_000 + BLOCK + 64 + 65)
    assert found["activations"] == 1024 * SHAPE.blocks[0].kept_bytes
    assert found["head"] == 0


def test_a_reference_has_masters_and_nothing_to_learn_with() -> None:
    found = parts(memory.reference(SHAPE, ONE))
    assert (found["weights"], found["masters"]) == (2 * PARAMETERS, 4 * PARAMETERS)
    assert not {"moments", "gradients"} & set(found)


def test_adapters_alone_have_masters_and_moments() -> None:
    """Of the frozen model what computes, in bf16, and neither gradients nor a gradient of the head."""
    trained = 2 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    found = parts(memory.policy(SHAPE, replace(ONE, lora_rank=8)))
    wanted = {"weights": 2 * (PARAMETERS + trained), "masters": 4 * trained, "moments": 8 * trained, "gradients": 4 * trained}
    assert {name: found[name] for name in wanted} == wanted
    assert found["head"] == 4 * 64_000 + 3 * 64 * 2**20
    four = parts(memory.policy(SHAPE, replace(ONE, lora_rank=8, processes=4)))
    assert 4 * four["weights"] == found["weights"]
    assert four["gathered"] == 4 * BLOCK + 2 * 2 * 64_000
    reference = parts(memory.reference(SHAPE, replace(ONE, lora_rank=8)))
    assert (reference["weights"], reference["masters"]) == (found["weights"], found["masters"])
    fewer = parts(memory.policy(SHAPE, replace(ONE, lora_rank=8, lora_targets=("q_proj",))))
    assert fewer["masters"] == 4 * 2 * 8 * (64 + 64)
    assert memory.critic(SHAPE, replace(ONE, lora_rank=8)) == memory.critic(SHAPE, ONE), "a critic trains its weights"


def test_prefixes_that_are_shared_need_a_mask() -> None:
    assert parts(memory.policy(SHAPE, replace(ONE, share_prefix=True)))["prefix mask"] == 3 * 1024**2


def test_an_engines_cache_is_what_is_left() -> None:
    engine = Engine(2048, 8)
    need = memory.generator(SHAPE, engine)
    assert parts(need)["cache of one sequence"] == 2048 * 2 * 2 * 32 * 2
    device = 4 * GIB
    tokens = memory.cache_tokens(SHAPE, engine, device)
    fixed = need.total - parts(need)["cache of one sequence"]
    assert 0 <= int(0.9 * device) - fixed - tokens * SHAPE.kv_bytes < SHAPE.kv_bytes
    assert memory.cache_tokens(SHAPE, engine, GIB) == 0, "not even the weights have room"


def test_heads_are_spread_over_no_more_devices_than_there_are() -> None:
    assert memory.sequence_bytes(SHAPE, 100, tensor=2) == memory.sequence_bytes(SHAPE, 100, tensor=4)
    assert memory.sequence_bytes(SHAPE, 100, tensor=1) == 2 * memory.sequence_bytes(SHAPE, 100, tensor=2)


def test_states_of_linear_attention_come_off_the_cache() -> None:
    fields = FIELDS | {
        "model_type": "qwen3_5_text", "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    }  # fmt: skip
    shape = shapes.of(fields)
    few, many = (memory.cache_tokens(shape, Engine(2048, n, batched_tokens=2048), 4 * GIB) for n in (8, 800))
    logits = 2 * 4 * shape.vocab * 792
    assert few - many == pytest.approx((792 * shape.state_bytes + logits) / shape.kv_bytes, abs=1)


def test_the_arithmetic_in_words() -> None:
    need = memory.Need("policy", (("weights", 15 * GIB), ("masters", 30 * GIB), ("head", GIB // 16), ("context", GIB // 16)))
    assert need.arithmetic() == "45.1 GiB (weights 15.0 + masters 30.0 + other 0.1)"


def test_a_node_of_processors() -> None:
    needs = [memory.generator(SHAPE, Engine(2048, 8)), memory.policy(SHAPE, ONE)]
    found = parts(memory.on_cpu(needs, 2))
    assert found["kv cache"] == 2 * GIB
    assert found["policy"] == needs[1].total - memory.CONTEXT


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_what_a_policy_keeps_after_an_update(compute: str, rank: int, tmp_path: Path) -> None:
    """Bytes of parameters, masters and moments as they lie in memory, each once, against the estimate."""
    directory = tiny_model(tmp_path / "tiny")
    adapters = Lora(rank) if rank else None
    model = PolicyModel(directory, compute=compute, adapters=adapters)  # type: ignore[arg-type]  # one of the two
    sample = Sample((1, 2, 3, 4), (0, 1, 1, 1), (0,) * 4, "r")
    model.fit([sample], 1e-5)
    masters = model._masters
    held: dict[int, torch.Tensor] = {}
    for tensor in (*model._module.parameters(), *masters._masters.values()):
        held[tensor.untyped_storage().data_ptr()] = tensor
    moments = [value for name in masters._masters for value in masters._state_of(name).values() if value.dim() > 0]
    size = sum(tensor.untyped_storage().nbytes() for tensor in (*held.values(), *moments))
    how = Learning(compute, 1024, 512, False, False, 1, rank)
    found = parts(memory.policy(shapes.load(directory), how))
    assert size == found["weights"] + found["masters"] + found["moments"]
