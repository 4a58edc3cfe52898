"""Liger's kernels compute what transformers' layers do: the same log-probabilities, values, losses, gradients and weights.

On a CPU they run in Triton's interpreter, see `tests/liger_side.py`; on GPUs they have not been run.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from termrsi.errors import ConfigError
from termrsi.model import liger
from termrsi.model.checkpoint import tiny_model
from termrsi.model.policy import PolicyModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:  # Any: JSON
    model = tiny_model(tmp_path_factory.mktemp("liger") / "tiny")
    command = [sys.executable, "-m", "tests.liger_side", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["whole", "recomputed", "adapters", "critic"])
def test_the_fused_learner_is_the_plain_one(found: dict[str, dict[str, Any]], case: str) -> None:
    plain, fused = found[f"{case} plain"], found[f"{case} fused"]
    assert "Liger" not in plain["layer"]
    assert "Liger" in fused["layer"], "its kernels are what computed"
    for rows in ("before", "after"):
        for one, other in zip(plain[rows], fused[rows], strict=True):
            assert other == pytest.approx(one, abs=2e-5)
    assert plain["after"] != plain["before"], "it learned"
    assert fused["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert fused["norm"] == pytest.approx(plain["norm"], rel=1e-4)


def test_without_the_package_and_of_a_family_without_kernels_it_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(liger, "installed", lambda: False)
    with pytest.raises(ConfigError, match=r"model.liger: liger-kernel is not installed"):
        PolicyModel(str(model), compute="fp32", liger=True)
    monkeypatch.undo()
    module = PolicyModel(str(model), compute="fp32")._module
    monkeypatch.setattr(module.config, "model_type", "nobody", raising=False)
    with pytest.raises(ConfigError, match="Liger has no kernels for nobody"):
        liger.fuse(module)
