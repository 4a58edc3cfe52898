"""The engines of a run behind one client: requests where they fit, all engines at one version, a dead one started again.

Ray starts an engine's process again after a death, a bounded number of times. It comes back with the weights that it was first
started with and serves nothing until the newest are pulled, which its watcher here sees to. A watcher waits for the end of its
engine's process and for nothing else; `close` ends it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from termrsi.actors.calls import bounded, first_line
from termrsi.actors.channels import Channel, ObjectStoreChannel
from termrsi.actors.generator import RayGenerator
from termrsi.errors import EngineError, WeightsError
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Completion, SamplingParams, WeightsVersion

STATS_S = 60.0
_LOG = logging.getLogger(__name__)


class Engines:
    """`ports.Generator` over all GeneratorActors of a run. `router`: shared with whoever sends episodes to them."""

    def __init__(
        self,
        actors: Sequence[Any],  # Any: Ray's actor handles are untyped
        router: PrefixRouter,
        restarts: int,
        channel: Callable[[Sequence[RayGenerator]], Channel] = ObjectStoreChannel,
    ) -> None:
        self._actors = list(actors)
        self._engines = [RayGenerator(actor) for actor in actors]
        self._channel = channel(self._engines)
        self._router = router
        self._restarts = restarts
        self._newest: WeightsVersion | None = None  # held here: an engine that comes back needs it
        self._watchers: list[asyncio.Task[None]] = []
        self._told: list[Counter[str]] = [Counter() for _ in actors]  # what each said last of its own life
        self._before: Counter[str] = Counter()  # of lives that are over, as far as they were told

    async def open(self) -> None:
        """Raises ConfigError if weights cannot come to the engines as they should."""
        await self._channel.open()

    def watch(self) -> None:
        self._watchers = [asyncio.ensure_future(self._watch(i)) for i in range(len(self._actors))]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        """See RayGenerator."""
        engine = self._router.begin(prefix_key)
        try:
            return await self._engines[engine].generate(prompt_ids, params, prefix_key)
        finally:
            self._router.end(engine)

    async def pull(self, weights: WeightsVersion) -> None:
        """All engines, at once. Raises EngineError if one has died for good, WeightsError if one's weights differ."""
        self._newest = weights
        await self._channel.deliver(weights)

    async def stats(self) -> dict[str, float]:
        """Sums over the engines, of all their lives; `busy_s` is their mean, `version` the lowest."""
        asked = [
            bounded(f"generator {i}", actor.stats.remote(), "stats", patience_s=STATS_S) for i, actor in enumerate(self._actors)
        ]
        for i, one in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
            if isinstance(one, RayActorError | TimeoutError):  # between two lives, or late: what it said last stands
                continue
            if isinstance(one, BaseException):
                raise one
            self._told[i] = Counter(one)
        total: Counter[str] = Counter()
        for one in (self._before, *self._told):
            total.update(one)
        lowest = min(told["version"] for told in self._told)
        return {**total, "busy_s": total["busy_s"] / len(self._actors), "version": lowest}

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []

    async def _watch(self, i: int) -> None:
        deaths = 0
        while True:
            try:
                await self._actors[i].life.remote()
            except ActorUnavailableError as error:
                deaths += 1
                _LOG.warning("generator %d: %s; started again, time %d of %d", i, first_line(error), deaths, self._restarts)
                ended, self._told[i] = self._told[i], Counter()
                del ended["version"]
                self._before.update(ended)
                await self._catch_up(i)
            except RayActorError:  # for good: whoever asks next is told
                return

    async def _catch_up(self, i: int) -> None:
        """The newest weights to an engine that came back. One that cannot have them is ended: nobody then waits for it in vain."""
        try:
            await (self._engines[i].go_on() if self._newest is None else self._channel.restore(i, self._newest_now))
        except Exception as error:  # noqa: BLE001  # one that holds still would be waited for, and nobody awaits a watcher
            _LOG.error("generator %d came back without its weights: %s", i, first_line(error), exc_info=not _told(error))
            ray.kill(self._actors[i])

    def _newest_now(self) -> WeightsVersion:
        assert self._newest is not None, "once published, something always is"
        return self._newest


def _told(error: Exception) -> bool:
    """Whether its one line says all."""
    return isinstance(error, EngineError | WeightsError)
