"""Rollout workers: each hosts a `harness.runner.Runner` over remote sandboxes and the remote generator.

The client spreads episodes over the workers, at most `concurrency` in flight, and yields results as they finish. A worker that
died, or whose episode never ends, is a machine fault: its episodes run again on another, or on its next life, for Ray starts it
again a bounded number of times. The last one's death ends the run.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
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

        self._name, self._freed = name, asyncio.Lock()
        self._first = True
        self._pool = pool = RemotePool(sandboxes, client=name)
        chat = ChatFormat(AutoTokenizer.from_pretrained(tokenizer))
        players = {role: ChatGenerator(writer, chat) for role, writer in writers.items()}
        engines = [RayGenerator(actor) for actor in generators]
        self._runners = [Runner(pool, pool, engine, chat, retries=retries, players=players) for engine in engines]

    async def ready(self) -> bool:
        return True

    async def late(self, limit_s: float) -> list[tuple[Standing, str]]:
        """Its episodes that have done one thing for longer, each with the node of its sandbox."""
        late = [one for runner in self._runners for one in runner.progress.late(limit_s)]
        return [(one, self._pool.node_of(one.sandbox)) for one in late]

    async def run_one(self, spec: EpisodeSpec, engine: int, ids: logs.Ids) -> ScoredRollout | DroppedRollout:
        """`engine`: the index of the generator that the policy's turns are sampled by. `ids`: of the run, stage and step that
        asked, for what is logged here."""
        async with self._freed:
            if self._first:  # an earlier life's sandboxes are held by nobody
                await self._pool.forget(self._name)
                self._first = False
        with logs.ids(**ids, rollout=spec.id):
            return await self._runners[engine].run_one(spec)


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

    async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        async def one(spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
            async with self._slots:
                return await self._run_one(spec)

        async for result in as_finished([one(s) for s in specs]):
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
            except ActorUnavailableError as error:
                self._places.lost(place, time.monotonic(), first_line(error))
            except RayActorError as error:
                self._places.gone(place, time.monotonic(), first_line(error))
                await self._pool.forget(worker_name(place))
            except TimeoutError:
                self._places.lost(place, time.monotonic(), f"did not end episode {spec.id} in {patience_s:.0f} s")
                ray.kill(self._workers[place], no_restart=False)
            finally:
                self._places.end(place)

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._pool.discard(snapshot)

    async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        return [snapshot for snapshot in snapshots if await self._pool.kept(snapshot)]


def worker_name(number: int) -> str:
    return f"rollout worker {number}"
