"""Ray's object store, small and real: one that is full is told in a line, and weights that newer ones replace leave it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from termrsi import weights
from termrsi.actors.calls import ask
from termrsi.actors.engines import Engines
from termrsi.actors.generator import EngineOptions, GeneratorActor
from termrsi.actors.group import Group
from termrsi.actors.model_host import Handed, RayPolicy
from termrsi.errors import EngineError
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import WeightsVersion
from tests.contract.test_engines import scripted

pytestmark = pytest.mark.ray
STORE_MB, WEIGHTS_MB = 100, 24
SOON_S = 120.0


@pytest.fixture
def small_store(own_ray: None, request: pytest.FixtureRequest) -> None:
    """With a disk to spill to, or, `param`, one that counts as full."""
    limits = {"local_fs_capacity_threshold": 0.0001} if getattr(request, "param", False) else {}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_MB * 2**20,
        _system_config=limits,
    )


@ray.remote
class Learner:
    """Hands out as a PolicyActor does; what it hands out is `WEIGHTS_MB` of its version's number."""

    def __init__(self) -> None:
        self._version = 0

    def take(self, samples: list[Any]) -> int:
        return len(samples)

    def give(self, size_mb: int) -> Any:  # Any: an array
        return np.ones(size_mb << 20, np.uint8)

    def export(self, base: int, bucket_bytes: int) -> Iterator[Any]:  # Any: an object of the store, then `Handed`
        self._version += 1
        packed = {"w": ("uint8", (WEIGHTS_MB << 20,), np.full(WEIGHTS_MB << 20, self._version % 256, np.uint8))}
        yield packed
        yield Handed(self._version, weights.facts_of(packed), (("w",),))


def fetching() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Fetching(scripted()):
        async def load(self, facts: Any, fetch: Any, version: int) -> dict[str, float]:  # Any: as `GeneratorActor.pull` gives them
            (_, _, data) = (await fetch(list(facts)))["w"]
            assert set(np.asarray(data)) == {version}
            self.version = version
            return {}

    return Fetching


def usage() -> Any:  # Any: Ray's own record
    """Of the store of the one node there is."""
    from ray._private.internal_api import node_stats  # Ray has no public way without its dashboard

    (node,) = ray.nodes()
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats


@pytest.mark.parametrize("small_store", [True], indirect=True)
async def test_a_store_without_room_is_told_with_size_limit_and_setting(small_store: None) -> None:
    learner = Learner.remote()
    too_much = np.ones(2 * STORE_MB << 20, np.uint8)
    told = rf"^learner: the object store is full.*what {{}} moves.*limit {STORE_MB} MiB.*; valid: a larger cluster.object_store_mb"
    group = Group("learner", [learner], SOON_S)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(EngineError, match=told.format("take")):
            await ask("learner", learner, "take", [too_much])
        with pytest.raises(EngineError, match=told.format("give")) as caught:
            await ask("learner", learner, "give", 2 * STORE_MB)
        with pytest.raises(EngineError, match=told.format("take")):
            await group.call("take", [too_much])
        assert await ask("learner", learner, "take", [1, 2]) == 2, "the actor has lived on"
    assert "\n" not in str(caught.value)


async def test_weights_that_newer_ones_replace_leave_the_store(small_store: None) -> None:
    """Twenty versions through a store that holds four: what is used stays flat, and nothing is spilled."""
    settings = {"num_cpus": 0.1, "max_concurrency": 100, "max_restarts": 0}
    actors: list[Any] = [GeneratorActor.options(**settings).remote("", EngineOptions(), fetching()) for _ in range(2)]
    policy, engines = RayPolicy(Learner.remote()), Engines(actors, PrefixRouter(2, slack=4), restarts=0)
    used: list[float] = []
    newest: WeightsVersion | None = None
    async with asyncio.timeout(SOON_S):
        for version in range(1, 21):
            newest = await policy.publish()
            await engines.pull(newest)
            assert newest.version == version
            used.append(usage().object_store_bytes_used / 2**20)
    assert max(used) <= 2 * WEIGHTS_MB + 2, used
    async with asyncio.timeout(SOON_S):
        while usage().object_store_bytes_used > (WEIGHTS_MB + 2) * 2**20:  # noqa: ASYNC110  # Ray frees in its own time, and tells nobody
            await asyncio.sleep(0.1)
    assert usage().spilled_bytes_total == 0
