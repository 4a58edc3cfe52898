"""One tiny model for the session, and samples for it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from termrsi.model.checkpoint import tiny_model
from termrsi.records import Sample

Make = Callable[..., list[Sample]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny model's operations are so short that threads only wait for each other, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_samples() -> Make:
    """Random ids; a prompt, then actions with observations between them; every list the losses may ask for."""

    def make(num: int = 5, seed: int = 0) -> list[Sample]:
        g = torch.Generator().manual_seed(seed)
        samples = []
        for i in range(num):
            n = 12 + 5 * i
            ids = torch.randint(0, 256, (n,), generator=g).tolist()
            mask = [int(k >= 4 and k % 5 != 0) for k in range(n)]
            column = (torch.randn(n, generator=g) * torch.tensor(mask)).tolist()
            sample = Sample(tuple(ids), tuple(mask), (0,) * n, rollout_id=f"r{i}", group_id="g", advantages=tuple(column))
            samples.append(dataclasses.replace(sample, returns=tuple(column), old_values=(0.0,) * n))
        return samples

    return make
