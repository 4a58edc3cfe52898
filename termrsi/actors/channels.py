"""The ways of weights from the learner to the engines. The engines' client (`actors.engines`) has one, and knows no more of it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from termrsi.actors.generator import RayGenerator
from termrsi.records import WeightsVersion


class Channel(Protocol):
    """Brings published weights to all engines of a run."""

    async def open(self) -> None:
        """Before the first version. Raises ConfigError, in one line, if learner or engines cannot do it."""
        ...

    async def deliver(self, weights: WeightsVersion) -> None:
        """All engines serve it on return. Raises EngineError if one has died for good, WeightsError if one's weights differ."""
        ...

    async def restore(self, engine: int, newest: Callable[[], WeightsVersion]) -> None:
        """To one engine that came back with its first weights and holds still. `newest`: asked once nothing else is on its way to
        it, so that no version comes after one that followed it. Raises as `deliver`."""
        ...


class ObjectStoreChannel:
    """Through Ray's object store: each engine takes what differs from what it has, when it can."""

    def __init__(self, engines: Sequence[RayGenerator]) -> None:
        self._engines = engines
        self._turns = [asyncio.Lock() for _ in engines]  # one version after the other, whoever brings it

    async def open(self) -> None: ...

    async def deliver(self, weights: WeightsVersion) -> None:
        await asyncio.gather(*(self._pull(engine, lambda: weights) for engine in range(len(self._engines))))

    async def restore(self, engine: int, newest: Callable[[], WeightsVersion]) -> None:
        await self._pull(engine, newest)

    async def _pull(self, engine: int, wanted: Callable[[], WeightsVersion]) -> None:
        async with self._turns[engine]:
            await self._engines[engine].pull(wanted())
