"""Rollout workers: each hosts a `harness.runner.Runner` over remote sandboxes and the remote generator.

The client spreads episodes over the workers, at most `concurrency` in flight, and yields results as they finish. A worker that
died is a machine fault: its episodes run again on another, the last one's death ends the run.
"""

import asyncio
import itertools
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from termrsi.actors.generator import RayGenerator
from termrsi.actors.sandboxes import RemotePool
from termrsi.errors import EngineError, SandboxError
from termrsi.harness.chat_generator import ChatGenerator
from termrsi.harness.render import ChatFormat
from termrsi.harness.runner import Runner, as_finished
from termrsi.ports import Writer
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
        self._runners = [Runner(pool, pool, RayGenerator(g), chat, retries=retries, players=players) for g in generators]

    async def ready(self) -> bool:
        return True

    async def run_one(self, spec: EpisodeSpec, ids: logs.Ids) -> ScoredRollout | DroppedRollout:
        """`ids`: of the run, stage and step that asked, for what is logged here."""
        # A group's rollouts share a prefix: they go to the engine that holds it.
        with logs.ids(**ids, rollout=spec.id):
            return await self._runners[zlib.crc32(spec.group_id.encode()) % len(self._runners)].run_one(spec)


class RayRollouts:
    """`ports.Rollouts` over RolloutActors."""

    def __init__(self, workers: Sequence[Any], pool: RemotePool, concurrency: int) -> None:  # Any: actor handles
        self._workers = list(workers)
        self._pool = pool
        self._slots = asyncio.Semaphore(concurrency)  # over all calls of `run`: several groups may be under way at once
        self._turn = itertools.count()

    async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        async def one(spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
            async with self._slots:
                return await self._run_one(spec, next(self._turn))

        async for result in as_finished([one(s) for s in specs]):
            yield result

    async def _run_one(self, spec: EpisodeSpec, turn: int) -> ScoredRollout | DroppedRollout:
        reason = ""
        for k in range(len(self._workers)):
            worker = self._workers[(turn + k) % len(self._workers)]
            try:
                return await worker.run_one.remote(spec, logs.current())
            except (EngineError, SandboxError):
                raise
            except RayActorError as error:
                reason = str(error)
        raise EngineError(f"every rollout worker has died: {reason}", "rollouts", "see the logs in /tmp/ray/session_latest")

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._pool.discard(snapshot)
