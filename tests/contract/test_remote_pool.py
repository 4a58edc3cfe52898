"""The pool behind its actor: sandboxes by handle, many at once, and requesters that go away."""

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from termrsi.actors.archives import pack, unpack
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.errors import SandboxError
from termrsi.records import EnvironmentSpec, TaskSpec

pytestmark = pytest.mark.ray
TASK = TaskSpec(id="t", family="f", instruction="", path="", environment=EnvironmentSpec())
SOON_S = 60.0


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:  # Any: Ray's actor handles are untyped
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    place = tmp_path_factory.mktemp("pool")
    options = SandboxOptions("local", 2, 256, 64, 64, network=False, cache_dir=str(place / "cache"), state_dir=str(place / "state"))
    yield SandboxActor.options(num_cpus=0.1, max_concurrency=100).remote(options)
    ray.shutdown()


@pytest_asyncio.fixture
async def pool(actor: Any) -> AsyncIterator[RemotePool]:
    """Both places are free again after each test."""
    pool = RemotePool([actor])
    yield pool
    async with asyncio.timeout(SOON_S):
        for sandbox in await asyncio.gather(pool.lease(TASK), pool.lease(TASK)):
            await pool.release(sandbox)


async def test_forks_of_two_sandboxes_at_once(pool: RemotePool) -> None:
    async def one(name: str) -> list[str]:
        sandbox = await pool.lease(TASK)
        await sandbox.run(f"x={name}")
        answers = []
        for _ in range(4):
            forks = await sandbox.fork(2)
            answers += [(await fork.run("echo $x")).output for fork in forks]
            await asyncio.gather(*(fork.close() for fork in forks))
        await pool.release(sandbox)
        return answers

    async with asyncio.timeout(SOON_S):
        assert await asyncio.gather(one("a"), one("b")) == [["a\n"] * 8, ["b\n"] * 8]


async def test_a_release_ends_the_forks_that_nobody_closed(pool: RemotePool) -> None:
    sandbox = await pool.lease(TASK)
    (fork,) = await sandbox.fork(1)
    await pool.release(sandbox)
    with pytest.raises(SandboxError, match="not leased"):
        await fork.run("true")
    await fork.close()


async def test_a_requester_that_goes_away_gives_its_place_back(pool: RemotePool) -> None:
    """While it waits for a place, while the sandbox starts, and in the moment it is granted."""
    held = [await pool.lease(TASK), await pool.lease(TASK)]
    waiting = asyncio.ensure_future(pool.lease(TASK))
    await asyncio.sleep(0.1)
    waiting.cancel()
    for sandbox in held:
        await pool.release(sandbox)
    for delay_s in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1):
        starting = asyncio.ensure_future(pool.lease(TASK))
        await asyncio.sleep(delay_s)
        starting.cancel()
        found = (await asyncio.gather(starting, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            await pool.release(found)


def test_archives_are_read_by_every_python_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11.0 to 3.11.3 know no extraction filters."""
    monkeypatch.delattr(tarfile, "tar_filter")

    def old(self: tarfile.TarFile, path: Path) -> None:
        self.extract("content/f", path)

    monkeypatch.setattr(tarfile.TarFile, "extractall", old)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "f").write_text("x")
    assert (unpack(pack(tmp_path / "in"), tmp_path / "out") / "f").read_text() == "x"
