"""Nodes of sandboxes that die under real episodes, on a Ray of several nodes: left out, taken up again, and the end of them all.

Agents' replies are written down; sandboxes, verifier, harness, actors and Ray are the real ones.
"""

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.actors.watchdog import Bounds, Watchdog
from termrsi.errors import PoolError, SandboxError, SnapshotGone
from termrsi.harness.group import recovery_group, task_group
from termrsi.harness.runner import Runner
from termrsi.records import DroppedRollout, EpisodeSpec, Limits, RecoveryPoint, SamplingParams, ScoredRollout, TaskSpec
from termrsi.sandbox.check import why_not
from termrsi.tasks import bundled, load_dir
from tests.written import CHAT, Written, bash

pytestmark = [pytest.mark.ray, pytest.mark.cluster]
SOON_S = 240.0
BOUNDS = Bounds(every_s=0.2, answer_s=5.0, late_s=5.0, hung_s=20.0)
QUICK = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}


class Nodes:
    """A head without sandboxes, and nodes with two each. All stand on this machine: the state of one is a directory of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False, "_system_config": QUICK},
        )
        self.actors: list[Any] = []  # Any: Ray's actor handles are untyped
        self.there: list[Any] = []

    def connect(self) -> None:
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def add(self, name: str) -> Any:  # Any: Ray's node
        """Known by a resource of its own, so that the test says which actor stands where."""
        return self.cluster.add_node(num_cpus=1, resources={"sandbox": 2, name: 1}, object_store_memory=80 * 2**20)

    def start(self, name: str, restarts: int = 2) -> Any:  # Any: an actor handle
        options = SandboxOptions(
            "local", 2, 256, 64, 64, network=False, cache_dir=str(self.place / "cache"), state_dir=str(self.place / f"state-{name}")
        )
        asked = {"num_cpus": 0.1, "resources": {"sandbox": 2, name: 1}, "max_restarts": restarts, "max_concurrency": 100}
        actor = SandboxActor.options(**asked).remote(options)
        self.actors.append(actor)
        return actor

    def lose(self, node: Any, name: str) -> None:
        """With its disk."""
        self.cluster.remove_node(node, allow_graceful=False)
        shutil.rmtree(self.place / f"state-{name}", ignore_errors=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if missing := why_not():
        pytest.skip("; ".join(missing))
    made = Nodes(tmp_path)
    made.connect()
    yield made
    for actor in made.actors:
        ray.kill(actor)
    ray.shutdown()
    made.cluster.shutdown()


@pytest.fixture
async def two(nodes: Nodes) -> AsyncIterator[tuple[Nodes, Any, Any, RemotePool]]:
    """Two nodes, an actor on each, and a pool over both."""
    a, b = nodes.add("a"), nodes.add("b")
    actors = [nodes.start("a"), nodes.start("b")]
    pool = RemotePool(actors)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*[actor.ready.remote() for actor in actors])
    watchdog = Watchdog(pool, actors, [], BOUNDS)
    watchdog.start()
    yield nodes, a, b, pool
    await watchdog.close()


def task_of(place: Path) -> TaskSpec:
    (task,) = load_dir(bundled.ensure(place / "tasks", split="train", seeds=range(1), levels=[1], families=["copy"])).tasks
    return task


def solution(task: TaskSpec) -> str:
    return (Path(task.path) / "solution" / "solve.sh").read_text().splitlines()[-1]


OPTIONS: dict[str, Any] = {
    "harness": "react",
    "sampling": SamplingParams(),
    "limits": Limits(max_turns=4, command_timeout_s=30),
    "seed": 0,
}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110  # of a log, or of a table that tells nobody of its changes
            await asyncio.sleep(0.1)


async def test_episodes_of_a_lost_node_run_again_on_those_that_are_left(
    two: tuple[Nodes, Any, Any, RemotePool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, a, _, pool = two
    task = task_of(tmp_path)
    runner = Runner(pool, pool, Written([bash(f"cd /app && {solution(task)} && sleep 4")]), CHAT, retries=2, concurrency=4)
    specs = task_group(task, 4, label="lost", **OPTIONS)
    lost_on: list[EpisodeSpec] = []

    async def lose_a() -> None:
        await until(lambda: [s.turn for s in runner.progress.late(-1.0)] == [1] * 4)
        lost_on.extend(s for s in specs if "sandbox node 0" in pool.node_of(standing(runner, s).sandbox))
        nodes.lose(a, "a")

    async with asyncio.timeout(SOON_S):
        losing = asyncio.ensure_future(lose_a())
        results = [result async for result in runner.run(specs)]
        await losing
    assert len(lost_on) == 2, "two on each node"
    assert all(isinstance(r, ScoredRollout) and r.verdict.strict for r in results), results
    attempts = {r.rollout.id: r.rollout.attempt for r in results if isinstance(r, ScoredRollout)}
    assert attempts == {s.id: 2 if s in lost_on else 1 for s in specs}, "only the lost ran again"
    assert any("sandbox node 0" in r.getMessage() and "lost" in r.getMessage() for r in caplog.records)

    held = [await pool.lease(task), await pool.lease(task)]  # the dead one is left out
    assert {pool.node_of(box.id).split(" at ")[0] for box in held} == {"sandbox node 1"}
    for box in held:
        await pool.release(box)
    nodes.add("a")  # what replaces it is taken up
    await until(lambda: any("answers again" in r.getMessage() for r in caplog.records))
    held = [await pool.lease(task) for _ in range(4)]
    assert sorted(pool.node_of(box.id).split(" at ")[0] for box in held) == ["sandbox node 0"] * 2 + ["sandbox node 1"] * 2
    assert (await held[0].run("echo there", 10.0)).output == "there\n"
    for box in held:
        await pool.release(box)


async def test_a_state_that_lay_on_a_lost_node_is_dropped_at_once_and_others_are_started_from(
    two: tuple[Nodes, Any, Any, RemotePool], tmp_path: Path
) -> None:
    nodes, a, _, _ = two
    task, pool = task_of(tmp_path), RemotePool(nodes.actors, return_s=10.0)
    boxes = [await pool.lease(task), await pool.lease(task)]
    snapshots = {}
    for box in boxes:
        await box.run(f"echo {box.place} > mark", 10.0)
        snapshots[box.place] = await box.snapshot()
        await pool.release(box)
    assert [await pool.kept(snapshots[place]) for place in (0, 1)] == [True, True]
    nodes.lose(a, "a")
    with pytest.raises(SnapshotGone, match="is on no node that is left"):
        async with asyncio.timeout(SOON_S):
            await pool.lease(task, snapshots[0])
    assert [await pool.kept(snapshots[place]) for place in (0, 1)] == [False, True]
    runner = Runner(pool, pool, Written([bash(f"cat mark; cd /app && {solution(task)}")]), CHAT, retries=5)
    points = [RecoveryPoint(f"point{place}", task, snapshots[place], (1, CHAT.end_of_turn), 1, 1) for place in (0, 1)]
    async with asyncio.timeout(SOON_S):
        lost, kept = [await runner.run_one(*recovery_group(point, 1, label="r", **OPTIONS)) for point in points]
    assert isinstance(lost, DroppedRollout)
    assert lost.attempts == 1
    assert lost.reason.startswith("SnapshotGone: ")
    assert isinstance(kept, ScoredRollout)
    assert kept.verdict.strict
    assert "1" in kept.rollout.turns[0].observation.splitlines()
    await pool.discard(snapshots[1])
    assert not await pool.kept(snapshots[1])


async def test_a_state_whose_nodes_process_is_started_again_is_started_from(
    two: tuple[Nodes, Any, Any, RemotePool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is there still. (Here the other node sees that disk too: that it does not decide is a test of the unit.)"""
    nodes, _, _, pool = two
    task = task_of(tmp_path)
    boxes = [await pool.lease(task), await pool.lease(task)]
    box = next(one for one in boxes if one.place == 0)
    await box.run("echo here > mark", 10.0)
    snapshot = await box.snapshot()
    for one in boxes:
        await pool.release(one)
    pid = await nodes.actors[0].__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        kept, again = await asyncio.gather(pool.kept(snapshot), pool.lease(task, snapshot))
    assert kept
    assert (await again.run("cat mark", 10.0)).output == "here\n"
    await pool.release(again)
    await until(lambda: any("answers again" in r.getMessage() for r in caplog.records))
    await pool.discard(snapshot)
    assert not await pool.kept(snapshot)


