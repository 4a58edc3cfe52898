"""From an EpisodeSpec to a scored rollout: lease, run, snapshot, verify, release; machine faults retried on a fresh sandbox.

Order matters: the snapshot is taken before the verifier touches the sandbox, so that no verifier side effect reaches a restart
point. The verifier of an assisting harness runs on a fork, for the same reason.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate

from termrsi.errors import CaptureError, RequestRefused, SandboxError, SandboxSpoiled, SnapshotGone, TaskError, VerifierError
from termrsi.harness import variants
from termrsi.harness.episode import Episode
from termrsi.harness.progress import Progress
from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator, Sandbox, SandboxPool, Verifier
from termrsi.records import (
    Calls,
    Chunk,
    Completion,
    DroppedRollout,
    EpisodeSpec,
    Rollout,
    SamplingParams,
    ScoredRollout,
    Snapshot,
    StopReason,
    TaskSpec,
    Turn,
    WeightsVersion,
)
from termrsi.reward import steps

AWAY_S = 600.0  # so much longer at most, where its engine was away for that long
LATE_S = 300.0  # beyond an episode's own wall limit: lease, snapshot, verification


class _Meter:
    """A generator, what one attempt has taken of it, and where the attempt stands."""

    def __init__(self, generator: Generator, episode: str, progress: Progress) -> None:
        self._generator = generator
        self._episode, self._progress = episode, progress
        self.taken = Calls()
        self.limit: asyncio.Timeout | None = None  # of the attempt: moved by what the engine was away
        self._moved_s = 0.0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        self._progress.at(self._episode, "generating", turns=1)
        got = await self._generator.generate(prompt_ids, params, prefix_key)
        self._progress.at(self._episode, "at its commands")
        self.taken += Calls(len(prompt_ids), len(got.ids), got.cached_tokens, got.cost)
        more_s = min(got.away_s, AWAY_S - self._moved_s)
        if more_s > 0.0 and self.limit is not None and (when := self.limit.when()) is not None:
            self._moved_s += more_s
            self.limit.reschedule(when + more_s)
        return got

    async def pull(self, weights: WeightsVersion) -> None:
        await self._generator.pull(weights)


class Runner:
    """Runs episodes against ports; implements `ports.Rollouts`. `retries`: fresh sandboxes after machine faults.

    `players`: the models that play in the policy's stead, by role.
    """

    def __init__(
        self,
        pool: SandboxPool,
        verifier: Verifier,
        generator: Generator,
        chat: ChatFormat,
        *,
        retries: int = 2,
        concurrency: int = 16,
        players: Mapping[str, Generator] | None = None,
    ) -> None:
        self._pool = pool
        self._verifier = verifier
        self._generators = {"": generator, **(players or {})}
        self._chat = chat
        self._retries = retries
        self._concurrency = concurrency
        self.progress = Progress()

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
        """Raises EngineError and PoolError: neither a dead engine nor a pool without a node is cured by another sandbox.

        What the engine refuses is dropped at once, and so is what begins from a state that is lost.
        """
        try:
            return await self._tried(spec)
        finally:
            self.progress.end(spec.id)

    async def _tried(self, spec: EpisodeSpec) -> ScoredRollout | DroppedRollout:
        reason, lost = "", Calls()
        for attempt in range(1, self._retries + 2):
            self.progress.begin(spec.id, attempt)
            meter = _Meter(self._generators[spec.model], spec.id, self.progress)
            try:
                scored = await self._attempt(spec, meter)
                return replace(scored, rollout=replace(scored.rollout, attempt=attempt, lost=lost))
            except TimeoutError:
                reason = f"late: not done {spec.limits.wall_s + LATE_S:.0f} s after its start"
            except (TaskError, RequestRefused) as error:
                return DroppedRollout(spec.id, spec.group_id, spec.task.id, str(error), attempt, lost + meter.taken)
            except SnapshotGone as error:
                reason = f"{SnapshotGone.__name__}: {error}"
                return DroppedRollout(spec.id, spec.group_id, spec.task.id, reason, attempt, lost + meter.taken)
            except (SandboxError, VerifierError, CaptureError) as error:
                reason = f"{type(error).__name__}: {error}"
            lost += meter.taken
        return DroppedRollout(spec.id, spec.group_id, spec.task.id, reason, self._retries + 1, lost)

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._pool.discard(snapshot)

    async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        return [snapshot for snapshot in snapshots if await self._pool.kept(snapshot)]

    async def _attempt(self, spec: EpisodeSpec, generator: _Meter) -> ScoredRollout:
        """A lease waits for others to end, and for an image to be built; the pool bounds that. The rest is bounded here."""
        sandbox = await self._pool.lease(spec.task, spec.recovery.snapshot if spec.recovery else None)
        self.progress.at(spec.id, "beginning", sandbox=sandbox.id)
        try:
            async with asyncio.timeout(longest_s(spec)) as generator.limit:
                play = self._steps if spec.task.steps else self._one
                return await play(spec, sandbox, generator)
        finally:
            self.progress.at(spec.id, "giving back its sandbox")
            await self._pool.release(sandbox)

    async def _one(self, spec: EpisodeSpec, sandbox: Sandbox, generator: Generator) -> ScoredRollout:
        """One conversation and its verification; before it, if a failure is to be started from again, the snapshot."""
        rollout = await self._episode(spec, sandbox, generator)
        self.progress.at(spec.id, "in snapshot and verification")
        snapshot = None
        try:
            if spec.keep_snapshot and rollout.stop is not StopReason.sandbox_spoiled:
                with contextlib.suppress(SandboxSpoiled):  # then there is nothing to start from again
                    snapshot = await sandbox.snapshot()
            verdict = await self._verifier.verify(sandbox, spec.task)
        except BaseException:
            if snapshot is not None:
                await self._pool.discard(snapshot)
            raise
        if snapshot is not None and verdict.strict:
            await self._pool.discard(snapshot)
            snapshot = None
        return ScoredRollout(replace(rollout, snapshot=snapshot), verdict)

    async def _steps(self, spec: EpisodeSpec, sandbox: Sandbox, generator: Generator) -> ScoredRollout:
        """The steps of one task, each with the budget of an episode; the state of the last one is the rollout's."""
        done: list[ScoredRollout] = []
        for task in steps.parts(spec.task):
            if done and (snapshot := done[-1].rollout.snapshot) is not None:
                done[-1] = replace(done[-1], rollout=replace(done[-1].rollout, snapshot=None))
                await self._pool.discard(snapshot)
            if not await steps.prepare(sandbox, task, first=not done):
                if not done:
                    raise VerifierError(f"setup.sh of its first step {task.step} failed", task.id)
                break
            done.append(await self._one(replace(spec, task=task), sandbox, generator))
            if not steps.goes_on(spec.task, task.step, done[-1].verdict):
                break
        return joined(spec.task, done)

    async def _episode(self, spec: EpisodeSpec, sandbox: Sandbox, generator: Generator) -> Rollout:
        async def check() -> bool:
            (fork,) = await sandbox.fork(1)
            try:
                return (await self._verifier.verify(fork, spec.task)).strict
            finally:
                await fork.close()

        in_loop = variants.get(spec.harness).checks_on_done > 0
        return await Episode(spec, generator, sandbox, self._chat, check if in_loop else None).run()


