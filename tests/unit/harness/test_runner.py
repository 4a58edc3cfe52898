"""Runner over the shipped fakes: machine faults, the order of snapshot and verifier, and that nothing is left behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from termrsi import fakes
from termrsi.errors import CaptureError, EngineError, RequestRefused, SandboxError, TaskError
from termrsi.fakes import FakeGenerator, FakePolicy, FakePool, FakeSkill, FakeTokenizer, FakeVerifier, FakeWorld
from termrsi.harness import runner
from termrsi.harness.group import task_group
from termrsi.harness.render import ChatFormat
from termrsi.harness.runner import Runner
from termrsi.ports import Sandbox
from termrsi.records import (
    Calls,
    Completion,
    DroppedRollout,
    EpisodeSpec,
    Limits,
    SamplingParams,
    ScoredRollout,
    Snapshot,
    StopReason,
    TaskSpec,
    Verdict,
    WeightsVersion,
)

HALF = FakeSkill(solve=-50.0, half=50.0)  # fails always, and leaves something behind
SOLVE = FakeSkill(solve=50.0, half=-50.0)
TASKS = fakes.dry_tasks().train


def specs_of(num_tasks: int = 1, size: int = 1, *, harness: str = "react", keep_snapshot: bool = False) -> list[EpisodeSpec]:
    return [
        spec
        for task in TASKS[:num_tasks]
        for spec in task_group(
            task,
            size,
            label="test",
            harness=harness,
            sampling=SamplingParams(),
            limits=Limits(max_turns=6),
            seed=0,
            keep_snapshot=keep_snapshot,
        )
    ]


@dataclass
class Bench:
    """A runner and everything it stands on."""

    lost_at: dict[int, int] = field(default_factory=dict)
    spoiled: frozenset[int] = frozenset()
    size: int = 16
    verifier: FakeVerifier = field(default_factory=FakeVerifier)
    generator: FakeGenerator = field(default_factory=FakeGenerator)
    concurrency: int = 16
    retries: int = 2

    def __post_init__(self) -> None:
        self.world = FakeWorld(lost_at=self.lost_at, spoiled=self.spoiled)
        self.pool = FakePool(self.world, self.size)
        chat = ChatFormat(FakeTokenizer())
        self.runner = Runner(self.pool, self.verifier, self.generator, chat, retries=self.retries, concurrency=self.concurrency)

    async def serve(self, skill: FakeSkill) -> "Bench":
        await self.generator.pull(await FakePolicy(skill).publish())
        return self

    async def run(self, specs: Sequence[EpisodeSpec]) -> list[ScoredRollout | DroppedRollout]:
        return [result async for result in self.runner.run(specs)]

    async def one(self, spec: EpisodeSpec) -> ScoredRollout:
        (result,) = await self.run([spec])
        assert isinstance(result, ScoredRollout)
        return result

    def nothing_is_held(self) -> bool:
        return self.world.leases == self.world.releases and not self.world.open


def ids(results: Sequence[ScoredRollout | DroppedRollout]) -> list[str]:
    return sorted(r.id if isinstance(r, DroppedRollout) else r.rollout.id for r in results)


# --- machine faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [1, 2, 3], ids=["agent's command", "verifier's first", "verifier's second"])
async def test_a_lost_sandbox_is_replaced_by_a_fresh_one(command: int) -> None:
    bench = await Bench(lost_at={1: command}).serve(SOLVE)
    result = await bench.one(specs_of()[0])
    assert result.verdict.strict
    assert result.rollout.attempt == 2
    assert [turn.command for turn in result.rollout.turns] == ["solve", None]  # of the second attempt alone
    assert bench.world.leases == 2
    assert bench.nothing_is_held()


@pytest.mark.parametrize("command", [1, 2, 3], ids=["agent's command", "verifier's first", "verifier's second"])
async def test_a_sandbox_that_the_agent_spoiled_is_scored_at_once(command: int) -> None:
    bench = await Bench(lost_at={1: command}, spoiled=frozenset({1})).serve(HALF)
    result = await bench.one(specs_of(keep_snapshot=True)[0])
    assert (result.verdict.strict, result.verdict.reward, result.verdict.source) == (False, 0.0, "spoiled")
    assert result.rollout.attempt == 1
    assert (result.rollout.stop is StopReason.sandbox_spoiled) == (command == 1)
    assert (result.rollout.snapshot is None) == (command == 1)
    assert bench.world.leases == 1
    assert bench.nothing_is_held()


async def test_after_all_retries_it_is_dropped_and_never_scored_and_its_siblings_stay() -> None:
    """One at a time, so that leases 2, 3 and 4 are the three attempts at the second episode."""
    bench = await Bench(lost_at={2: 1, 3: 2, 4: 1}, concurrency=1).serve(SOLVE)
    specs = specs_of(size=4)
    results = await bench.run(specs)
    assert ids(results) == sorted(s.id for s in specs)
    (dropped,) = [r for r in results if isinstance(r, DroppedRollout)]
    assert (dropped.id, dropped.group_id, dropped.task_id, dropped.attempts) == (specs[1].id, specs[1].group_id, TASKS[0].id, 3)
    assert "SandboxError" in dropped.reason
    assert all(r.verdict.strict and r.rollout.attempt == 1 for r in results if isinstance(r, ScoredRollout))
    assert bench.world.leases == 6
    assert bench.nothing_is_held()


async def test_what_lost_attempts_took_is_told() -> None:
    """Of one dropped after three attempts, and of one that the second attempt saved: no call is left out of the sum."""

    class Counting(FakeGenerator):
        taken = Calls()

        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            got = replace(await super().generate(prompt_ids, params, prefix_key), cost=0.5)
            self.taken += Calls(len(prompt_ids), len(got.ids), got.cached_tokens, got.cost)
            return got

    generator = Counting()
    bench = await Bench(lost_at={2: 1, 3: 2, 4: 1, 5: 2}, concurrency=1, generator=generator).serve(SOLVE)
    results = await bench.run(specs_of(size=4))
    (dropped,) = [r for r in results if isinstance(r, DroppedRollout)]
    (saved,) = [r.rollout for r in results if isinstance(r, ScoredRollout) and r.rollout.attempt == 2]
    assert dropped.lost.cost == 0.5 * (1 + 2 + 1)
    assert saved.lost == Calls(saved.prompt_tokens, saved.completion_tokens, saved.cached_tokens, saved.cost)
    total = dropped.lost
    for one in (r.rollout for r in results if isinstance(r, ScoredRollout)):
        total += one.lost + Calls(one.prompt_tokens, one.completion_tokens, one.cached_tokens, one.cost)
    assert total == generator.taken


async def test_a_verifier_that_could_not_run_is_a_machine_fault() -> None:
    bench = await Bench(verifier=FakeVerifier(faults=1)).serve(HALF)
    result = await bench.one(specs_of(keep_snapshot=True)[0])
    assert (result.rollout.attempt, result.verdict.passed) == (2, ("half_done",))
    assert list(bench.world.snapshots) == [result.rollout.snapshot.handle if result.rollout.snapshot else ""]  # not the first's
    dead = await Bench(verifier=FakeVerifier(faults=99)).serve(HALF)
    (dropped,) = await dead.run(specs_of(keep_snapshot=True))
    assert isinstance(dropped, DroppedRollout)
    assert "VerifierError" in dropped.reason
    assert dead.world.snapshots == {}
    assert dead.nothing_is_held()


async def test_a_task_that_cannot_be_used_is_dropped_at_once() -> None:
    class Unfit(FakePool):
        asked = 0

        async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
            self.asked += 1
            raise TaskError("no such image", task.id)

    pool = Unfit()
    runner = Runner(pool, FakeVerifier(), FakeGenerator(), ChatFormat(FakeTokenizer()))
    (dropped,) = [r async for r in runner.run(specs_of())]
    assert isinstance(dropped, DroppedRollout)
    assert (dropped.attempts, pool.asked) == (1, 1)


async def test_an_attempt_that_hangs_is_ended_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeVerifier):
        async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(runner, "LATE_S", 0.01)
    bench = await Bench(verifier=Hanging(), retries=1).serve(HALF)
    (spec,) = specs_of(keep_snapshot=True)
    (dropped,) = await bench.run([replace(spec, limits=replace(spec.limits, wall_s=0.02))])
    assert isinstance(dropped, DroppedRollout)
    assert dropped.attempts == bench.world.leases == 2
    assert "late" in dropped.reason
    assert bench.world.snapshots == {}
    assert bench.nothing_is_held()


@pytest.mark.parametrize(("away_s", "most_s", "ends"), [(0.0, 600.0, True), (5.0, 600.0, False), (5.0, 0.0, True)])
async def test_an_attempts_bound_moves_by_what_its_engine_was_away(
    away_s: float, most_s: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            return Completion((1,), (0.0,), "stop", away_s=away_s)

        async def pull(self, weights: WeightsVersion) -> None: ...

    monkeypatch.setattr(runner, "AWAY_S", most_s)
    meter = runner._Meter(Away(), "e", runner.Progress())
    try:
        async with asyncio.timeout(0.02) as meter.limit:
            await meter.generate([1], SamplingParams())
            await asyncio.sleep(0.06)
        ended = False
    except TimeoutError:
        ended = True
    assert ended is ends


async def test_an_agent_that_fails_is_scored() -> None:
    bench = await Bench().serve(FakeSkill(solve=-50.0, half=-50.0))
    result = await bench.one(specs_of()[0])
    assert (result.rollout.stop, result.rollout.attempt) == (StopReason.done, 1)
    assert (result.verdict.strict, result.verdict.passed) == (False, ())


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 5, 9])
async def test_a_dead_engine_ends_the_run_and_every_lease_returns(call: int) -> None:
    bench = Bench(generator=FakeGenerator(dies_at=call))
    with pytest.raises(EngineError):
        await bench.run(specs_of(4, 2, keep_snapshot=True))
    assert bench.nothing_is_held()
    assert bench.world.leases <= 8  # and it was not tried again on fresh sandboxes


class Forgetful(FakeGenerator):
    """Loses the routing of the group's completions so many times."""

    def __init__(self, group: str, times: int) -> None:
        super().__init__()
        self._group, self._times = group, times

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        if prefix_key == self._group and self._times:
            self._times -= 1
            raise CaptureError("routing of 0 tokens came with 3", "generator")
        return await super().generate(prompt_ids, params, prefix_key)


