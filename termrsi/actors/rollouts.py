"""Rollout workers: each hosts a `harness.runner.Runner` over remote sandboxes and the remote generator.

The client spreads episodes over the workers, at most `concurrency` in flight, and yields results as they finish. A worker that
died, or whose episode never ends, is a machine fault: its episodes run again on another, or on its next life, for Ray starts it
again a bounded number of times, and the sandboxes of its last life are given back as soon as it is there. The last one's death
ends the run.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from termrsi.actors.calls import NO_ROOM, PATIENCE_S, bounded, first_line, no_room
from termrsi.actors.generator import RayGenerator
from termrsi.actors.remote_pool import RemotePool
from termrsi.errors import EngineError
from termrsi.harness.chat_generator import ChatGenerator
from termrsi.harness.progress import Standing
from termrsi.harness.render import ChatFormat
from termrsi.harness.runner import Runner, as_finished, longest_s
from termrsi.ports import Writer
from termrsi.queues.places import Places
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import DroppedRollout, EpisodeSpec, ScoredRollout, Snapshot
from termrsi.report import logs

BACK_AFTER_S = 600.0  # at the latest a worker is there again, if none is left
ANSWER_S = 30.0  # in which one says which life of its this is
PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # before one that is away is asked again: doubled each time
_LOG = logging.getLogger(__name__)


@ray.remote
class RolloutActor:
    """Waits for its episodes' sandboxes and completions; each `run_one` ends with its episode."""

    def __init__(
        self,
        tokenizer: str,
        sandboxes: Sequence[Any],  # Any: actor handles, here and below
        generators: Sequence[Any],
        retries: int,
        writers: Mapping[str, Writer],
        name: str = "rollout worker",
    ) -> None:
        """`name`: this worker's among the run's, in all its lives."""
        from transformers import AutoTokenizer

        self._name, self._life = name, uuid.uuid4().hex
        self._taking_over: asyncio.Future[None] | None = None
        self._ids: dict[str, logs.Ids] = {}  # of the episodes under way
        self._pool = pool = RemotePool(sandboxes, client=f"{name}/{self._life}")
        chat = ChatFormat(AutoTokenizer.from_pretrained(tokenizer))
        players = {role: ChatGenerator(writer, chat) for role, writer in writers.items()}
        engines = [RayGenerator(actor) for actor in generators]
        self._runners = [Runner(pool, pool, engine, chat, retries=retries, players=players) for engine in engines]

    async def ready(self) -> bool:
        return True

    async def life(self) -> str:
        """Another one after each start."""
        return self._life

    async def late(self, limit_s: float) -> list[tuple[Standing, str, logs.Ids]]:
        """Its episodes that have done one thing for longer, each with the node of its sandbox, and with what logs know it by."""
        self._take_over()
        late = [one for runner in self._runners for one in runner.progress.late(limit_s)]
        return [(one, self._pool.node_of(one.sandbox), self._ids.get(one.episode, {})) for one in late]

    async def run_one(self, spec: EpisodeSpec, engine: int, ids: logs.Ids) -> ScoredRollout | DroppedRollout:
        """`engine`: the index of the generator that the policy's turns are sampled by. `ids`: of the run, stage and step that
        asked, for what is logged here."""
        self._take_over()
        self._ids[spec.id] = ids
        try:
            with logs.ids(**ids, rollout=spec.id):
                return await self._runners[engine].run_one(spec)
        finally:
            del self._ids[spec.id]

    def _take_over(self) -> None:
        """Once: what earlier lives held is held by nobody, also where no caller noticed their end. Nothing waits for it."""
        if self._taking_over is None:
            self._taking_over = asyncio.ensure_future(self._pool.forget(self._name, self._life))
            self._taking_over.add_done_callback(_taken_over)


