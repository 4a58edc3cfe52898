"""GPUs that a run asks for, against those of this machine, before anything starts."""

import pytest
import torch

from termrsi import setup
from termrsi.config.load import load
from termrsi.errors import ConfigError


def told(there: int, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    said: list[str] = []
    setup.check_gpus(load(("experiment=reterm", *words)), said.append)
    return said


@pytest.mark.parametrize("scale", ["node", "full"])
def test_a_machine_without_a_gpu_is_refused_with_what_to_choose(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        told(0, monkeypatch, f"scale={scale}", "cluster=node")
    assert str(caught.value) == (
        "cluster: the roles ask for 6 GPUs (policy 2 x 1 + generator 4 x 1) and 6.5 CPUs, and this machine has 0;"
        " valid: cluster=local scale=laptop here, or cluster.address=HOST:PORT of a Ray cluster that has them"
    )


def test_as_many_as_are_asked_for_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(6, monkeypatch, "scale=node", "cluster=node") == []
    with pytest.raises(ConfigError, match="this machine has 5"):
        told(5, monkeypatch, "scale=node", "cluster=node")
    shared = ("scale=laptop", "cluster.gpus_generator=0.5", "cluster.gpus_learner=0.25")
    assert told(1, monkeypatch, *shared) == []


def test_a_scale_for_gpus_that_asks_for_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(8, monkeypatch, "scale=node") == [
        "note: scale=node is meant for GPUs and `cluster` asks for none: cluster=node does, scale=laptop needs none"
    ]
    assert told(0, monkeypatch, "scale=laptop") == []
