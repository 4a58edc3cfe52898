"""The processes of one model host, called as one: the same method on each, the first one's answer.

They wait for each other inside a call, so one that is lost would have the others hang: its death, its silence and its own error are
told apart from what they cause in the others, named in one line, and all are ended.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from termrsi.actors.calls import NO_ROOM, PATIENCE_S, alive, first_line, no_room
from termrsi.errors import EngineError, TermrsiError

AFTER_ERROR_S = 30.0  # for the others to answer once one has failed: a death is known by then


@dataclass(frozen=True, slots=True)
class _Told:
    """What one process answered."""

    rank: int
    value: Any = None  # Any: whatever the method returns
    error: Exception | None = None

    @property
    def cause(self) -> Exception | None:
        """The error as the process had it."""
        return getattr(self.error, "cause", self.error)

    @property
    def in_step(self) -> bool:
        """An answer, or an error of its own: neither torch's, of an exchange that failed, nor Ray's."""
        return self.cause is None or isinstance(self.cause, TermrsiError) or not isinstance(self.cause, RuntimeError | RayError)


class Group:
    """Actors by rank. `limit_s`: how long after one answer the next may be waited for; the first one as long as any call.

    `call` is one at a time, for the methods are collective. It waits for every process; their answers, their deaths and the limit
    unblock it. Once processes are lost or out of step it has ended all of them, and every later call says so.
    """

    def __init__(self, name: str, actors: Sequence[Any], limit_s: float) -> None:  # Any: Ray's actor handles are untyped
        self.name, self.actors, self._limit_s = name, list(actors), limit_s
        self._turn = asyncio.Lock()
        self._lost = ""

    async def call(self, method: str, *arguments: object) -> Any:  # Any: what the method returns
        """The first process's answer. Raises what the method raises, EngineError once processes are lost."""
        try:
            if len(self.actors) > 1:  # into the store once, not once for each
                arguments = tuple(ray.put(one) if isinstance(one, list) else one for one in arguments)
            calls = [getattr(actor, method).remote(*arguments) for actor in self.actors]
        except NO_ROOM as error:
            raise no_room(self.name, method, error) from error
        return await self.first_of(method, calls)

    async def first_of(self, method: str, references: Sequence[Any]) -> Any:  # Any: object references, and what is behind them
        """As `call`, of calls already made."""
        if len(references) == 1:
            return await alive(self.name, references[0], method)
        async with self._turn:
            if self._lost:
                raise EngineError(self._lost, self.name)
            return self._judge(method, await self._answers(references))

    def end(self) -> None:
        """Kill every process."""
        for actor in self.actors:
            ray.kill(actor)

    async def _answers(self, references: Sequence[Any]) -> list[_Told]:  # Any: see first_of
        """In the order they came; those that did not come in time are left out."""
        told: list[_Told] = []
        pending = {asyncio.ensure_future(_answer(rank, reference)) for rank, reference in enumerate(references)}
        limit_s = PATIENCE_S
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                told += [one.result() for one in done]
                limit_s = self._limit_s if all(one.error is None for one in told) else min(AFTER_ERROR_S, self._limit_s)
        finally:
            for one in pending:
                one.cancel()
        return told

    def _judge(self, method: str, told: Sequence[_Told]) -> Any:  # Any: see call
        size = len(self.actors)
        failed = [one for one in told if one.error is not None]
        silent = sorted(set(range(size)) - {one.rank for one in told})
        if not silent and all(one.in_step for one in told):
            if failed:
                assert failed[0].error is not None, "it has failed"
                raise failed[0].error
            return next(one.value for one in told if one.rank == 0)
        dead = [(one.rank, one.error) for one in failed if isinstance(one.error, RayActorError)]
        own = [one for one in failed if one.in_step]
        if dead:
            self._lost = f"process {dead[0][0]} of {size} died in {method}: {first_line(dead[0][1])}"
        elif own:
            self._lost = f"process {own[0].rank} of {size} failed alone in {method}: {own[0].cause}"
        elif silent:
            self._lost = f"process {silent[0]} of {size} did not come to the end of {method}"
        else:
            self._lost = f"process {failed[0].rank} of {size} failed in {method}: {failed[0].cause}"
        self.end()
        cure = "all of its processes are ended; the same command goes on from what is finished"
        raise EngineError(self._lost, self.name, cure) from (failed[0].error if failed else None)


async def _answer(rank: int, reference: Any) -> _Told:  # Any: see Group
    try:
        return _Told(rank, await reference)
    except Exception as error:  # noqa: BLE001  # every kind is judged, and raised, by Group
        return _Told(rank, error=error)
