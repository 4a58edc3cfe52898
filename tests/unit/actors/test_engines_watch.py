"""An engine that came back without its weights is ended, whatever kept them from it, and its end is told."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from termrsi.actors.engines import Engines
from termrsi.errors import WeightsError
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import WeightsVersion


class Actor:
    """Dies once; its next life lasts."""

    def __init__(self) -> None:
        self.life, self._lives = self, 0

    async def remote(self) -> None:
        self._lives += 1
        if self._lives == 1:
            raise ActorUnavailableError("it died", None)
        await asyncio.Event().wait()


class Channel:
    """Delivers, and fails to restore."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def open(self) -> None: ...

    async def deliver(self, weights: WeightsVersion) -> None: ...

    async def restore(self, engine: int, newest: Callable[[], WeightsVersion]) -> None:
        assert newest().version == 3
        raise self._error


@pytest.mark.parametrize("error", [WeightsError("tensor x differs", "weights"), OSError(28, "No space left on device")])
async def test_one_without_its_weights_is_ended_and_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[Any] = []
    ended = asyncio.Event()
    monkeypatch.setattr(ray, "kill", lambda actor: killed.append(actor) or ended.set())
    actor = Actor()
    engines = Engines([actor], PrefixRouter(1, slack=4), restarts=1, channel=lambda _: Channel(error))
    await engines.pull(WeightsVersion("policy", 3, "sum"))
    engines.watch()
    async with asyncio.timeout(10):
        await ended.wait()
    await engines.close()
    assert killed == [actor]
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"generator 0 came back without its weights: {error}" in told.getMessage()
    assert bool(told.exc_info) == isinstance(error, OSError), "what no line tells has its traceback"
