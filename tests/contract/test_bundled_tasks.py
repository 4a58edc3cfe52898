"""Every family, level and split of the bundled suite in real sandboxes: its solution passes everything, doing nothing does not."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrsi import tasks
from termrsi.reward.checks import measure
from termrsi.reward.verifier import HarborVerifier
from termrsi.sandbox.host_pool import HostPool
from termrsi.tasks import bundled
from termrsi.tasks.bundled.words import SPLITS


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[HostPool]:
    pool = HostPool(size=2, cache_dir=tmp_path / "images", state_dir=tmp_path / "state", owner=f"test{os.getpid()}")
    yield pool
    await pool.close()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", bundled.families())
async def test_solution_passes_and_nothing_does_not(family: str, split: str, pool: HostPool, tmp_path: Path) -> None:
    bundled.generate(tmp_path / "suite", split=split, seeds=[0], families=[family])
    for task in tasks.load_dir(tmp_path / "suite").tasks:
        found = await measure(pool, HarborVerifier(), task)
        assert len(found.checks) - len(found.baseline) >= 2, (task.id, found)
        assert set(found.baseline) < set(found.checks)
