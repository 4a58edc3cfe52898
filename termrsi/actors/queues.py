"""The recovery queue as an actor: one owner for state that several parts touch."""

from collections.abc import Sequence
from typing import Any

import ray

from termrsi.queues.recovery import RecoveryQueue
from termrsi.records import RecoveryPoint


@ray.remote(max_restarts=0)
class RecoveryActor:
    """Hosts one RecoveryQueue."""

    def __init__(self, capacity: int) -> None:
        self._queue = RecoveryQueue(capacity)

    def ready(self) -> bool:
        return True

    def push(self, points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        for point in points:
            self._queue.push(point)
        return self._queue.clear_evicted()

    def take(self, n: int) -> list[RecoveryPoint]:
        return self._queue.take(n)

    def size(self) -> int:
        return len(self._queue)

    def reset(self, capacity: int) -> list[RecoveryPoint]:
        left = self._queue.take(len(self._queue))
        self._queue = RecoveryQueue(capacity)
        return left


class RayRecoveryStore:
    """`ports.RecoveryStore` over a RecoveryActor."""

    def __init__(self, actor: Any) -> None:  # Any: Ray's actor handles are untyped
        self.actor = actor

    async def push(self, points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        return await self.actor.push.remote(list(points))

    async def take(self, n: int) -> list[RecoveryPoint]:
        return await self.actor.take.remote(n)

    async def size(self) -> int:
        return await self.actor.size.remote()

    async def reset(self, capacity: int) -> list[RecoveryPoint]:
        return await self.actor.reset.remote(capacity)
