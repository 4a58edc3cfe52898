"""Settings that stand for another reading of a paper, in whole stages over the shipped fakes; what travels between stages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from termrsi import pipeline
from termrsi.config.choices import Loss, RefitValueHead
from termrsi.config.load import load
from termrsi.config.stages import PolicyOptimConfig, RetentionConfig
from termrsi.fakes import UNSEEN, FakeCritic, FakePolicy, FakeSkill
from termrsi.records import RecoveryPoint, Sample, UpdateMetrics
from termrsi.stages import credit, grpo, reterm, rpr
from termrsi.stages.base import Context
from tests.flow.test_stages import NEVER, Bench, Recorder, grpo_config, lines, reterm_config, rpr_config


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- rpr ------------------------------------------------------------------------------------------------------------


async def test_rpr_goes_on_from_the_retained_step_after_a_refused_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted actor: better, bad, worse, better still. Steps 3 and 4 begin with what step 1 left, and sample with it."""
    script = [FakeSkill(1.5, 0.0), NEVER, FakeSkill(-3.0, 3.0), FakeSkill(9.0, 0.0)]
    policy, critic = bench.made.policy, bench.made.critic
    begun: list[tuple[FakeSkill, bool]] = []
    critics: list[str] = []
    update_critic = critic.update

    async def update(samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        begun.append((policy.skill, all(s.sampler_logp == tuple(policy._logp(s)) for s in samples)))
        policy.skill = script[len(begun) - 1]
        return UpdateMetrics(0.0, 0.0, 0, 0.0)

    async def on_critic(samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        critics.append(await critic.checksum())
        return await update_critic(samples, lr, value_clip)

    monkeypatch.setattr(policy, "update", update)
    monkeypatch.setattr(critic, "update", on_critic)
    config = rpr_config(
        steps=4, critic_only_updates=0, retention=RetentionConfig(every=1, k=8, max_drop=1.0, rollback=True), tasks_per_step=8
    )
    ctx = bench.ctx("rpr")
    result = await rpr.run(ctx, config)
    assert [skill for skill, _ in begun] == [FakeSkill(), script[0], script[0], script[0]]
    assert all(on_policy for _, on_policy in begun)
    assert critics[1] == critics[2] == critics[3]  # and the critic of step 1 at the beginning of each
    assert critics[0] != critics[1]
    assert result.summary["retained_step"] == 4
    log = json.loads((ctx.out / "retention.json").read_text())
    assert [entry.get("rolled_back") for entry in log] == [None, None, 1, 1, None]
    assert bench.logged("rolled_back") == [1.0, 1.0]
    assert bench.nothing_is_held()


async def test_an_inherited_critic_is_refitted_before_its_first_update(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learned the first phase's rewards on another scale: ten times as large. The refit takes that away, the actor stays."""
    await rpr.run(bench.ctx("first"), rpr_config(steps=3))
    critic = bench.made.critic
    learned = dict(critic.table)
    critic.table = {situation: 10.0 * value + 3.0 for situation, value in {UNSEEN: 0.0, **learned}.items()}
    actor = await bench.made.policy.checksum()
    recorder = Recorder(bench, monkeypatch)
    tables: list[dict[str, float]] = []
    refit = critic.refit

    async def watch(scale: float, shift: float) -> None:
        assert not recorder.calls
        await refit(scale, shift)
        tables.append(dict(critic.table))

    monkeypatch.setattr(critic, "refit", watch)
    await rpr.run(bench.ctx("second"), rpr_config(steps=1, refit_value_head=RefitValueHead.affine))
    ((scale,), (shift,)) = bench.logged("refit_scale"), bench.logged("refit_shift")
    (table,) = tables
    assert table == {
        situation: pytest.approx(scale * (10.0 * value + 3.0) + shift) for situation, value in {UNSEEN: 0.0, **learned}.items()
    }
    assert all(-1.0 < value < 2.0 for value in table.values())  # rewards are in [0, 1]
    assert recorder.calls[0] == ("critic", actor)
    first = bench.logged("critic_only_loss")[4]  # of the second phase, from the refitted values on
    assert first < 0.5


async def test_no_critic_is_refitted_unless_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(scale: float, shift: float) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(bench.made.critic, "refit", refuse)
    await rpr.run(bench.ctx("rpr"), rpr_config(steps=1))
    assert bench.logged("refit_scale") == []


# --- reterm ---------------------------------------------------------------------------------------------------------


async def test_points_that_stay_in_the_queue_are_drawn_again_until_newer_ones_push_them_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures in the first step alone: their points are started from in every later one, and freed at the end."""
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    push = bench.made.queue.push

    async def first_alone(points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        gone = await push([p for p in points if p.born_step == 1])
        return [*gone, *(p for p in points if p.born_step > 1)]  # what is not taken in is given back, as what is pushed out

    monkeypatch.setattr(bench.made.queue, "push", first_alone)
    await reterm.run(bench.ctx("reterm"), reterm_config(pop=False, capacity=3, recovery_groups=2, steps=4))
    drawn: dict[int, list[str]] = {}
    for spec in bench.runner.specs:
        if spec.recovery:
            drawn.setdefault(int(spec.id.split("/")[1]), []).append(spec.recovery.id)
    assert set(drawn) == {2, 3, 4}
    assert len({tuple(sorted(set(points))) for points in drawn.values()}) == 1
    assert all(len(set(points)) == 2 and len(points) == 8 for points in drawn.values())
    trained = [s.id for s in bench.runner.specs if "/validation" not in s.id]
    assert len(set(trained)) == len(trained)
    assert bench.nothing_is_held()
    assert await bench.made.queue.size() == 0


async def test_a_point_pushed_out_while_a_step_starts_from_it_is_freed_after(bench: Bench) -> None:
    """One step ahead, a queue of one: each new failure pushes out the point that the step under way was drawn from."""
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    ctx = bench.ctx("reterm")
    await reterm.run(ctx, reterm_config(pop=False, capacity=1, recovery_groups=1, steps=6, max_staleness=1))
    assert any(s.recovery for s in bench.runner.specs)
    assert ctx.costs.dropped == 0  # no episode lost its machine's state
    assert bench.nothing_is_held()


async def test_failed_recoveries_may_be_started_from_too(bench: Bench) -> None:
    """Then a point's history holds both attempts, and its machine is the one that the recovery left."""
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    ctx = bench.ctx("reterm")
    await reterm.run(ctx, reterm_config(requeue_recovery_failures=True, original_groups=1, recovery_groups=1, steps=4))
    made = {f"point:{r['rollout']['id']}": r["rollout"] for r in lines(ctx.out / "rollouts.jsonl")}
    again = [s for s in bench.runner.specs if s.recovery and made[s.recovery.id]["recovery_id"]]
    assert again
    for spec in again:
        assert spec.recovery is not None
        origin = made[spec.recovery.id]
        first = made[origin["recovery_id"]]
        assert list(spec.recovery.history_ids) == origin["chunks"][0]["ids"]
        assert origin["chunks"][0]["ids"][: len(first["chunks"][0]["ids"])] == first["chunks"][0]["ids"]
        assert spec.task.id == origin["task_id"] == first["task_id"]
    assert bench.nothing_is_held()


@pytest.mark.parametrize("counted", [True, False])
async def test_groups_of_equal_rewards_may_be_left_out_of_the_mean(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    recorder = Recorder(bench, monkeypatch)
    await reterm.run(bench.ctx("reterm"), reterm_config(zero_std_in_denominator=counted))
    told = [
        {g: {a for s in batch if s.group_id == g for a, m in zip(s.advantages, s.mask, strict=True) if m} for g in groups}
        for batch in recorder.batches
        for groups in [{s.group_id for s in batch}]
    ]
    idle = sum(values == {0.0} for batch in told for values in batch.values())
    assert (idle > 0) is counted


# --- grpo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlong_max", "longest"), [(0, 192), (9, 9)])  # four turns of 48 tokens
async def test_length_costs_before_the_advantages_and_in_no_reward_that_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, overlong_max: int, longest: int
) -> None:
    """Everything fails, and all replies are alike here: every second rollout is given a cost."""
    recorder = Recorder(bench, monkeypatch)
    own = credit.overlong

    def priced(batch: credit.Batch, **bounds: int) -> dict[str, float]:
        assert bounds == {"longest": longest, "cache": 8}
        assert set(own(batch, **bounds).values()) == {-1.0 if overlong_max else 0.0}  # nine tokens each
        return {rollout: -0.5 * (int(rollout[-1]) % 2) for rollout in batch.rewards}

    monkeypatch.setattr(credit, "overlong", priced)
    await bench.use(NEVER)
    await grpo.run(bench.ctx("grpo"), grpo_config(steps=2, overlong=8, overlong_max=overlong_max, normalise=False))
    assert bench.logged("reward") == [0.0, 0.0]
    assert bench.logged("overlong") == [0.5, 0.5]
    for batch in recorder.batches:
        for sample in batch:
            told = {a for a, m in zip(sample.advantages, sample.mask, strict=True) if m}
            assert told == {0.25 - 0.5 * (int(sample.rollout_id[-1]) % 2)}


async def test_length_costs_nothing_unless_asked(bench: Bench) -> None:
    await grpo.run(bench.ctx("grpo"), grpo_config(steps=1))
    assert bench.logged("overlong") == []


@pytest.mark.parametrize("loss", [Loss.tvpo, Loss.dis])
async def test_losses_against_the_sampler_raise_success(bench: Bench, loss: Loss) -> None:
    before = await bench.mean("before")
    optim = PolicyOptimConfig(tis_cap=0.0, minibatches=2)
    result = await grpo.run(bench.ctx("grpo"), grpo_config(steps=6, loss=loss, optim=optim))
    await bench.made.policy.load(result.outputs["policy"])
    await bench.sync()
    assert await bench.mean("after") > before + 0.2


async def test_groups_without_contrast_are_replaced_ahead_of_the_learner_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(bench, monkeypatch)
    config = grpo_config(steps=5, replace_zero_variance=40, max_staleness=1, optim=PolicyOptimConfig(lr=1e-12))
    result = await grpo.run(bench.ctx("grpo"), config)
    assert int(result.summary["groups_without_contrast"] or 0) > 0
    assert 0.0 < max(bench.logged("staleness")) <= 1.0
    assert len(recorder.batches) == 5
    seen: set[str] = set()
    for batch in recorder.batches:
        groups: dict[str, set[float]] = {}
        for sample in batch:
            groups.setdefault(sample.group_id, set()).update(a for a, m in zip(sample.advantages, sample.mask, strict=True) if m)
        assert len(groups) == 4
        assert all(len(values) == 2 for values in groups.values())
        assert not seen & set(groups)
        seen |= set(groups)
    assert bench.nothing_is_held()


# --- the critic between stages --------------------------------------------------------------------------------------


class Watch:
    """The checksum of the critic that each phase begins with, and of the one that it has left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[str, str] = {}
        self.kinds: list[str] = []
        for kind, run in list(pipeline.STAGES.items()):
            monkeypatch.setitem(pipeline.STAGES, kind, self._watched(kind, run))

    def _watched(self, kind: str, run: Any) -> Any:  # Any: as the table itself
        async def begin(ctx: Context, config: Any) -> Any:
            self.kinds.append(kind)
            if ctx.critic is not None:
                self.begun[ctx.name] = await ctx.critic.checksum()
            return await run(ctx, config)

        return begin


async def left(run_dir: Path, stage: str) -> str:
    return await FakeCritic().load(str(run_dir / "stages" / stage / "critic"))


async def run(root: Path, *arms: str) -> Path:
    overrides = ["experiment=terminal_rsi", "scale=dry", f"run_dir={root / 'run'}", *arms]
    await pipeline.Pipeline(load(overrides), overrides).run()
    return root / "run"


async def test_the_critic_goes_around_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewriting and SFT move the actor; the second phase begins with the critic that the first one left, to the bit."""
    watch = Watch(monkeypatch)
    where = await run(tmp_path)
    assert watch.kinds[4:8] == ["rpr", "rsr", "sft", "rpr"]
    new = await FakeCritic().checksum()
    assert watch.begun["warmup"] == new
    assert watch.begun["rpr_1"] == await left(where, "warmup") != new
    assert watch.begun["rpr_2"] == await left(where, "rpr_1") != watch.begun["rpr_1"]
    actors = [await FakePolicy().load(str(where / "stages" / name / "policy")) for name in ("rpr_1", "sft_2")]
    assert actors[0] != actors[1]


async def test_a_reset_critic_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    where = await run(tmp_path, "critic_init=reset")
    new = await FakeCritic().checksum()
    assert watch.begun["rpr_2"] == new != await left(where, "rpr_1")
    assert watch.begun["rpr_1"] == await left(where, "warmup") != new


async def test_a_rolled_back_schedule_takes_actor_and_critic_of_the_phase_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    where = await run(tmp_path, "schedule=rollback")
    assert watch.kinds == ["evaluate", "rsr", "sft", "warmup_critic", "rpr", "rpr", "evaluate"]
    assert watch.begun["rpr_2"] == await left(where, "rpr_1")
    log = json.loads((where / "stages" / "rpr_2" / "retention.json").read_text())
    assert all(("rolled_back" in entry) == (entry["kept"] is False and entry["step"] < 2) for entry in log[1:])
