"""Several engines behind one client, on real Ray actors: one version for all, and a dead one comes back with it.

What an engine computes is scripted here; the real one dies and comes back in tests/flow/test_engine_death.py.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from termrsi.actors.engines import Engines
from termrsi.actors.generator import EngineOptions, GeneratorActor
from termrsi.errors import EngineError, WeightsError
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Completion, SamplingParams, WeightsVersion
from termrsi.weights import Stored

pytestmark = pytest.mark.ray
SOON_S = 60.0
GOOD, BAD, ENDS, DIES = 1, 2, 3, 4  # the first token of a prompt: what becomes of the engine


def scripted() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Scripted:
        def __init__(self, model: str, options: EngineOptions) -> None:
            from termrsi.actors.busy import Busy

            self.version, self.dead, self.busy = 0, False, Busy()
            self.stats = {"requests": 0.0}
            self._gate = asyncio.Event()
            self._gate.set()

        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            await self._gate.wait()
            self.stats["requests"] += 1
            if prompt_ids[0] == DIES and self.version < 2:
                os._exit(1)
            if prompt_ids[0] == ENDS and self.version < 2:
                self.dead = True
                raise EngineError("EngineDeadError: gone", "generator")
            return Completion((os.getpid(),), (0.0,), "stop", self.version, self.version)

        async def load(self, facts: dict[str, int], fetch: object, version: int) -> dict[str, float]:
            if facts["bad_for_version"] == self.version:
                raise WeightsError("tensor x differs", "weights")
            self.version = version
            self._gate.set()
            return {}

        def hold(self) -> None:
            self._gate.clear()

        async def go_on(self) -> None:
            self._gate.set()

        def close(self) -> None: ...

    return Scripted


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    yield
    ray.shutdown()


class Fleet:
    """Engines whose processes end with the test."""

    def __init__(self, count: int, restarts: int = 1) -> None:
        settings = {"num_cpus": 0.1, "max_concurrency": 100, "max_restarts": restarts, "max_task_retries": 0}
        options = EngineOptions(restart_pause_s=0.0)
        self.actors: list[Any] = [GeneratorActor.options(**settings).remote("", options, scripted()) for _ in range(count)]
        self.router = PrefixRouter(count, slack=100)
        self.engines = Engines(self.actors, self.router, restarts)

    async def __aenter__(self) -> Engines:
        self.engines.watch()
        return self.engines

    async def __aexit__(self, *_: object) -> None:
        import ray

        await self.engines.close()
        for actor in self.actors:
            ray.kill(actor)


def weights(version: int, bad_for_version: int = -1) -> WeightsVersion:
    return WeightsVersion("policy", version, f"sum{version}", Stored(cast("Any", {"bad_for_version": bad_for_version}), ()))


async def ask(engines: Engines, what: int, key: str = "") -> Completion:
    async with asyncio.timeout(SOON_S):
        return await engines.generate([what], SamplingParams(), key)


async def test_all_engines_are_at_one_version_and_a_prefix_stays_at_one() -> None:
    async with Fleet(2) as engines:
        await engines.pull(weights(7))
        found = {key: {(await ask(engines, GOOD, key)).ids for _ in range(3)} for key in ("a", "b")}
        assert all(len(pids) == 1 for pids in found.values())
        assert found["a"] != found["b"]
        assert await engines.stats() == {"requests": 6.0, "busy_s": 0.0, "version": 7.0}


@pytest.mark.parametrize("how", [DIES, ENDS], ids=["its process is killed", "its engine is dead"])
async def test_what_was_asked_of_a_dead_engine_is_answered_by_its_next_life(how: int, caplog: pytest.LogCaptureFixture) -> None:
    """The weights that kill it are those that it comes back to: it must hold still until the newest are there."""
    caplog.set_level(logging.WARNING)
    async with Fleet(1) as engines:
        await engines.pull(weights(1))
        (first,) = (await ask(engines, GOOD)).ids
        asked = asyncio.ensure_future(ask(engines, how))
        await asyncio.sleep(0)
        engines._newest = weights(2)  # as a pull that came just then
        completion = await asked
        assert (completion.version_low, completion.ids == (first,)) == (2, False)
        assert [record.getMessage().split(";")[1] for record in caplog.records] == [" started again, time 1 of 1"]


async def test_before_any_pull_it_goes_on_with_the_weights_it_was_started_with() -> None:
    async with Fleet(1) as engines:
        (before,) = (await ask(engines, GOOD)).ids
        os.kill(before, signal.SIGKILL)
        completion = await ask(engines, GOOD)
        assert (completion.version_low, completion.ids == (before,)) == (0, False)


async def test_one_that_dies_too_often_ends_the_run_with_a_sentence() -> None:
    async with Fleet(1, restarts=1) as engines:
        await engines.pull(weights(1))
        with pytest.raises(EngineError, match="the generator actor died"):
            await ask(engines, DIES)
        with pytest.raises(EngineError, match="the generator actor died"):
            async with asyncio.timeout(SOON_S):
                await engines.pull(weights(2))


async def test_one_that_cannot_have_its_weights_back_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with Fleet(1) as engines:
        await engines.pull(weights(1))
        engines._newest = weights(9, bad_for_version=0)  # as its next life is
        with pytest.raises(EngineError, match="the generator actor died"):
            await ask(engines, DIES)
        assert "came back without its weights: weights: tensor x differs" in caplog.records[-1].getMessage()


async def test_a_pull_is_done_once_and_what_died_during_it_has_it_after() -> None:
    """The other engine is not kept from its own."""
    async with Fleet(2) as engines:
        await engines.pull(weights(1))
        os.kill((await ask(engines, GOOD)).ids[0], signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            await engines.pull(weights(2))
        assert (await engines.stats())["version"] == 2.0
        assert {(await ask(engines, GOOD, key)).version_low for key in ("a", "b")} == {2}
