"""Requesters that go away, at each moment of a lease, without Ray between: no place is lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from termrsi.actors.sandboxes import GONE, SandboxActor, SandboxOptions
from termrsi.errors import SandboxError
from termrsi.fakes import FakeSandbox, FakeWorld, dry_tasks
from termrsi.ports import Sandbox
from termrsi.records import Snapshot, TaskSpec

TASK = dry_tasks().train[0]


class Pool:
    """Grants when it is told to."""

    def __init__(self) -> None:
        self.grant, self._world = asyncio.Event(), FakeWorld()
        self.out: list[Sandbox] = []

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        await self.grant.wait()
        self.out.append(FakeSandbox(self._world))
        return self.out[-1]

    async def release(self, sandbox: Sandbox) -> None:
        self.out.remove(sandbox)


@pytest.fixture
def actor(tmp_path: Path) -> Any:  # Any: the class behind Ray's
    options = SandboxOptions("local", 1, 64, 64, 16, network=False, cache_dir=str(tmp_path), state_dir=str(tmp_path))
    made = SandboxActor.__ray_metadata__.modified_class(options)  # pyright: ignore[reportAttributeAccessIssue]
    made._pool = Pool()
    return made


async def given_up(lease: "asyncio.Future[str]", actor: Any) -> None:
    with pytest.raises(SandboxError, match="gave up"):
        await lease
    assert (actor._pool.out, actor._leased, actor._asked, actor._gone) == ([], {}, {}, {})


async def test_before_its_request_came(actor: Any) -> None:
    await actor.abandon("r")
    actor._pool.grant.set()
    await given_up(asyncio.ensure_future(actor.lease("r", TASK, None)), actor)


async def test_while_it_waits(actor: Any) -> None:
    lease = asyncio.ensure_future(actor.lease("r", TASK, None))
    await asyncio.sleep(0)
    await actor.abandon("r")
    await given_up(lease, actor)


@pytest.mark.parametrize("turns", range(1, 5))
async def test_in_the_moments_of_its_grant(actor: Any, turns: int) -> None:
    lease = asyncio.ensure_future(actor.lease("r", TASK, None))
    await asyncio.sleep(0)
    actor._pool.grant.set()
    for _ in range(turns):  # of the loop: the grant is on its way to the lease
        await asyncio.sleep(0)
    await actor.abandon("r")
    await asyncio.wait([lease])
    assert (actor._pool.out, actor._leased, actor._asked, actor._gone) == ([], {}, {}, {})


async def test_after_it(actor: Any) -> None:
    actor._pool.grant.set()
    await actor.lease("r", TASK, None)
    await actor.abandon("r")
    assert (actor._pool.out, actor._leased, actor._granted) == ([], {}, {})


async def test_those_whose_request_never_comes_are_forgotten(actor: Any) -> None:
    for i in range(GONE + 10):
        await actor.abandon(str(i))
    assert len(actor._gone) == GONE


async def test_one_that_waits_for_what_its_verdicts_must_come_with_can_be_forgotten(actor: Any) -> None:
    """After a start it leases nothing until it has been told; a requester may die meanwhile."""
    actor._knows.clear()
    actor._pool.grant.set()
    lease = asyncio.ensure_future(actor.lease("worker 1/a/r", TASK, None))
    await asyncio.sleep(0)
    await actor.forget("worker 1")
    await given_up(lease, actor)


async def test_a_client_that_died_is_forgotten_and_its_next_life_is_not(actor: Any) -> None:
    actor._pool.grant.set()
    for request in ("worker 1/a/r", "worker 1/b/r", "worker 10/a/r"):
        await actor.lease(request, TASK, None)
    await actor.forget("worker 1", "b")
    assert sorted(actor._granted) == ["worker 1/b/r", "worker 10/a/r"]
    assert len(actor._pool.out) == 2
    await actor.forget("worker 1")
    assert sorted(actor._granted) == ["worker 10/a/r"]


async def test_a_sandbox_is_given_back_though_a_fork_of_it_cannot_be_closed(actor: Any) -> None:
    actor._pool.grant.set()
    box = await actor.lease("r", TASK, None)
    released, release = [], actor._pool.release

    async def fails(sandbox: Sandbox) -> None:
        released.append(sandbox.id)
        if sandbox.id == "fork":
            raise SandboxError("is in doubt", "fork")
        await release(sandbox)

    actor._pool.release, actor._forks[box] = fails, {"fork": type("Fork", (), {"id": "fork"})()}
    with pytest.raises(SandboxError, match="in doubt"):
        await actor.release(box)
    assert sorted(released) == sorted(["fork", box])
    assert actor._pool.out == []


async def test_a_dead_clients_sandbox_that_cannot_be_closed_keeps_none_of_its_others(actor: Any) -> None:
    actor._pool.grant.set()
    first, *_ = [await actor.lease(f"worker 1/a/{i}", TASK, None) for i in range(3)]
    release = actor._pool.release

    async def fails(sandbox: Sandbox) -> None:
        if sandbox.id == first:
            raise SandboxError("is in doubt", first)
        await release(sandbox)

    actor._pool.release = fails
    await actor.forget("worker 1")
    assert [one.id for one in actor._pool.out] == [first]
    assert actor._granted == {}


def test_a_lease_lasts_as_long_as_an_episode_may(tmp_path: Path) -> None:
    options = SandboxOptions(
        "local", 1, 64, 64, 16, network=False, cache_dir=str(tmp_path), state_dir=str(tmp_path), lease_limit_s=9000.0
    )
    made = SandboxActor.__ray_metadata__.modified_class(options)  # pyright: ignore[reportAttributeAccessIssue]
    assert made._pool.lease_limit_s == 9000.0
