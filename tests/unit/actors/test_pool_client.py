"""A pool over nodes that go away, come back, or cannot do what they are asked, of scripted actors; no Ray is started."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from termrsi.actors import remote_pool
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.sandboxes import Beat
from termrsi.errors import SandboxError, SnapshotGone
from termrsi.fakes import dry_tasks
from termrsi.records import Snapshot

TASK = dry_tasks().train[0]
SNAPSHOT = Snapshot("kept", TASK.id, "", "")
LOST = ActorUnavailableError("it is started again", None)
SOON_S = 20.0


class Node:
    """An actor's handle. `away`: it cannot be reached; `silent`: it takes calls and answers none. `has`: snapshots.

    `fails`: what each lease raises.
    """

    def __init__(self, *has: str) -> None:
        self.has, self.away, self.silent, self.dead = set(has), False, False, False
        self.fails: Exception | None = None
        self.told: list[tuple[object, ...]] = []
        self.leases = 0

    def __getattr__(self, method: str) -> Any:  # Any: a method of Ray's handles
        def remote(*arguments: Any) -> Any:  # Any: a future, as object references are awaited
            future = asyncio.get_running_loop().create_future()
            if self.dead or self.away:
                future.set_exception(ActorDiedError() if self.dead else LOST)
                future.exception()  # seen, where nobody waits for it
            elif not self.silent:
                self.told.append((method, *arguments))
                self._answer(future, method, arguments)
            return future

        return type("Method", (), {"remote": staticmethod(remote)})

    def _answer(self, future: "asyncio.Future[Any]", method: str, arguments: tuple[Any, ...]) -> None:
        match method:
            case "beat":
                future.set_result(Beat("here", "life", forgetful=False))
            case "kept" if self.fails is not None:
                future.set_exception(self.fails)
            case "kept":
                future.set_result(arguments[0].id in self.has)
            case "lease" if self.fails is not None:
                future.set_exception(self.fails)
            case "lease":
                self.leases += 1
                future.set_result(f"box-{id(self)}-{self.leases}")
            case _:
                future.set_result(None)

    def methods(self) -> list[object]:
        return [told[0] for told in self.told]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pool, "ANSWER_S", 0.05)
    monkeypatch.setattr(remote_pool, "FRESH_S", 0.0)


def pool_of(*nodes: Node, return_s: float = remote_pool.RETURN_S) -> RemotePool:
    pool = RemotePool(nodes, return_s=return_s)
    pool._places._first_s = 0.01
    return pool


async def soon(change: Callable[[], None], delay_s: float = 0.05) -> None:
    await asyncio.sleep(delay_s)
    change()


@pytest.mark.parametrize("how", ["away", "silent"])
async def test_a_snapshot_on_a_node_that_is_started_again_is_waited_for(how: str) -> None:
    """Its process is new, its disk is not: what lay there is there still."""
    there, holder = Node(), Node("kept")
    pool = pool_of(there, holder)
    setattr(holder, how, True)
    async with asyncio.timeout(SOON_S):
        asked: list[Callable[[], Any]] = [lambda: pool.kept(SNAPSHOT), lambda: pool.lease(TASK, SNAPSHOT)]  # Any: coroutines
        for ask in asked:
            setattr(holder, how, True)
            asking = asyncio.ensure_future(ask())
            await soon(lambda: None, 0.1)
            assert not asking.done(), "the other node, which has it not, does not decide that it is gone"
            setattr(holder, how, False)
            found = await asking
            assert found is True or found.place == 1


async def test_one_on_a_node_that_does_not_come_back_is_gone_after_a_while() -> None:
    there, holder = Node(), Node("kept")
    pool = pool_of(there, holder, return_s=0.1)
    holder.away = True
    async with asyncio.timeout(SOON_S):
        assert await pool.kept(SNAPSHOT) is False
        with pytest.raises(SnapshotGone, match="snapshot kept is on no node that is left"):
            await pool.lease(TASK, SNAPSHOT)
    holder.away = False
    async with asyncio.timeout(SOON_S):
        while not await pool.kept(SNAPSHOT):  # noqa: ASYNC110  # it is asked for again once its pause is over
            await asyncio.sleep(0.01)


async def test_one_on_a_node_that_is_dead_is_gone_at_once() -> None:
    there, holder = Node(), Node("kept")
    pool = pool_of(there, holder, return_s=1000.0)
    holder.dead = True
    async with asyncio.timeout(SOON_S):
        assert await pool.kept(SNAPSHOT) is False


async def test_with_no_node_there_a_snapshot_is_as_long_in_coming_as_they_are() -> None:
    holder = Node("kept")
    pool = pool_of(holder, return_s=0.05)
    holder.away = True
    asking = asyncio.ensure_future(pool.kept(SNAPSHOT))
    await soon(lambda: setattr(holder, "away", False), 0.3)
    async with asyncio.timeout(SOON_S):
        assert await asking is True


async def test_a_node_that_cannot_tell_what_it_has_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemon does not answer, say: the snapshot counts as there, and a lease of it is a machine fault, tried again."""
    monkeypatch.setattr(remote_pool, "AGAIN_S", 0.01)
    there, unsure = Node(), Node("kept")
    unsure.fails = SandboxError("no Docker engine answers", "pool")
    pool = pool_of(there, unsure)
    pool._patience_s = 0.1
    assert await pool.kept(SNAPSHOT) is True
    with pytest.raises(SandboxError, match="whether it has it") as caught:
        await pool.lease(TASK, SNAPSHOT)
    assert not isinstance(caught.value, SnapshotGone)
    there.has.add("kept")
    assert (await pool.lease(TASK, SNAPSHOT)).place == 0, "who has it is asked, whatever the other says"