@pytest.mark.parametrize(("times", "lost"), [(1, 0), (100, 2)])
async def test_a_missing_capture_costs_its_rollout_and_nothing_else(times: int, lost: int) -> None:
    specs = specs_of(2, 2)
    bench = Bench(generator=Forgetful(specs[0].group_id, times))
    results = await bench.run(specs)
    dropped = [r for r in results if isinstance(r, DroppedRollout)]
    assert len(results) == 4
    assert [r.group_id for r in dropped] == [specs[0].group_id] * lost
    assert all("CaptureError: generator: routing of 0 tokens" in r.reason for r in dropped)
    assert bench.nothing_is_held()


async def test_what_a_model_refuses_is_dropped_at_once_and_the_others_go_on() -> None:
    class Filtering(FakeGenerator):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            if prefix_key == specs[0].group_id:
                raise RequestRefused("400 content filter", "http://h")
            return await super().generate(prompt_ids, params, prefix_key)

    specs = specs_of(2, 2)
    bench = Bench(generator=Filtering())
    results = await bench.run(specs)
    dropped = [r for r in results if isinstance(r, DroppedRollout)]
    assert [(r.group_id, r.reason, r.attempts) for r in dropped] == [(specs[0].group_id, "http://h: 400 content filter", 1)] * 2
    assert len(results) == bench.world.leases == 4
    assert bench.nothing_is_held()


