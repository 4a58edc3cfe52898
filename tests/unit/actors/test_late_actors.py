"""An actor of each role that never answers: it is named while it is late, and given up with a sentence. No Ray is started."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from termrsi.actors import calls, generator, remote_pool, rollouts
from termrsi.actors.generator import RayGenerator
from termrsi.actors.model_host import RayCritic, RayPolicy
from termrsi.actors.queues import RayGroupStore, RayRecoveryStore
from termrsi.actors.remote_pool import RemotePool, RemoteSandbox
from termrsi.actors.rollouts import RayRollouts
from termrsi.actors.writers import RayWriter
from termrsi.errors import EngineError, PoolError, SandboxError
from termrsi.fakes import dry_tasks
from termrsi.harness.group import task_group
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Limits, SamplingParams

Never = Callable[[Any], Coroutine[Any, Any, object]]  # Any: an actor, and what its client returns
TASK = dry_tasks().train[0]


class Silent:
    """An actor's handle: every call is taken, none is answered. `returns`: how many futures `export` gives."""

    def __getattr__(self, method: str) -> "Silent":
        return self

    def remote(self, *arguments: object) -> Any:  # Any: futures, as object references are awaited
        return asyncio.get_running_loop().create_future()


CALLS: dict[str, tuple[Never, str]] = {
    "learner": (lambda actor: RayPolicy(actor).update([], {}, 1e-3), "policy: update was not done after"),
    "critic": (lambda actor: RayCritic(actor).values([]), "critic: values was not done after"),
    "reference": (lambda actor: RayPolicy(actor, name="reference").logp([]), "reference: logp was not done after"),
    "several processes": (
        lambda actor: RayPolicy(actor, actor).checksum(),
        "policy: process 0 of 2 did not come to the end of checksum",
    ),
    "generator": (lambda actor: RayGenerator(actor).generate([1], SamplingParams()), "generator: generate was not done after"),
    "weights": (lambda actor: RayGenerator(actor).go_on(), "generator: go_on was not done after"),
    "recovery queue": (lambda actor: RayRecoveryStore(actor).take(1), "recovery queue: take was not done after"),
    "group buffer": (lambda actor: RayGroupStore(actor).trained(), "group buffer: trained was not done after"),
    "a batch that is waited for": (lambda actor: RayGroupStore(actor).take(), "group buffer: ready was not done after"),
    "a slot that is waited for": (lambda actor: RayGroupStore(actor).admit("g"), "group buffer: ready was not done after"),
    "endpoint": (
        lambda actor: RayWriter(actor, "judge").write([], SamplingParams()),
        "model of role judge: write was not done after",
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LATE_S", 0.01)
    monkeypatch.setattr(calls, "PATIENCE_S", 0.025)
    monkeypatch.setattr(calls, "LOOK_S", 0.01)
    monkeypatch.setattr(calls, "ANSWER_S", 0.025)
    monkeypatch.setattr("termrsi.actors.group.PATIENCE_S", 0.025)
    monkeypatch.setattr(generator, "PATIENCE_S", 0.025)
    monkeypatch.setattr(remote_pool, "ANSWER_S", 0.025)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart=True: None)


@pytest.mark.parametrize("role", CALLS)
async def test_one_that_never_answers_is_given_up_in_a_line(role: str, caplog: pytest.LogCaptureFixture) -> None:
    call, told = CALLS[role]
    async with asyncio.timeout(10.0):
        with pytest.raises(EngineError, match=told) as caught:
            await call(Silent())
    assert "\n" not in str(caught.value)
    if role != "several processes":
        assert "has not been done for" in caplog.text, "named before it is given up"


class Waits(Silent):
    """Is ready whenever it is asked; the third time it has what is waited for."""

    def __init__(self) -> None:
        self.waited, self.asked = [], 0

    def __getattr__(self, method: str) -> Any:  # Any: as above
        if method == "ready":
            return type("Ready", (), {"remote": staticmethod(self._ready)})
        return self

    def remote(self, *arguments: object) -> Any:
        self.waited.append(super().remote())
        return self.waited[-1]

    def _ready(self) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(True)
        self.asked += 1
        if self.asked == 3:
            self.waited[0].set_result("a batch")
        return future


async def test_a_batch_is_waited_for_as_long_as_its_actor_answers() -> None:
    actor = Waits()
    async with asyncio.timeout(10.0):
        assert await RayGroupStore(actor).take() == "a batch"
    assert (actor.asked, len(actor.waited)) == (3, 1)


async def test_a_sandbox_that_never_answers_is_a_machine_fault() -> None:
    box = RemoteSandbox(RemotePool([Silent()]), 0, "box")
    async with asyncio.timeout(10.0):
        with pytest.raises(SandboxError, match="sandbox node 0: run was not done in time"):
            await box.run("true")


async def test_nodes_that_never_answer_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    pool = RemotePool([Silent(), Silent()], patience_s=0.2)
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(10.0):
            with pytest.raises(PoolError, match=r"no node for sandboxes is left: sandbox node 0 for \d+ s .*, sandbox node 1 for"):
                await pool.lease(TASK)
    assert [r.getMessage().partition(",")[0] for r in caplog.records if "left out" in r.getMessage()] == [
        "sandbox node 0 does not answer",
        "sandbox node 1 does not answer",
    ]


class Worker:
    """Is lost with its first episode, says then which life it is in, and ends no episode until `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun, self.lives = 0, 0
        self.run_one = type("Run", (), {"remote": lambda _, *arguments: asyncio.ensure_future(self._run())})()
        self.life = type("Life", (), {"remote": lambda _: asyncio.ensure_future(self._life())})()

    async def _run(self) -> str:
        self.begun += 1
        if self.begun == 1:
            raise ActorUnavailableError("it is started again", None)
        await self.go.wait()
        return "played"

    async def _life(self) -> str:
        self.lives += 1
        if self.lives == 1:
            raise ActorUnavailableError("it is started again", None)
        return "second"


class Forgets(RemotePool):
    def __init__(self) -> None:
        super().__init__([Silent()])
        self.forgot: list[tuple[str, str]] = []

    async def forget(self, client: str, life: str = "") -> None:
        self.forgot.append((client, life))


async def test_a_worker_that_is_there_again_is_no_end_however_long_its_episodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its last life held is given back as soon as it is there, not with the next episode."""
    monkeypatch.setattr(rollouts, "BACK_AFTER_S", 0.1)
    monkeypatch.setattr(rollouts, "PAUSE_S", 0.01)
    monkeypatch.setattr(rollouts, "PATIENCE_S", 100.0)
    monkeypatch.setattr(calls, "LATE_S", 100.0)
    worker, pool = Worker(), Forgets()
    played = RayRollouts([worker], pool, PrefixRouter(1, 1), 4, 0)
    one, other = task_group(TASK, 2, label="l", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)
    async with asyncio.timeout(10.0):
        first = asyncio.ensure_future(played._run_one(one))
        while worker.begun < 2:  # noqa: ASYNC110  # of a pause of the client's
            await asyncio.sleep(0.01)
        assert pool.forgot == [("rollout worker 0", "second")]
        await asyncio.sleep(0.15)  # longer than one may be away
        second = asyncio.ensure_future(played._run_one(other))
        while worker.begun < 3 and not second.done():  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)
        worker.go.set()
        assert [await first, await second] == ["played", "played"]


async def test_workers_that_never_end_an_episode_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "PATIENCE_S", 0.0)
    monkeypatch.setattr(rollouts, "longest_s", lambda spec: 0.02)
    monkeypatch.setattr(rollouts, "BACK_AFTER_S", 0.1)
    played = RayRollouts([Silent(), Silent()], RemotePool([Silent()]), PrefixRouter(1, 1), 4, 0)
    specs = task_group(TASK, 1, label="l", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)
    async with asyncio.timeout(10.0):
        with pytest.raises(EngineError, match=r"every rollout worker has died: rollout worker 0 for .*did not end episode l/"):
            async for _ in played.run(specs):
                pass
