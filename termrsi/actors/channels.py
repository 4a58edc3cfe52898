"""The ways of weights from the learner to the engines. The engines' client (`actors.engines`) has one, and knows no more of it."""

import asyncio
from collections.abc import Sequence
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

    async def restore(self, engine: int, weights: WeightsVersion) -> None:
        """To one engine that came back with its first weights and holds still. Raises as `deliver`."""
        ...


class ObjectStoreChannel:
    """Through Ray's object store: each engine takes what differs from what it has, when it can."""

    def __init__(self, engines: Sequence[RayGenerator]) -> None:
        self._engines = engines

    async def open(self) -> None: ...

    async def deliver(self, weights: WeightsVersion) -> None:
        await asyncio.gather(*(engine.pull(weights) for engine in self._engines))

    async def restore(self, engine: int, weights: WeightsVersion) -> None:
        await self._engines[engine].pull(weights)