@pytest.mark.parametrize("ticks", range(12))
async def test_every_lease_returns_when_the_consumer_is_cancelled(ticks: int) -> None:
    bench = await Bench(size=2, verifier=FakeVerifier()).serve(HALF)
    running = asyncio.create_task(bench.run(specs_of(4, 2, harness="retry", keep_snapshot=True)))
    for _ in range(ticks):
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.nothing_is_held()
    await asyncio.wait_for(bench.pool.lease(TASKS[0]), 1.0)  # no place was lost


async def test_a_consumer_that_leaves_early_cancels_the_rest() -> None:
    bench = await Bench(concurrency=2).serve(SOLVE)
    stream = bench.runner.run(specs_of(4, 4))
    assert isinstance(await anext(stream), ScoredRollout)  # pyright: ignore[reportArgumentType]  # an async generator
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert bench.nothing_is_held()
    assert bench.world.leases < 16


async def test_each_spec_comes_out_exactly_once_whatever_gets_lost() -> None:
    lost_at = {n: 1 + n % 3 for n in range(1, 200) if n % 3}
    bench = await Bench(lost_at=lost_at, size=3, concurrency=5).serve(FakeSkill())
    specs = specs_of(8, 6)
    results = await bench.run(specs)
    assert ids(results) == sorted(s.id for s in specs)
    assert {type(r) for r in results} == {ScoredRollout, DroppedRollout}
    assert bench.nothing_is_held()
    assert await bench.run([]) == []


