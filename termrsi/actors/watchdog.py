"""Looks at the nodes of sandboxes and at the rollout workers as long as a run lasts, and names what is late in the run's own log.

One task for each actor looked at. It waits for the clock and for that actor's answer, which a time-out ends; `close` ends it. An
actor that has not answered for long is ended: whoever waits for it learns of that, and Ray starts it again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from termrsi.actors.calls import first_line
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.rollouts import worker_name
from termrsi.actors.sandboxes import Beat
from termrsi.errors import EngineError, SandboxError
from termrsi.harness.progress import Standing
from termrsi.report import logs

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds. `every_s`: between two looks. `late_s`: in one doing before it is named, and each time so much later. `hung_s`:
    without an answer before an actor is ended."""

    every_s: float = 5.0
    answer_s: float = 30.0
    late_s: float = 600.0
    hung_s: float = 600.0


class Watchdog:
    """`start` once everything is ready; `close` is safe at any time."""

    def __init__(self, pool: RemotePool, nodes: Sequence[Any], workers: Sequence[Any], bounds: Bounds = Bounds()) -> None:
        """(Any: Ray's actor handles are untyped, here and below.)"""
        self._pool, self._nodes, self._workers, self._bounds = pool, list(nodes), list(workers), bounds
        self._lives = [""] * len(nodes)
        self._named: dict[tuple[str, int, str], int] = {}  # how often an episode's doing was named
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        nodes = [self._look(node, lambda i=i: self._pool.where(i), "beat", self._node(i)) for i, node in enumerate(self._nodes)]
        workers = [
            self._look(worker, lambda i=i: worker_name(i), "late", self._worker(), self._bounds.late_s)
            for i, worker in enumerate(self._workers)
        ]
        self._tasks = [asyncio.ensure_future(one) for one in (*nodes, *workers)]
        for task in self._tasks:
            task.add_done_callback(_ended)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _look(
        self, actor: Any, name: Callable[[], str], method: str, heard: Callable[[Any], Awaitable[None]], *arguments: object
    ) -> None:
        """Ends when the actor is dead for good."""
        bounds, heard_s, told, lost = self._bounds, time.monotonic(), 0, False
        while True:
            await asyncio.sleep(bounds.every_s)
            why = "silent"
            try:
                async with asyncio.timeout(bounds.answer_s):
                    answer = await getattr(actor, method).remote(*arguments)
                if lost:
                    _LOG.warning("%s answers again after %.0f s", name(), time.monotonic() - heard_s)
                heard_s, told, lost = time.monotonic(), 0, False
                await heard(answer)
                continue
            except TimeoutError:
                pass  # judged below, by how long it has been so
            except ActorUnavailableError as error:
                why = first_line(error)
                if not lost:
                    _LOG.warning("%s is lost: %s; it is started again where there is a place for it", name(), why)
                lost = True
            except RayActorError as error:
                _LOG.error("%s is dead and is not started again: %s", name(), first_line(error))
                return
            except RayError as error:  # its answer did not come through: judged by how long that goes on
                why = first_line(error)
            silent_s = time.monotonic() - heard_s
            if silent_s > bounds.hung_s and not lost:
                _LOG.error("%s has not answered for %.0f s: its process is ended", name(), silent_s)
                ray.kill(actor, no_restart=False)
                heard_s, told = time.monotonic(), 0
            elif silent_s > (told + 1) * min(bounds.late_s, bounds.hung_s / 2):
                told += 1
                _LOG.warning("%s has not answered for %.0f s (%s)", name(), silent_s, why)

    def _node(self, place: int) -> Callable[[Beat], Awaitable[None]]:
        async def heard(beat: Beat) -> None:
            self._pool.heard(place, beat.where)
            if self._lives[place] not in ("", beat.life):
                _LOG.warning("%s was started again: the sandboxes that it had are lost", self._pool.where(place))
            self._lives[place] = beat.life
            if beat.forgetful:
                try:
                    await self._pool.remind(place)
                except (SandboxError, EngineError) as error:  # lost once more, or no room: the next look tries again
                    _LOG.warning("%s", first_line(error))

        return heard

    def _worker(self) -> Callable[[Sequence[tuple[Standing, str, logs.Ids]]], Awaitable[None]]:
        async def heard(late: Sequence[tuple[Standing, str, logs.Ids]]) -> None:
            for standing, node, ids in late:
                doing = (standing.episode, standing.turn, standing.what)
                times = int(standing.held_s // self._bounds.late_s)
                if times > self._named.get(doing, 0):
                    self._named[doing] = times
                    with logs.ids(**ids, rollout=standing.episode):
                        _LOG.warning("%s", standing.told(node))

        return heard


def _ended(task: "asyncio.Task[None]") -> None:
    """Nobody awaits one that looks: what ended it is said here."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("the watchdog looks at one actor less: %s", error, exc_info=error)
