"""Positions that a `config.json` says, and a context that exceeds them."""

import json
from pathlib import Path
from typing import Any

import pytest

from termrsi.config import window
from termrsi.config.schema import ModelConfig
from termrsi.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 7}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            8192,
        ),
        ({}, 0),
        ({"max_position_embeddings": "many"}, 0),
    ],
)
def test_positions_that_a_model_has(fields: dict[str, Any], positions: int) -> None:
    assert window.positions(fields) == positions


def test_a_context_that_exceeds_them_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    window.check(ModelConfig(path=str(tmp_path), max_model_len=4096))
    with pytest.raises(ConfigError) as caught:
        window.check(ModelConfig(path=str(tmp_path), max_model_len=4097))
    assert str(caught.value).startswith(f"model.max_model_len=4097 exceeds the 4096 positions of '{tmp_path}'; valid: up to 4096")
    overrides = {"hf_overrides": {"rope_parameters": {"rope_type": "yarn"}}}
    window.check(ModelConfig(path=str(tmp_path), max_model_len=4097, engine=overrides))


@pytest.mark.parametrize("text", ["{}", "[]", "not json"])
def test_where_nothing_is_said_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    window.check(ModelConfig(path=str(tmp_path), max_model_len=10**6))


def test_the_embedded_model() -> None:
    window.check(ModelConfig(max_model_len=8192))
    with pytest.raises(ConfigError, match="exceeds the 8192 positions of 'embedded'"):
        window.check(ModelConfig(max_model_len=8193))
