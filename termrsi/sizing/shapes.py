"""A model's `config.json` as counts: parameters, what one token uses of them, cache and kept activations of a token (ours).

The counts are those of transformers' modules: each family here is compared with the module itself, parameter by parameter.
Letters: h hidden size, a heads x head size, k key-value heads x head size, i inner size of an MLP.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from termrsi.errors import ConfigError

Fields = Mapping[str, Any]  # Any: parsed JSON
Linear = tuple[str, int, int]

EMBEDDED: Fields = {  # SmolLM2-135M-Instruct: its config.json is made with its weights, at the first run
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. `experts`: parameters of all routed experts, part of `parameters`; `routed`: the share of them that a token uses.

    `kv_bytes`: of a token in a bf16 cache. `state_bytes`: of a sequence, whatever its length (linear attention, float32).
    `attention`: a, which the cost of looking back grows with; 0 where attention is linear. `kept_bytes`: what the backward pass
    keeps of a token in bf16, an estimate that follows the modules' code (norms compute in float32). `linear`: name, inputs and
    outputs of each linear layer that an adapter may be put on.
    """

    parameters: int
    kv_bytes: int
    attention: int
    kept_bytes: int
    experts: int = 0
    routed: float = 0.0
    state_bytes: int = 0
    linear: tuple[Linear, ...] = ()

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.parameters - self.experts * (1.0 - self.routed)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: embedding, blocks, a final norm, and a head that may be the embedding (`tied`)."""

    family: str
    hidden: int
    vocab: int
    tied: bool
    kv_heads: int
    blocks: tuple[Block, ...]

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of a policy, a tied weight once."""
        return self.body() + (0 if self.tied else self.embedding)

    def body(self, layers: int = 0) -> int:
        """Without the head, with the first `layers` blocks (0: all): what a critic has beside its value head."""
        return self.embedding + sum(block.parameters for block in self.kept(layers)) + self.hidden

    def kept(self, layers: int = 0) -> tuple[Block, ...]:
        return self.blocks[: layers or None]

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with, head included: a look-up in the embedding costs nothing."""
        return sum(block.active for block in self.blocks) + self.embedding

    def adapters(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Parameters of adapters (`model.lora`) on layers so named; empty: on all. Raises ConfigError if there is none such."""
        layers = [one for block in self.blocks for one in block.linear]
        known = {name for name, _, _ in layers}
        if odd := [name for name in targets if name not in known]:
            raise ConfigError(f"no linear layer is called {odd[0]!r}", "model.lora_targets", f"of {', '.join(sorted(known))}")
        return sum(rank * (inputs + outputs) for name, inputs, outputs in layers if not targets or name in targets)

    @property
    def kv_bytes(self) -> int:
        """Of one token in the cache of an engine."""
        return sum(block.kv_bytes for block in self.blocks)

    @property
    def state_bytes(self) -> int:
        """Of one sequence in an engine, whatever its length."""
        return sum(block.state_bytes for block in self.blocks)


def load(directory: Path | str) -> ModelShape:
    """Of a Hugging Face directory. Raises ConfigError if there is no config.json, or its family is not counted here."""
    path = Path(directory) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path), "valid: a Hugging Face directory with config.json") from error
    return of(fields, str(path))


def of(fields: Fields, where: str = "config.json") -> ModelShape:
    """From the fields of a config.json; the text part of one that has several. Raises ConfigError as `load`."""
    text = fields.get("text_config") or fields
    family = str(text.get("model_type", ""))
    family = family if family in FAMILIES else f"{family}_text"  # of a model that also sees
    if family not in FAMILIES:
        raise ConfigError(f"models of type {fields.get('model_type')!r} are not counted", where, f"counted: {', '.join(FAMILIES)}")
    try:
        blocks = tuple(FAMILIES[family](text, layer) for layer in range(int(text["num_hidden_layers"])))
        tied = bool(text.get("tie_word_embeddings", fields.get("tie_word_embeddings", False)))
        kv_heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
        return ModelShape(family, int(text["hidden_size"]), int(text["vocab_size"]), tied, kv_heads, blocks)
    except KeyError as error:
        raise ConfigError(f"{error} is not in it", where, "valid: the config.json of a decoder") from error


