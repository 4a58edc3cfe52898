"""`ports.GroupStore`, in this process and as a Ray actor: who waits for whom, and that every wait ends."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from termrsi import ports
from termrsi.errors import StageError
from termrsi.queues.store import GroupStore
from termrsi.records import Flow, Rollout, ScoredRollout, StopReason, Verdict

SOON_S = 60.0  # a Ray actor starts within the first test


@pytest.fixture(scope="module")
def buffer_actor() -> Iterator[Any]:  # Any: Ray's actor handles are untyped
    """One Ray and one actor for the module: each test begins with a `reset`."""
    import ray

    from termrsi.actors.queues import BufferActor

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    yield BufferActor.options(num_cpus=0.1, max_concurrency=100).remote()
    ray.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def store(request: pytest.FixtureRequest) -> ports.GroupStore:
    if request.param == "local":
        return GroupStore()
    actor = request.getfixturevalue("buffer_actor")
    from termrsi.actors.queues import RayGroupStore

    return RayGroupStore(actor)


def scored(name: str) -> ScoredRollout:
    return ScoredRollout(Rollout(name, name, "task", "files", "react", (), (), StopReason.done), Verdict(True, 1.0))


async def waits(call: asyncio.Future) -> bool:
    """Whether the call is still open once the store has answered everything asked before and after it."""
    done, _ = await asyncio.wait([call], timeout=0.3)
    return not done


async def test_groups_come_out_in_the_order_of_admission_and_slots_bound_them(store: ports.GroupStore) -> None:
    async with asyncio.timeout(SOON_S):
        await store.reset(Flow(2, 0))
        await store.admit("a")
        await store.admit("b")
        third = asyncio.ensure_future(store.admit("c"))
        batch = asyncio.ensure_future(store.take())
        await store.put("b", [scored("b")])
        assert await waits(batch)  # a is the older one
        await store.put("a", [scored("a1"), scored("a2")])
        groups = (await batch).groups
        assert [(g.group_id, [r.rollout.id for r in g.rollouts], g.version, g.staleness) for g in groups] == [
            ("a", ["a1", "a2"], 0, 0),
            ("b", ["b"], 0, 0),
        ]
        assert await waits(third)  # taken is not trained
        await store.trained()
        await third
        await store.admit("d")
        for name in ("c", "d"):
            await store.put(name, [scored(name)])
        assert [(g.version, g.staleness) for g in (await store.take()).groups] == [(1, 0), (1, 0)]


async def test_one_version_ahead(store: ports.GroupStore) -> None:
    async with asyncio.timeout(SOON_S):
        await store.reset(Flow(1, 1))
        for name in ("a", "b"):
            await store.admit(name)
            await store.put(name, [scored(name)])
        assert [g.staleness for g in (await store.take()).groups] == [0]
        await store.trained()
        assert [g.staleness for g in (await store.take()).groups] == [1]


async def test_a_dropped_group_frees_its_slot(store: ports.GroupStore) -> None:
    async with asyncio.timeout(SOON_S):
        await store.reset(Flow(1, 0))
        await store.admit("lost")
        second = asyncio.ensure_future(store.admit("found"))
        assert await waits(second)
        await store.drop("lost")
        await second
        await store.put("found", [scored("found")])
        assert [g.group_id for g in (await store.take()).groups] == ["found"]


async def test_a_group_of_no_use_frees_its_slot_and_is_told_with_its_batch(store: ports.GroupStore) -> None:
    async with asyncio.timeout(SOON_S):
        await store.reset(Flow(1, replace=1))
        await store.admit("useless")
        second = asyncio.ensure_future(store.admit("found"))
        assert await waits(second)
        batch = asyncio.ensure_future(store.take())
        await store.refuse("useless")
        await second
        assert await waits(batch)
        await store.put("found", [scored("found")])
        taken = await batch
        assert ([g.group_id for g in taken.groups], taken.refused, taken.missing) == (["found"], ("useless",), 0)
        await store.reset(Flow(1, replace=1), 4, [("useless", 4, True), ("found", 4, False)])
        await store.refuse("found")
        taken = await store.take()
        assert (taken.groups, taken.refused, taken.missing) == ((), ("useless", "found"), 1)


async def test_a_reset_ends_every_wait_with_an_error(store: ports.GroupStore) -> None:
    async with asyncio.timeout(SOON_S):
        await store.reset(Flow(1, 0))
        await store.admit("a")
        calls = [asyncio.ensure_future(c) for c in (store.admit("b"), store.take())]
        assert [await waits(c) for c in calls] == [True, True]
        await store.reset(Flow(1, 0))
        for call in calls:
            with pytest.raises(StageError, match="reset while this call waited"):
                await call
        await store.admit("a")  # a new phase knows nothing of the ids before


async def test_an_id_comes_once(store: ports.GroupStore) -> None:
    async with asyncio.timeout(SOON_S):
        await store.reset(Flow(2, 0))
        await store.admit("a")
        with pytest.raises(ValueError, match="admitted before"):
            await store.admit("a")
