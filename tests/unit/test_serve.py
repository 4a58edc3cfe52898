"""`termrsi serve`: the command line that it becomes, and what it refuses."""

import itertools
import sys
from pathlib import Path

import pytest

from termrsi import serve
from termrsi.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "stage" / "policy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_server_has_a_runs_settings(checkpoint: Path) -> None:
    argv, environment = serve.command([str(checkpoint), "port=9000", "name=mine", "max_model_len=512", "threads=3", "eager=true"])
    assert argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(itertools.pairwise(argv))
    assert (pairs["--model"], pairs["--port"], pairs["--host"]) == (str(checkpoint), "9000", "127.0.0.1")
    assert (pairs["--served-model-name"], pairs["--max-model-len"]) == ("mine", "512")
    assert "--enable-prefix-caching" in argv
    assert "--enforce-eager" in argv
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs the directory of a checkpoint"),
        (["port=1"], "needs the directory of a checkpoint"),
        (["/nowhere"], "no config.json"),
        (["{stage}"], "did you mean {stage}/policy?"),
        (["{policy}", "prot=1"], "unknown option 'prot=1'"),
        (["{policy}", "port=high"], "valid: a whole number"),
        (["{policy}", "threads=0"], "valid: a whole number"),
        (["{policy}", "eager=yes"], "valid: true"),
    ],
)
def test_bad_input_is_one_line(checkpoint: Path, words: list[str], message: str) -> None:
    places = {"stage": str(checkpoint.parent), "policy": str(checkpoint)}
    with pytest.raises(ConfigError) as caught:
        serve.command([word.format(**places) for word in words])
    assert message.format(**places) in str(caught.value)
    assert "\n" not in str(caught.value)