async def test_when_no_node_is_left_the_run_ends_and_says_so(two: tuple[Nodes, Any, Any, RemotePool], tmp_path: Path) -> None:
    nodes, a, b, _ = two
    task, pool = task_of(tmp_path), RemotePool(nodes.actors, patience_s=8.0)
    runner = Runner(pool, pool, Written([bash("sleep 20")]), CHAT, retries=2)
    running = asyncio.ensure_future(runner.run_one(task_group(task, 1, label="end", **OPTIONS)[0]))
    await until(lambda: any(s.turn == 1 for s in runner.progress.late(-1.0)))
    nodes.lose(a, "a")
    nodes.lose(b, "b")
    with pytest.raises(PoolError, match=r"no node for sandboxes is left: sandbox node 0.* for \d+ s .*sandbox node 1") as caught:
        async with asyncio.timeout(SOON_S):
            await running
    assert "\n" not in str(caught.value)


async def test_a_node_that_hangs_is_named_and_ended(
    two: tuple[Nodes, Any, Any, RemotePool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process stands still, as on a machine that swaps: nothing says that it is dead."""
    nodes, _, _, pool = two
    box = await pool.lease(task_of(tmp_path))
    pid = await nodes.actors[box.place].__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandboxError, match=rf"sandbox node {box.place}.*the node was lost"):
        async with asyncio.timeout(SOON_S):
            await box.run("true", 10.0)
    await pool.release(box)
    said = [r.getMessage() for r in caplog.records]
    assert any(f"sandbox node {box.place}" in line and "has not answered for" in line for line in said)
    await until(lambda: any("answers again" in r.getMessage() for r in caplog.records))


def standing(runner: Runner, spec: EpisodeSpec) -> Any:  # Any: a Standing
    return next(one for one in runner.progress.late(-1.0) if one.episode == spec.id)