def _dense(fields: Fields, layer: int, *, qkv_bias: bool | None = None, o_bias: bool | None = None, norms: bool = False) -> Block:
    """Llama's block. `norms`: of each head's query and key. Biases that are not told here are `attention_bias`."""
    return _block(fields, _attention(fields, qkv_bias, o_bias, norms), _mlp(fields, int(fields["intermediate_size"])))


def _moe(fields: Fields, layer: int, *, qkv_bias: bool | None = None, o_bias: bool | None = None, norms: bool = False) -> Block:
    return _block(fields, _attention(fields, qkv_bias, o_bias, norms), _experts_or_mlp(fields, layer))


def _olmoe(fields: Fields, layer: int) -> Block:
    """Norms span all heads."""
    _, a, k = _widths(fields)
    attention = _attention(fields, None, None, False)
    experts = _experts(fields, int(fields["intermediate_size"]))
    return _block(fields, replace(attention, parameters=attention.parameters + a + k), experts)


def _mixtral(fields: Fields, layer: int) -> Block:
    attention = _attention(fields, False, False, False)
    return _block(fields, attention, _experts(fields, int(fields["intermediate_size"])))


def _hybrid(fields: Fields, layer: int) -> Block:
    """Qwen3.5 and Qwen3-Next: full attention with an output gate in each fourth layer, a gated delta rule in the others."""
    interval = int(fields.get("full_attention_interval") or 4)
    types = fields.get("layer_types")
    linear = types[layer] == "linear_attention" if types else (layer + 1) % interval != 0
    attention = _delta_rule(fields) if linear else _attention(fields, None, None, True, gate=True)
    sparse = "moe" in str(fields["model_type"]) or fields["model_type"] == "qwen3_next"
    inner = _experts_or_mlp(fields, layer) if sparse else _mlp(fields, int(fields["intermediate_size"]))
    return _block(fields, attention, inner)


FAMILIES: dict[str, Callable[[Fields, int], Block]] = {
    "llama": lambda fields, layer: _dense(fields, layer),
    "mistral": lambda fields, layer: _dense(fields, layer, qkv_bias=False, o_bias=False),
    "qwen2": lambda fields, layer: _dense(fields, layer, qkv_bias=True, o_bias=False),
    "qwen3": lambda fields, layer: _dense(fields, layer, norms=True),
    "qwen3_5_text": _hybrid,
    "qwen2_moe": lambda fields, layer: _moe(fields, layer, qkv_bias=bool(fields.get("qkv_bias", True)), o_bias=False),
    "qwen3_moe": lambda fields, layer: _moe(fields, layer, norms=True),
    "qwen3_next": _hybrid,
    "qwen3_5_moe_text": _hybrid,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
}


@dataclass(frozen=True, slots=True)
class _Part:
    """Half a block. `kept`: numbers of a token that the backward pass keeps, 2 bytes each."""

    parameters: int
    kept: int
    attention: int = 0
    kv: int = 0
    experts: int = 0
    routed: float = 0.0
    state_bytes: int = 0
    linear: tuple[Linear, ...] = ()


def _block(fields: Fields, attention: _Part, inner: _Part) -> Block:
    h = int(fields["hidden_size"])
    # Each norm keeps its input in float32 and what it hands on in bf16, twice: before and after its own weight.
    return Block(
        parameters=attention.parameters + inner.parameters + 2 * h,
        kv_bytes=4 * attention.kv,
        attention=attention.attention,
        kept_bytes=2 * (4 * h + 2 * 2 * h) + 2 * (attention.kept + inner.kept),
        experts=inner.experts,
        routed=inner.routed,
        state_bytes=attention.state_bytes,
        linear=attention.linear + inner.linear,
    )


