"""The recovery queue and the group buffer as actors: one owner for state that several parts touch."""

from collections.abc import Sequence
from typing import Any

import ray

from termrsi.actors.calls import ask, ask_while_it_answers
from termrsi.queues.recovery import RecoveryQueue
from termrsi.queues.store import GroupStore
from termrsi.records import FinishedBatch, Flow, RecoveryPoint, ScoredRollout


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

    def peek(self, n: int) -> list[RecoveryPoint]:
        return self._queue.peek(n)

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
        return await ask("recovery queue", self.actor, "push", list(points))

    async def take(self, n: int) -> list[RecoveryPoint]:
        return await ask("recovery queue", self.actor, "take", n)

    async def peek(self, n: int) -> list[RecoveryPoint]:
        return await ask("recovery queue", self.actor, "peek", n)

    async def size(self) -> int:
        return await ask("recovery queue", self.actor, "size")

    async def reset(self, capacity: int) -> list[RecoveryPoint]:
        return await ask("recovery queue", self.actor, "reset", capacity)


@ray.remote(max_restarts=0)
class BufferActor:
    """Hosts one GroupStore. A caller that went away leaves its wait behind until `reset`."""

    def __init__(self) -> None:
        self._store = GroupStore()

    async def ready(self) -> bool:
        return True

    async def reset(self, flow: Flow, version: int, held: Sequence[tuple[str, int, bool]]) -> None:
        await self._store.reset(flow, version, held)

    async def admit(self, group_id: str) -> None:
        await self._store.admit(group_id)

    async def put(self, group_id: str, rollouts: Sequence[ScoredRollout]) -> None:
        await self._store.put(group_id, rollouts)

    async def refuse(self, group_id: str) -> None:
        await self._store.refuse(group_id)

    async def drop(self, group_id: str) -> None:
        await self._store.drop(group_id)

    async def take(self) -> FinishedBatch:
        return await self._store.take()

    async def trained(self) -> None:
        await self._store.trained()


class RayGroupStore:
    """`ports.GroupStore` over a BufferActor."""

    def __init__(self, actor: Any) -> None:  # Any: Ray's actor handles are untyped
        self.actor = actor

    async def reset(self, flow: Flow, version: int = 0, held: Sequence[tuple[str, int, bool]] = ()) -> None:
        await ask("group buffer", self.actor, "reset", flow, version, list(held))

    async def admit(self, group_id: str) -> None:
        await ask_while_it_answers("group buffer", self.actor, "admit", group_id)

    async def put(self, group_id: str, rollouts: Sequence[ScoredRollout]) -> None:
        await ask("group buffer", self.actor, "put", group_id, list(rollouts))

    async def refuse(self, group_id: str) -> None:
        await ask("group buffer", self.actor, "refuse", group_id)

    async def drop(self, group_id: str) -> None:
        await ask("group buffer", self.actor, "drop", group_id)

    async def take(self) -> FinishedBatch:
        return await ask_while_it_answers("group buffer", self.actor, "take")

    async def trained(self) -> None:
        await ask("group buffer", self.actor, "trained")
