"""`ports.GroupStore`: a GroupBuffer with waits. One owner, one event loop; an actor hosts it in a run, tests use it as it is.

`admit` waits for a free slot: `trained`, `refuse` or `drop` ends that. `take` waits for its groups: `put` or `refuse` ends that.
`reset` ends every wait with an error, so that none outlives the phase it belongs to.
"""

import asyncio
from collections.abc import Callable, Sequence

from termrsi.errors import StageError
from termrsi.queues.buffer import GroupBuffer
from termrsi.records import FinishedBatch, FinishedGroup, Flow, ScoredRollout


class GroupStore:
    """Starts with one slot; `reset` sets the sizes of a phase."""

    def __init__(self) -> None:
        self._buffer: GroupBuffer[tuple[ScoredRollout, ...]] = GroupBuffer(Flow(1))
        self._changed = asyncio.Condition()
        self._phase = 0

    async def reset(self, flow: Flow, version: int = 0, held: Sequence[tuple[str, int, bool]] = ()) -> None:
        async with self._changed:
            self._buffer = GroupBuffer(flow, version)
            for group_id, born, refused in held:
                self._buffer.readmit(group_id, born, refused)
            self._phase += 1
            self._changed.notify_all()

    async def admit(self, group_id: str) -> None:
        async with self._changed:
            await self._until(lambda: self._buffer.admit(group_id))

    async def put(self, group_id: str, rollouts: Sequence[ScoredRollout]) -> None:
        async with self._changed:
            self._buffer.put(group_id, tuple(rollouts))
            self._changed.notify_all()

    async def refuse(self, group_id: str) -> None:
        async with self._changed:
            self._buffer.refuse(group_id)
            self._changed.notify_all()

    async def drop(self, group_id: str) -> None:
        async with self._changed:
            self._buffer.drop(group_id)
            self._changed.notify_all()

    async def take(self) -> FinishedBatch:
        taken: list[FinishedBatch] = []

        def ready() -> bool:
            if (batch := self._buffer.take()) is not None:
                groups = tuple(FinishedGroup(r.group_id, r.group, r.version, r.staleness) for r in batch.groups)
                taken.append(FinishedBatch(groups, batch.refused, batch.missing))
            return bool(taken)

        async with self._changed:
            await self._until(ready)
        return taken[0]

    async def trained(self) -> None:
        async with self._changed:
            self._buffer.trained()
            self._changed.notify_all()

    async def _until(self, true: Callable[[], bool]) -> None:
        """Holds the lock whenever `true` is asked. Raises StageError if `reset` came in between."""
        phase = self._phase
        while not true():
            await self._changed.wait()
            if self._phase != phase:
                raise StageError("the buffer was reset while this call waited", "group buffer")