def _taken_over(task: "asyncio.Future[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("what an earlier life held is not given back before its time is over: %s", error, exc_info=error)


class RayRollouts:
    """`ports.Rollouts` over RolloutActors. `router` says which engine holds what an episode begins with."""

    def __init__(
        self,
        workers: Sequence[Any],  # Any: actor handles
        pool: RemotePool,
        router: PrefixRouter,
        concurrency: int,
        retries: int,
    ) -> None:
        self._workers = list(workers)
        self._pool = pool
        self._router = router
        self._retries = retries
        self._slots = asyncio.Semaphore(concurrency)  # over all calls of `run`: several groups may be under way at once
        self._places = Places([worker_name(i) for i in range(len(workers))])
        self._mourning: dict[int, asyncio.Task[None]] = {}  # by their places: until what the lost one held is given back

    async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        async def one(spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
            async with self._slots:
                return await self._run_one(spec)

        async with aclosing(as_finished([one(s) for s in specs])) as results:  # a consumer that leaves early ends them too
            async for result in results:
                yield result

    async def _run_one(self, spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
        if spec.model:  # of another model: no engine of ours has a part in it
            return await self._on_a_worker(spec, 0)
        engine = self._router.begin(spec.group_id, spec.recovery.group_id if spec.recovery else "")
        try:
            return await self._on_a_worker(spec, engine)
        finally:
            self._router.end(engine)

    async def _on_a_worker(self, spec: EpisodeSpec, engine: int) -> ScoredRollout | DroppedRollout:
        """The workers in turn until one has done it; those that are lost are left out for a while."""
        patience_s = (self._retries + 1) * longest_s(spec) + PATIENCE_S  # beyond its attempts it waits for sandboxes
        while True:
            now_s = time.monotonic()
            if self._places.none_left() or self._places.none_since_s(now_s) > BACK_AFTER_S:
                told = self._places.told(now_s)
                raise EngineError(f"every rollout worker has died: {told}", "rollouts", "see the logs in /tmp/ray/session_latest")
            place = self._places.begin(now_s)
            if place is None:
                await asyncio.sleep(min(self._places.next_s(now_s), BACK_AFTER_S))
                continue
            try:
                call = self._workers[place].run_one.remote(spec, engine, logs.current())
                name = self._places.name(place)
                result = await bounded(name, call, f"episode {spec.id}", patience_s=patience_s)
                self._places.heard(place)
                return result
            except NO_ROOM as error:
                raise no_room(self._places.name(place), f"episode {spec.id}", error) from error
            except RayActorError as error:
                self._lost(place, error)
            except TimeoutError:
                self._lost(place, TimeoutError(f"did not end episode {spec.id} in {patience_s:.0f} s"))
                ray.kill(self._workers[place], no_restart=False)
            finally:
                self._places.end(place)

    def _lost(self, place: int, error: Exception) -> None:
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            self._places.gone(place, time.monotonic(), first_line(error))
        else:
            self._places.lost(place, time.monotonic(), first_line(error))
        if place not in self._mourning:
            task = self._mourning[place] = asyncio.ensure_future(self._mourn(place))
            task.add_done_callback(lambda done: self._mourned(place, done))

    async def _mourn(self, place: int) -> None:
        """Waits until Ray has started it again, or has given it up, and gives back what its earlier lives held."""
        pause_s = PAUSE_S
        while True:
            try:
                call = self._workers[place].life.remote()
                life = await bounded(worker_name(place), call, "life", patience_s=ANSWER_S)
            except (ActorUnavailableError, TimeoutError):
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
            except RayActorError as error:
                self._places.gone(place, time.monotonic(), first_line(error))
                await self._pool.forget(worker_name(place))
                return
            else:
                self._places.heard(place)
                await self._pool.forget(worker_name(place), life)
                return

    def _mourned(self, place: int, task: "asyncio.Task[None]") -> None:
        del self._mourning[place]
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("what %s held is not given back before its time is over: %s", worker_name(place), error, exc_info=error)

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._pool.discard(snapshot)

    async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        kept = await asyncio.gather(*(self._pool.kept(snapshot) for snapshot in snapshots))
        return [snapshot for snapshot, has in zip(snapshots, kept, strict=True) if has]


def worker_name(number: int) -> str:
    return f"rollout worker {number}"
