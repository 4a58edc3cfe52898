"""One real tokenizer for the session: byte-level, ChatML, out of the tiny model's directory."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from termrsi.harness.render import ChatFormat
from termrsi.model.checkpoint import tiny_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:  # Any: transformers' tokenizers share no cheap base
    return AutoTokenizer.from_pretrained(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def chat(tokenizer: Any) -> ChatFormat:  # Any: see above
    return ChatFormat(tokenizer)
