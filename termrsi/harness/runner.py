"""From an EpisodeSpec to a scored rollout: lease, run, snapshot, verify, release; machine faults retried on a fresh sandbox.

Order matters: the snapshot is taken before the verifier touches the sandbox, so that no verifier side effect reaches a restart
point. The verifier of an assisting harness runs on a fork, for the same reason.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.harness import variants
from termrsi.harness.episode import Episode
from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator, Sandbox, SandboxPool, Verifier
from termrsi.records import DroppedRollout, EpisodeSpec, Rollout, ScoredRollout, Snapshot, StopReason

LATE_S = 300.0  # beyond an episode's own wall limit: lease, snapshot, verification


class Runner:
    """Runs episodes against ports; implements `ports.Rollouts`. `retries`: fresh sandboxes after machine faults."""

    def __init__(
        self,
        pool: SandboxPool,
        verifier: Verifier,
        generator: Generator,
        chat: ChatFormat,
        *,
        retries: int = 2,
        concurrency: int = 16,
    ) -> None:
        self._pool = pool
        self._verifier = verifier
        self._generator = generator
        self._chat = chat
        self._retries = retries
        self._concurrency = concurrency

    async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        """Consumes `specs`; waits for the first episode to finish; ends when each has come out once."""
        slots = asyncio.Semaphore(self._concurrency)

        async def one(spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
            async with slots:
                return await self.run_one(spec)

        async with aclosing(as_finished([one(s) for s in specs])) as results:  # a consumer that leaves early ends them too
            async for result in results:
                yield result

    async def run_one(self, spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
        """Raises EngineError: a dead engine is not cured by another sandbox."""
        reason = ""
        for attempt in range(1, self._retries + 2):
            try:
                return await self._attempt(spec, attempt)
            except TimeoutError:
                reason = f"late: not done {spec.limits.wall_s + LATE_S:.0f} s after its start"
            except TaskError as error:
                return DroppedRollout(spec.id, spec.group_id, spec.task.id, str(error), attempt)
            except (SandboxError, VerifierError) as error:
                reason = f"{type(error).__name__}: {error}"
        return DroppedRollout(spec.id, spec.group_id, spec.task.id, reason, self._retries + 1)

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._pool.discard(snapshot)

    async def _attempt(self, spec: EpisodeSpec, attempt: int) -> ScoredRollout:
        """A lease waits for others to end, and for an image to be built; the pool bounds that. The rest is bounded here."""
        sandbox = await self._pool.lease(spec.task, spec.recovery.snapshot if spec.recovery else None)
        snapshot = None
        try:
            async with asyncio.timeout(spec.limits.wall_s + LATE_S):
                rollout = await self._episode(spec, sandbox)
                if spec.keep_snapshot and rollout.stop is not StopReason.sandbox_spoiled:
                    with contextlib.suppress(SandboxSpoiled):  # then there is nothing to start from again
                        snapshot = await sandbox.snapshot()
                verdict = await self._verifier.verify(sandbox, spec.task)
        except BaseException:
            if snapshot is not None:
                await self._pool.discard(snapshot)
            raise
        finally:
            await self._pool.release(sandbox)
        if snapshot is not None and verdict.strict:  # only failures are starting points
            await self._pool.discard(snapshot)
            snapshot = None
        return ScoredRollout(replace(rollout, snapshot=snapshot, attempt=attempt), verdict)

    async def _episode(self, spec: EpisodeSpec, sandbox: Sandbox) -> Rollout:
        async def check() -> bool:
            (fork,) = await sandbox.fork(1)
            try:
                return (await self._verifier.verify(fork, spec.task)).strict
            finally:
                await fork.close()

        in_loop = variants.get(spec.harness).checks_on_done > 0
        return await Episode(spec, self._generator, sandbox, self._chat, check if in_loop else None).run()


async def as_finished(jobs: Sequence) -> AsyncGenerator:  # type: ignore[type-arg]  # coroutines of any result
    """Results in the order they finish. The first error cancels the rest, waits for their clean-up, and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        for next_done in asyncio.as_completed(tasks):
            yield await next_done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
