"""Rollout workers: each hosts a `harness.runner.Runner` over remote sandboxes and the remote generator.

The client spreads episodes over the workers, at most `concurrency` in flight, and yields results as they finish. A worker that
died, or whose episode never ends, is a machine fault: its episodes run again on another, the last one's death ends the run.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from termrsi.actors.calls import PATIENCE_S, bounded
from termrsi.actors.generator import RayGenerator
from termrsi.actors.sandboxes import RemotePool
from termrsi.errors import EngineError
from termrsi.harness.chat_generator import ChatGenerator
from termrsi.harness.render import ChatFormat
from termrsi.harness.runner import Runner, as_finished, longest_s
from termrsi.ports import Writer
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import DroppedRollout, EpisodeSpec, ScoredRollout, Snapshot
from termrsi.report import logs


@ray.remote(max_restarts=0)
class RolloutActor:
    """Waits for its episodes' sandboxes and completions; each `run_one` ends with its episode."""

    def __init__(
        self,
        tokenizer: str,
        sandboxes: Any,  # Any: actor handles, here and below
        generators: Sequence[Any],
        retries: int,
        writers: Mapping[str, Writer],
    ) -> None:
        from transformers import AutoTokenizer

        pool, chat = RemotePool(sandboxes), ChatFormat(AutoTokenizer.from_pretrained(tokenizer))
        players = {role: ChatGenerator(writer, chat) for role, writer in writers.items()}
        engines = [RayGenerator(actor) for actor in generators]
        self._runners = [Runner(pool, pool, engine, chat, retries=retries, players=players) for engine in engines]

    async def ready(self) -> bool:
        return True

    async def run_one(self, spec: EpisodeSpec, engine: int, ids: logs.Ids) -> ScoredRollout | DroppedRollout:
        """`engine`: the index of the generator that the policy's turns are sampled by. `ids`: of the run, stage and step that
        asked, for what is logged here."""
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
        self._turn = itertools.count()

    async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        async def one(spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
            async with self._slots:
                return await self._run_one(spec, next(self._turn))

        async for result in as_finished([one(s) for s in specs]):
            yield result

    async def _run_one(self, spec: EpisodeSpec, turn: int) -> ScoredRollout | DroppedRollout:
        if spec.model:  # of another model: no engine of ours has a part in it
            return await self._on_a_worker(spec, turn, 0)
        engine = self._router.begin(spec.group_id, spec.recovery.group_id if spec.recovery else "")
        try:
            return await self._on_a_worker(spec, turn, engine)
        finally:
            self._router.end(engine)

    async def _on_a_worker(self, spec: EpisodeSpec, turn: int, engine: int) -> ScoredRollout | DroppedRollout:
        reason = ""
        patience_s = (self._retries + 1) * longest_s(spec) + PATIENCE_S  # beyond its attempts it waits for sandboxes
        for k in range(len(self._workers)):
            worker = self._workers[(turn + k) % len(self._workers)]
            call = worker.run_one.remote(spec, engine, logs.current())
            try:
                return await bounded("rollout worker", call, f"episode {spec.id}", patience_s=patience_s)
            except RayActorError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"one did not end episode {spec.id} in {patience_s:.0f} s"
                ray.kill(worker)
        raise EngineError(f"every rollout worker has died: {reason}", "rollouts", "see the logs in /tmp/ray/session_latest")

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._pool.discard(snapshot)

    async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        return [snapshot for snapshot in snapshots if await self._pool.kept(snapshot)]
