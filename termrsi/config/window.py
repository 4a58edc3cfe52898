"""How many tokens of context a model was made for, by its `config.json`, against what a run asks for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from termrsi.config.schema import ModelConfig
from termrsi.errors import ConfigError

EMBEDDED = 8192  # SmolLM2-135M-Instruct
# Ways of stretching whose `max_position_embeddings` is the stretched length already, as vLLM reads them.
STRETCHED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def check(model: ModelConfig) -> None:
    """Raises ConfigError, with both numbers, for a context that the model was not made for.

    Says nothing where the engine is told of positions of its own (`hf_overrides`), or where nothing can be read.
    """
    if "hf_overrides" in model.engine:
        return
    longest = EMBEDDED if model.path == "embedded" else positions(_fields(Path(model.path) / "config.json"))
    if longest and model.max_model_len > longest:
        raise ConfigError(
            f"model.max_model_len={model.max_model_len} exceeds the {longest} positions of {model.path!r}",
            "",
            f"valid: up to {longest}, or rope scaling in its config.json",
        )


def positions(fields: Mapping[str, Any]) -> int:  # Any: parsed JSON
    """Of a `config.json`, that of the text in one of several kinds of input; 0: it does not say.

    Rope that is stretched by a factor multiplies what the model was trained on, except in the forms that say the product.
    """
    fields = text if isinstance(text := fields.get("text_config"), dict) else fields
    said = fields.get("max_position_embeddings")
    if not isinstance(said, int) or isinstance(said, bool) or said < 1:
        return 0
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    ways = [way for way in (rope, *rope.values()) if isinstance(way, dict)] if isinstance(rope, dict) else []  # by kind of layer
    factors = [
        way["factor"]
        for way in ways
        if (way.get("rope_type") or way.get("type")) not in STRETCHED and isinstance(way.get("factor"), int | float)
    ]
    return int(said * max([1.0, *factors]))


def _fields(path: Path) -> Mapping[str, Any]:  # Any: parsed JSON
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # what reads the model says what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}