def _widths(fields: Fields) -> tuple[int, int, int]:
    """Head size, a and k."""
    heads = int(fields["num_attention_heads"])
    size = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
    return size, heads * size, int(fields.get("num_key_value_heads") or heads) * size


def _attention(fields: Fields, qkv_bias: bool | None, o_bias: bool | None, norms: bool, *, gate: bool = False) -> _Part:
    h, (size, a, k) = int(fields["hidden_size"]), _widths(fields)
    told = bool(fields.get("attention_bias", False))
    queries = 2 * a if gate else a
    parameters = h * (queries + 2 * k) + a * h + (2 * size if norms else 0)
    parameters += queries + 2 * k if (told if qkv_bias is None else qkv_bias) else 0
    parameters += h if (told if o_bias is None else o_bias) else 0
    # Query, key and value as attention takes them (the last two once for each head of the first), its result, and that as the
    # projection takes it; norms of heads keep float32 inputs.
    kept = 5 * a + (4 * (a + k) if norms else 0) + (2 * a if gate else 0)
    linear = (("q_proj", h, queries), ("k_proj", h, k), ("v_proj", h, k), ("o_proj", a, h))
    return _Part(parameters, kept, a, k, linear=linear)


def _delta_rule(fields: Fields) -> _Part:
    h = int(fields["hidden_size"])
    key_size, value_size = int(fields["linear_key_head_dim"]), int(fields["linear_value_head_dim"])
    keys, value_heads = int(fields["linear_num_key_heads"]) * key_size, int(fields["linear_num_value_heads"])
    values = value_heads * value_size
    mixed = 2 * keys + values
    kernel = int(fields["linear_conv_kernel_dim"])
    parameters = h * (mixed + values + 2 * value_heads) + values * h + mixed * kernel + 2 * value_heads + value_size
    # Before and after the convolution, query and key once for each head of the value, gate and result (partly float32).
    kept = 2 * mixed + 8 * values
    state = 4 * value_heads * key_size * value_size + 2 * mixed * (kernel - 1)
    if fields["model_type"] == "qwen3_next":
        into = (("in_proj_qkvz", h, mixed + values), ("in_proj_ba", h, 2 * value_heads))
    else:
        into = (("in_proj_qkv", h, mixed), ("in_proj_z", h, values), ("in_proj_b", h, value_heads), ("in_proj_a", h, value_heads))
    return _Part(parameters, kept, state_bytes=state, linear=(*into, ("out_proj", values, h)))


def _mlp(fields: Fields, i: int) -> _Part:
    h = int(fields["hidden_size"])
    bias = 2 * i + h if fields.get("mlp_bias", False) else 0
    return _Part(3 * h * i + bias, 4 * i, linear=_three(h, i))  # gate, its activation, up, their product


def _three(h: int, i: int) -> tuple[Linear, ...]:
    return ("gate_proj", h, i), ("up_proj", h, i), ("down_proj", i, h)


def _experts_or_mlp(fields: Fields, layer: int) -> _Part:
    step = int(fields.get("decoder_sparse_step") or 1)
    if layer in (fields.get("mlp_only_layers") or ()) or (layer + 1) % step:
        return _mlp(fields, int(fields["intermediate_size"]))
    return _experts(fields, int(fields["moe_intermediate_size"]))


def _experts(fields: Fields, i: int) -> _Part:
    h, top = int(fields["hidden_size"]), int(fields["num_experts_per_tok"])
    number = int(fields.get("num_experts") or fields["num_local_experts"])  # one field under two names
    shared = int(fields.get("shared_expert_intermediate_size") or 0)
    experts = number * 3 * h * i
    parameters = experts + number * h + (3 * h * shared + h if shared else 0)
    kept = top * (4 * i + 2 * h) + 4 * shared + number
    linear = (*_three(h, shared), ("shared_expert_gate", h, 1)) if shared else ()
    return _Part(parameters, kept, experts=experts, routed=min(1.0, top / number), linear=linear)