def longest_s(spec: EpisodeSpec) -> float:
    """Of one attempt, once it has its sandbox."""
    return attempt_s(spec.limits.wall_s, len(spec.task.steps))


def attempt_s(wall_s: float, steps: int) -> float:
    """Of one attempt at a task of so many steps; of none it is one conversation."""
    return (wall_s + LATE_S) * max(steps, 1)


def joined(task: TaskSpec, parts: Sequence[ScoredRollout]) -> ScoredRollout:
    """One rollout of the steps run, in order: each step's chunks are its own, its calls are numbered on."""
    rollouts = [part.rollout for part in parts]
    chunks: list[Chunk] = []
    turns: list[Turn] = []
    for one in rollouts:
        calls = len(turns)
        chunks += [replace(chunk, turn_ids=tuple(i + calls for i in chunk.turn_ids)) for chunk in one.chunks]
        turns += one.turns
    last = rollouts[-1]
    whole = replace(
        last,
        task_id=task.id,
        chunks=tuple(chunks),
        turns=tuple(turns),
        prompt_tokens=sum(one.prompt_tokens for one in rollouts),
        completion_tokens=sum(one.completion_tokens for one in rollouts),
        cached_tokens=sum(one.cached_tokens for one in rollouts),
        version_low=min(one.version_low for one in rollouts),
        version_high=max(one.version_high for one in rollouts),
        sandbox_s=sum(one.sandbox_s for one in rollouts),
        wall_s=sum(one.wall_s for one in rollouts),
        cost=sum(one.cost for one in rollouts),
        step=task.steps[len(parts) - 1].name,
        step_starts=tuple(accumulate((len(one.chunks) for one in rollouts[:-1]), initial=0)),
        cases=dict(sum((Counter(one.cases) for one in rollouts), Counter())),
    )
    return ScoredRollout(whole, steps.judged(task, [part.verdict for part in parts]))


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
