"""Counts of parameters against transformers' own modules, and of the cache and kept bytes against their definitions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from termrsi.errors import ConfigError
from termrsi.model.critic import CriticModel
from termrsi.places import cache_dir
from termrsi.sizing import shapes
from tests.moe_models import tiny_moe

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 16}),
    ("mistral", {"head_dim": 16}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("qwen2_moe", {**MOE, **SHARED}),
    ("qwen3_moe", {**MOE, "head_dim": 16}),
    ("qwen3_moe", {**MOE, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("olmoe", {**MOE}),
    ("qwen3_next", {**MOE, **SHARED, **LINEAR, "head_dim": 16}),
    ("qwen3_5_text", {**LINEAR, "head_dim": 16}),
    ("qwen3_5_moe_text", {**MOE, **SHARED, **LINEAR, "head_dim": 16}),
]


def on_nothing(family: str, **fields: object) -> tuple[Any, dict[str, Any]]:  # Any: transformers' models and configs
    """A module without memory, and its config.json."""
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize(("family", "more"), MODELS)
def test_parameters_are_those_of_the_module(family: str, more: dict[str, Any]) -> None:
    model, fields = on_nothing(family, **{**SMALL, **more})
    shape = shapes.of(fields)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    body = sum(p.numel() for p in model.base_model.parameters())
    assert shape.body() == body
    for block, layer in zip(shape.blocks, model.base_model.layers, strict=True):
        assert block.parameters == sum(p.numel() for p in layer.parameters())
        assert block.experts == sum(p.numel() for name, p in layer.named_parameters() if "mlp.experts." in name)


@pytest.mark.parametrize(("family", "more"), MODELS)
def test_adapters_are_those_of_the_module(family: str, more: dict[str, Any]) -> None:
    """On every linear layer but the head, and on some."""
    model, fields = on_nothing(family, **{**SMALL, **more})
    shape, head = shapes.of(fields), model.get_output_embeddings()
    layers = [(n.rpartition(".")[2], m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert shape.adapters(4) == sum(4 * (m.in_features + m.out_features) for _, m in layers)
    some = sum(2 * (m.in_features + m.out_features) for name, m in layers if name in ("q_proj", "o_proj"))
    assert shape.adapters(2, ["o_proj", "q_proj"]) == some > 0
    with pytest.raises(ConfigError, match=r"lora_targets: no linear layer is called 'qq'.*o_proj,.*q_proj"):
        shape.adapters(2, ["qq"])


@pytest.mark.parametrize(
    ("family", "more", "billions"),
    [
        # The shape of Qwen3-8B, which its name rounds.
        (
            "qwen3",
            {
                "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            },
            8.19,
        ),
        ("qwen3_5_text", {}, 8.95),  # the defaults of its configuration are those of the 9B model
    ],
)  # fmt: skip
def test_models_as_they_are_called(family: str, more: dict[str, Any], billions: float) -> None:
    model, fields = on_nothing(family, **more)
    shape = shapes.of(fields)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_the_cache_of_a_token() -> None:
    _, fields = on_nothing("qwen3", **{**SMALL, "head_dim": 16})
    assert shapes.of(fields).kv_bytes == 4 * 2 * 2 * 16 * 2  # layers, key and value, heads, head size, bytes
    _, fields = on_nothing("qwen3_5_text", **{**SMALL, **LINEAR, "head_dim": 16})
    shape = shapes.of(fields)
    assert shape.kv_bytes == 1 * 2 * 2 * 16 * 2, "one layer of four looks back"
    assert [block.state_bytes > 0 for block in shape.blocks] == [True, True, True, False]


def test_a_token_uses_the_experts_it_is_sent_to(tmp_path: Path) -> None:
    shape = shapes.load(tiny_moe(tmp_path / "moe"))  # 2 of 8 experts
    block = shape.blocks[0]
    assert block.experts == 8 * 3 * 64 * 64
    assert block.active == block.parameters - 6 * 3 * 64 * 64


def test_a_critic_keeps_its_first_blocks(tmp_path: Path) -> None:
    from termrsi.model.checkpoint import tiny_model

    directory = tiny_model(tmp_path / "tiny")
    critic = CriticModel(directory, layers=1)
    parameters = sum(weight.numel() for weight in critic.weights_only().values())
    shape = shapes.load(directory)
    assert parameters == shape.body(layers=1) + shape.hidden + 1  # and the value head


@pytest.mark.skipif(not (cache_dir() / "models" / "SmolLM2-135M-Instruct").is_dir(), reason="the embedded model is not made yet")
def test_the_embedded_model() -> None:
    from safetensors import safe_open

    directory = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    with safe_open(directory / "model.safetensors", "pt") as file:
        weights = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping
    assert shapes.load(directory).parameters == weights == 134_515_008
    assert shapes.load(directory) == shapes.of(shapes.EMBEDDED)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_the_backward_pass_keeps(family: str) -> None:
    """Bytes of all tensors that autograd saved, each once and without parameters, against the estimate, in bf16."""
    wide = {**SMALL, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 16, "vocab_size": 64}
    config = AutoConfig.for_model(family, **wide, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = 256
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).last_hidden_state
    assert states.shape == (1, tokens, 128)
    shape = shapes.of(json.loads(config.to_json_string(use_diff=False)))
    estimate = tokens * sum(block.kept_bytes for block in shape.blocks)
    assert sum(kept.values()) == pytest.approx(estimate, rel=0.15)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model_type": "mamba"}, "models of type 'mamba' are not counted; counted: llama"),
        ({"model_type": "llama", "hidden_size": 8}, "'num_hidden_layers' is not in it"),
    ],
)
def test_what_is_not_counted_is_refused(fields: dict[str, Any], part: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        shapes.load(tmp_path)
    assert part in str(caught.value).replace(f"{tmp_path}/config.json: ", "")


def test_the_text_part_of_a_model_that_also_sees() -> None:
    _, fields = on_nothing("qwen3_5_text", **{**SMALL, **LINEAR, "head_dim": 16})
    whole = {"model_type": "qwen3_5", "text_config": fields, "vision_config": {"depth": 3}}
    assert shapes.of(whole) == shapes.of(fields)


def test_no_config() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        shapes.load("/nowhere")
