"""Tiny random mixture-of-experts checkpoints, one for each family that the learner can replay."""

from pathlib import Path
from typing import Any

import torch

EXPERTS, TOP_K, LAYERS = 8, 2, 3
# Small weights would make every expert alike: these are wide enough that a token's log-probability knows who computed it.
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "intermediate_size": 128,
    },
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 64},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 64},
    "granitemoe": {"num_local_experts": EXPERTS, "intermediate_size": 64},
    "qwen3_next": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "intermediate_size": 128,
        "head_dim": 32,
        "layer_types": ["full_attention"] * LAYERS,  # the others have no bearing on routing
        "norm_topk_prob": True,
    },
    "qwen3_5_moe_text": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "head_dim": 32,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 64, "head_dim": 32, "layer_types": ["full_attention"] * LAYERS},
}
NORMALISED = ("qwen3_moe", "mixtral", "granitemoe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss")


def tiny_moe(
    directory: Path, family: str = "qwen3_moe", *, tokenizer: Path | None = None, vocab: int = 256, **more: object
) -> Path:
    """A bf16 Hugging Face directory; the same every time. `tokenizer`: the model directory whose tokenizer it gets."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shape = _SHAPE | FAMILIES[family] | more
    if tokenizer is not None:
        loaded = AutoTokenizer.from_pretrained(str(tokenizer))
        loaded.save_pretrained(str(directory))
        shape |= {"vocab_size": len(loaded), "eos_token_id": loaded.eos_token_id}
    else:
        shape |= {"vocab_size": vocab, "eos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    model.to(torch.bfloat16).save_pretrained(str(directory))
    return directory