async def test_no_more_run_at_once_than_allowed() -> None:
    most = 0

    class Watched(FakeVerifier):
        async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
            nonlocal most
            most = max(most, len(bench.world.open))
            return await super().verify(sandbox, task)

    bench = Bench(concurrency=3, verifier=Watched())
    await bench.run(specs_of(6, 2))
    assert most == 3


# --- snapshots -----------------------------------------------------------------------------------------------------


async def test_the_snapshot_is_taken_before_the_verifier_touches_anything() -> None:
    bench = await Bench().serve(HALF)
    result = await bench.one(specs_of(keep_snapshot=True)[0])
    assert result.rollout.snapshot is not None
    box = await bench.pool.lease(TASKS[0], result.rollout.snapshot)
    assert (await box.run("cat /app/half")).output == "done\n"
    assert (await box.run("cat /logs/verifier")).exit_code == 1
    verified = await bench.pool.lease(TASKS[0])
    await bench.verifier.verify(verified, TASKS[0])
    assert (await verified.run("cat /logs/verifier")).exit_code == 0  # it does leave a mark


async def test_snapshots_of_successes_are_discarded_and_unasked_ones_never_taken() -> None:
    won = await Bench().serve(SOLVE)
    assert (await won.one(specs_of(keep_snapshot=True)[0])).rollout.snapshot is None
    assert (won.world.taken, won.world.snapshots) == (1, {})
    lost = await Bench().serve(HALF)
    assert (await lost.one(specs_of()[0])).rollout.snapshot is None
    assert lost.world.taken == 0


async def test_discard_frees_what_was_kept() -> None:
    bench = await Bench().serve(HALF)
    results = await bench.run(specs_of(2, 2, keep_snapshot=True))
    kept = [r.rollout.snapshot for r in results if isinstance(r, ScoredRollout) and r.rollout.snapshot]
    assert len(kept) == len(bench.world.snapshots) == 4
    await bench.runner.discard(kept[:3])
    assert list(bench.world.snapshots) == [kept[3].handle]


async def test_an_assisting_harness_is_checked_on_forks() -> None:
    """Two claims are answered, the third ends the episode; none of it is seen in the agent's own sandbox."""
    bench = await Bench().serve(HALF)
    result = await bench.one(specs_of(harness="retry", keep_snapshot=True)[0])
    assert [turn.command for turn in result.rollout.turns] == ["half", None] * 3
    assert "check" in result.rollout.turns[1].observation
    assert bench.nothing_is_held()
    assert result.rollout.snapshot is not None
    assert "/logs/verifier" not in bench.world.snapshots[result.rollout.snapshot.handle].files


async def test_a_fault_in_a_check_on_a_fork_is_a_machine_fault_too() -> None:
    bench = await Bench(verifier=FakeVerifier(faults=1)).serve(SOLVE)
    result = await bench.one(specs_of(harness="retry")[0])
    assert (result.rollout.attempt, result.verdict.strict) == (2, True)
    assert bench.nothing_is_held()


async def test_a_recovery_starts_on_its_snapshot_and_may_lose_it() -> None:
    from termrsi.harness.group import recovery_group
    from termrsi.stages.points import point_of

    bench = await Bench().serve(HALF)
    point = point_of(await bench.one(specs_of(keep_snapshot=True)[0]), TASKS[0], 1)
    specs = recovery_group(point, 2, label="again", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)
    await bench.serve(FakeSkill(solve=-50.0, half=-50.0))  # does nothing: what passes was there before
    results = await bench.run(specs)
    assert [r.verdict.passed for r in results if isinstance(r, ScoredRollout)] == [("half_done",)] * 2
    assert [r.rollout.recovery_id for r in results if isinstance(r, ScoredRollout)] == [point.id] * 2
    await bench.runner.discard([point.snapshot])
    gone = await bench.run(specs)
    assert all(isinstance(r, DroppedRollout) and r.attempts == 3 for r in gone)
    with pytest.raises(SandboxError):
        await bench.pool.lease(TASKS[0], point.snapshot)
    assert bench.nothing_is_held()