async def test_a_node_that_starts_no_sandboxes_is_passed_over() -> None:
    broken, well = Node(), Node()
    broken.fails = SandboxError("no space left on device", TASK.id)
    pool = pool_of(broken, well)
    pool._places._first_s = 1000.0
    with pytest.raises(SandboxError, match="no space left"):
        await pool.lease(TASK)
    boxes = [await pool.lease(TASK) for _ in range(4)]
    assert {box.place for box in boxes} == {1}
    broken.fails = None
    well.dead = True
    async with asyncio.timeout(SOON_S):
        assert (await pool.lease(TASK)).place == 0, "it is all there is"


async def test_what_a_node_missed_it_is_told_once_it_is_there() -> None:
    """A call that was lost may have been done, or be done yet: nothing is left that nobody would end."""
    node, other = Node("kept"), Node()
    pool = pool_of(node, other)
    box = await pool.lease(TASK)
    assert box.place == 0
    node.away = True
    await box.close()
    await pool.discard(SNAPSHOT)
    await pool.expect({"t": ("an older check",)})
    await pool.expect({"t": ("check",)})
    async with asyncio.timeout(SOON_S):
        assert (await pool.lease(TASK)).place == 1
    for worker, life in (("rollout worker 0", "before"), ("rollout worker 1", "first"), ("rollout worker 0", "now")):
        await pool.forget(worker, life)
    assert ("forget", "rollout worker 0", "now") in other.told
    node.away, node.told = False, []
    async with asyncio.timeout(SOON_S):
        while "beat" not in node.methods():
            pool._look()
            await asyncio.sleep(0.01)
    told = [one for one in node.told if one[0] != "beat"]
    assert ("release", box.id) in told
    assert ("discard", SNAPSHOT) in told
    assert [one[1] for one in told if one[0] == "expect"] == [{"t": ("check",)}]
    forgot = [one for one in told if one[0] == "forget"]
    assert forgot == [("forget", "rollout worker 1", "first"), ("forget", "rollout worker 0", "now")], "of each the last"
    assert pool.heard(0, "here") is False
    assert [one for one in node.told if one[0] != "beat"] == told, "once"


async def test_a_lease_that_was_lost_on_its_way_is_given_up_there() -> None:
    node, other = Node(), Node()
    pool = pool_of(node, other)
    node.fails = LOST  # the request may have come, its answer did not
    box = await pool.lease(TASK)
    assert box.place == 1
    (lost,) = [told[1] for told in node.told if told[0] == "lease"]
    pool.heard(0, "here")
    assert ("abandon", lost) in node.told
