"""Whole stages over the shipped fakes: success rises, every lease and snapshot returns, no runbook is trained on."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi import fakes
from termrsi.algo import metrics
from termrsi.config.choices import Loss
from termrsi.config.stages import (
    CollectRecoveryConfig,
    CreditConfig,
    EvaluateConfig,
    GrpoConfig,
    PolicyOptimConfig,
    RetentionConfig,
    RetermConfig,
    RprConfig,
    RsrConfig,
    SftConfig,
    WarmupCriticConfig,
)
from termrsi.datasets import Kind
from termrsi.errors import StageError
from termrsi.fakes import FakeCritic, FakePolicy, FakeSkill
from termrsi.harness import variants
from termrsi.harness.group import RECOVERY_PROMPT
from termrsi.ports import Sandbox
from termrsi.records import (
    Completion,
    EpisodeSpec,
    RecoveryPoint,
    Routing,
    Sample,
    SamplingParams,
    ScoredRollout,
    Snapshot,
    TaskSpec,
    UpdateMetrics,
)
from termrsi.stages import collect_recovery, evaluate, grpo, reterm, rpr, rsr, sft, warmup_critic
from termrsi.stages.rollin import TaskStream, specs_of
from termrsi.stages.rsr.discover import counted, discover, told
from termrsi.stages.runbook import BLOCKS
from tests.stage_bench import Bench, lines, rows_in, samples_in

NEVER = FakeSkill(solve=-50.0, half=0.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- evaluate ------------------------------------------------------------------------------------------------------


async def test_evaluate_gives_mean_at_k_with_its_interval(bench: Bench) -> None:
    await bench.use(FakeSkill(solve=1.0, half=0.0))
    ctx = bench.ctx("first")
    result = await evaluate.run(ctx, EvaluateConfig(k=4, temperature=1.0))
    written = lines(ctx.out / "rollouts.jsonl")
    assert sorted(r["rollout"]["id"] for r in written) == sorted(s.id for s in bench.runner.specs)
    passes: Counter[str] = Counter()
    for row in written:
        passes[row["rollout"]["task_id"]] += row["verdict"]["strict"]
    tasks = [t.id for t in bench.made.tasks.heldout]
    by_hand = sum(passes[t] / 4 for t in tasks) / len(tasks)
    summary = result.summary
    assert summary["mean_at_k"] == pytest.approx(by_hand)
    assert 0.0 < by_hand < 1.0
    low, high = summary["mean_low"], summary["mean_high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    assert low < by_hand < high
    assert summary["pass_at_k"] == pytest.approx(sum(metrics.pass_at_k(4, passes[t], 4) for t in tasks) / len(tasks))
    assert ctx.costs.episodes == len(written) == 24
    assert bench.nothing_is_held()


async def test_evaluate_compares_with_an_earlier_one_task_by_task(bench: Bench) -> None:
    before = await evaluate.run(bench.ctx("before"), EvaluateConfig())
    await bench.use(FakeSkill(solve=3.0))
    after = await evaluate.run(bench.ctx("after", baseline=Path(before.outputs["scores"])), EvaluateConfig(baseline="before"))
    was, now, gain, low = (after.summary[k] for k in ("baseline_mean", "mean_at_k", "gain", "gain_low"))
    assert was == pytest.approx(before.summary["mean_at_k"])
    assert isinstance(was, float)
    assert isinstance(now, float)
    assert isinstance(low, float)
    assert gain == pytest.approx(now - was)
    assert low > 0.0


async def test_an_episode_lost_to_the_machine_is_dropped_and_not_a_failure(bench: Bench) -> None:
    """All attempts at some episodes are lost; the policy solves everything, so the mean over the rest is 1."""
    await bench.use(FakeSkill(solve=50.0))
    bench.made.pool.world.lost_at |= dict.fromkeys(range(1, 60, 2), 1)
    ctx = bench.ctx("lossy")
    asked = 0
    generate = bench.made.generator.generate

    async def counting(prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        nonlocal asked
        asked += len(prompt_ids)
        return await generate(prompt_ids, params, prefix_key)

    bench.made.generator.generate = counting
    result = await evaluate.run(ctx, EvaluateConfig(k=4))
    assert ctx.costs.dropped > 0
    assert ctx.costs.dropped + ctx.costs.episodes == 24
    assert ctx.costs.prompt_tokens == asked, "what was lost cost something, too"
    assert result.summary["mean_at_k"] == 1.0
    assert bench.nothing_is_held()


async def test_bytes_of_an_episode_are_written_as_their_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.runner.run

    async def routed(specs: Sequence[EpisodeSpec]):  # the type of its base
        async for result in run(specs):
            assert isinstance(result, ScoredRollout)
            chunks = tuple(replace(c, routing=Routing(bytes(2 * (len(c.ids) - 1)), 1, 2)) for c in result.rollout.chunks)
            yield replace(result, rollout=replace(result.rollout, chunks=chunks))

    monkeypatch.setattr(bench.runner, "run", routed)
    ctx = bench.ctx("eval")
    await evaluate.run(ctx, EvaluateConfig(k=1))
    (chunk, *_) = lines(ctx.out / "rollouts.jsonl")[0]["rollout"]["chunks"]
    assert chunk["routing"]["data"] == f"{2 * (len(chunk['ids']) - 1)} bytes"


async def test_evaluate_says_so_when_nothing_could_be_scored(bench: Bench) -> None:
    bench.made.verifier.faults = 10_000
    with pytest.raises(StageError, match="no task could be scored"):
        await evaluate.run(bench.ctx("none"), EvaluateConfig())
    assert bench.nothing_is_held()


# --- rsr and sft ---------------------------------------------------------------------------------------------------


async def test_rsr_end_to_end(bench: Bench) -> None:
    ctx = bench.ctx("rsr")
    result = await rsr.run(ctx, RsrConfig())
    counts, chat = result.counts, bench.made.chat
    harnesses = Counter(s.harness for s in bench.runner.specs)
    assert counts["tasks"] == 8
    assert counts["attempts"] == harnesses["fewshot"] + harnesses["retry"] == 16
    assert max(counts["solved_by_fewshot"], counts["solved_by_retry"]) <= counts["solved_jointly"] <= 8
    assert counts["runbooks"] == 2 * counts["sources"]  # a draft with an empty block is written again, not dropped
    assert counts["refused_block_empty"] > 0
    assert counts["executions"] == harnesses["react"] == 2 * counts["runbooks"]
    kinds = ("near_duplicates", "over_balance", "split_history", "kept")
    assert counts["verified"] == sum(counts[k] for k in kinds)
    samples = samples_in(Path(result.outputs["data"]))
    assert len(samples) == counts["kept"] == result.summary["kept"]
    assert samples
    sources = samples_in(Path(result.outputs["source_data"]))
    assert result.summary["source_samples"] == len(sources) >= counts["sources"]
    assert {s.group_id for s in sources} >= {s.group_id for s in samples}
    assert bench.nothing_is_held()
    executed = [s for s in bench.runner.specs if s.harness == "react"]
    assert all(set(BLOCKS) <= set(s.guidance.replace(":", "\n").split("\n")) for s in executed)
    tasks = {t.id: t for t in bench.made.tasks.train}
    strict = {r["rollout"]["id"]: r["verdict"]["strict"] for r in lines(ctx.out / "rollouts.jsonl")}
    for sample in samples:
        text = chat.decode(sample.ids)
        assert not any(block in text for block in BLOCKS)
        assert strict[sample.rollout_id]
        prompt = chat.prompt(variants.get("react").messages(tasks[sample.group_id].instruction))
        assert list(sample.ids[: len(prompt)]) == prompt
        assert not any(sample.mask[: len(prompt)])
        assert sample.mask[len(prompt)] == 1
    found = {line["key"]: line["value"]["source"] for line in lines(ctx.out / "discovered.jsonl")}
    sources = {task: source[0] for task, source in found.items() if source}
    for row in rows_in(Path(result.outputs["data"])):
        assert (row.reward, row.strict, row.family) == (1.0, True, tasks[row.sample.group_id].family)
        assert (row.lineage.kind, row.lineage.stage, row.lineage.harness, row.lineage.seed) == (Kind.rsr, "rsr", "react", 0)
        assert f"/execute{row.lineage.runbook}/" in row.sample.rollout_id
        assert row.lineage.parent == sources[row.sample.group_id]
        assert row.lineage.checkpoint == await bench.made.policy.checksum()


async def test_discovery_finds_more_than_the_bare_policy(bench: Bench) -> None:
    async def found(name: str, config: RsrConfig) -> dict[str, int]:
        ctx = bench.ctx(name)
        return counted(config, [told(await discover(ctx, config, task)) for task in ctx.tasks.train])

    counts = await found("assisted", RsrConfig())
    bare = await found("bare", RsrConfig(harnesses=["react"], attempts=2))
    assert counts["attempts"] == bare["attempts"]
    assert counts["solved_jointly"] > bare["solved_jointly"]
    assert counts["solved_by_retry"] >= counts["solved_by_fewshot"]


async def test_rsr_refuses_a_runbook_that_leaks_and_keeps_the_reasons_only(bench: Bench) -> None:
    """Every draft is refused by the scan: no execution, an error that says what was refused."""
    ctx = bench.ctx("leaky")
    ctx.scan = lambda task, text: ("literal",)
    with pytest.raises(StageError, match="'runbooks': 0"):
        await rsr.run(ctx, RsrConfig(sources=6, rounds=2, attempts=8, runbooks=2))
    screened = [draft for line in lines(ctx.out / "rewritten.jsonl") for draft in line["value"]["drafts"]]
    assert len(screened) == 6 * 2 * 3
    assert {tuple(entry["refused"]) for entry in screened} == {("leak_literal",), ("block_empty",)}
    assert {s.harness for s in bench.runner.specs} == {"fewshot", "retry"}


async def test_rsr_without_a_solved_task_is_an_error(bench: Bench) -> None:
    await bench.use(NEVER)
    with pytest.raises(StageError, match="nothing to train on"):
        await rsr.run(bench.ctx("rsr"), RsrConfig())
    assert bench.nothing_is_held()


async def test_sft_on_the_rewritten_set_raises_success(bench: Bench) -> None:
    before = await bench.mean("before")
    data = (await rsr.run(bench.ctx("rsr"), RsrConfig())).outputs["data"]
    assert await bench.made.policy.checksum() == await FakePolicy().checksum()  # nothing was trained yet
    result = await sft.run(bench.ctx("sft", data=Path(data)), SftConfig(data="rsr"))
    first, last = result.summary["first_loss"], result.summary["last_loss"]
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert last < first
    await bench.sync()
    assert await bench.mean("after") > before + 0.2
    other = FakePolicy()
    assert await other.load(result.outputs["policy"]) == await bench.made.policy.checksum()


async def test_sft_sees_each_sample_once_an_epoch_and_warms_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (await rsr.run(bench.ctx("rsr"), RsrConfig())).outputs["data"]
    samples = samples_in(Path(data))
    seen: list[tuple[list[str], float]] = []

    async def fit(batch: Sequence[Sample], lr: float) -> UpdateMetrics:
        seen.append(([s.rollout_id for s in batch], lr))
        return UpdateMetrics(1.0, 1.0, 1, 0.0)

    monkeypatch.setattr(bench.made.policy, "fit", fit)
    await sft.run(bench.ctx("sft", data=Path(data)), SftConfig(data="rsr", epochs=3, batch=2, warmup=0.5, lr=1.0))
    steps = 3 * -(-len(samples) // 2)
    rates = [lr for _, lr in seen]
    assert len(seen) == steps
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == round(steps / 2) - 1
    assert 0.0 < rates[-1] < rates[-2]
    epochs = [[i for ids, _ in seen[e * steps // 3 : (e + 1) * steps // 3] for i in ids] for e in range(3)]
    assert all(sorted(e) == sorted(s.rollout_id for s in samples) for e in epochs)
    assert epochs[0] != epochs[1]
    for number, epoch in enumerate(epochs):  # as a shuffled list of all of them
        whole = samples[:]
        random.Random(f"0/sft/{number}").shuffle(whole)
        assert epoch == [s.rollout_id for s in whole]


# --- critic and rpr ------------------------------------------------------------------------------------------------


async def test_the_critic_is_warm_when_its_explained_variance_stays_positive(bench: Bench) -> None:
    await bench.use(FakeSkill(solve=0.3, half=0.0))
    before = await bench.made.policy.checksum()
    ctx = bench.ctx("warmup")
    config = WarmupCriticConfig(tasks_per_step=8, max_steps=12, checks=2)
    result = await warmup_critic.run(ctx, config)
    evs = bench.logged("ev")
    assert evs[0] == 0.0  # a new head is a constant
    assert all(ev > 0 for ev in evs[-2:])
    assert len(evs) < config.max_steps
    assert not all(ev > 0 for ev in evs[-3:-1])  # and it ended at once
    assert await bench.made.policy.checksum() == before
    other = FakeCritic()
    assert await other.load(result.outputs["critic"]) == await bench.made.critic.checksum()


async def test_a_step_tells_how_its_episodes_ended_and_which_the_machine_lost(bench: Bench) -> None:
    bench.made.pool.world.lost_at |= dict.fromkeys(range(1, 20, 2), 1)
    ctx = bench.ctx("warmup")
    await warmup_critic.run(ctx, WarmupCriticConfig(tasks_per_step=8, max_steps=1))
    assert 0 < ctx.costs.dropped < 8
    assert bench.logged("stop/dropped") == [ctx.costs.dropped / 8]
    assert sum(value for _, values in bench.log for name, value in values.items() if name.startswith("stop/")) == 1.0


class Recorder:
    """The order of the learner's calls, with the policy's checksum at each."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.batches: list[list[Sample]] = []
        policy, critic = bench.made.policy, bench.made.critic
        update_policy, update_critic = policy.update, critic.update

        async def on_policy(samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
            self.calls.append(("policy", await policy.checksum()))
            self.batches.append(list(samples))
            return await update_policy(samples, loss, lr)

        async def on_critic(samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
            self.calls.append(("critic", await policy.checksum()))
            return await update_critic(samples, lr, value_clip)

        monkeypatch.setattr(policy, "update", on_policy)
        monkeypatch.setattr(critic, "update", on_critic)


def rpr_config(**changes: object) -> RprConfig:
    settings = {"critic": "warmup", "steps": 6, "tasks_per_step": 8, "samples_per_task": 4}
    return RprConfig(**(settings | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_rpr_raises_success(tmp_path: Path, seed: int) -> None:
    bench = Bench(tmp_path, seed)
    before = await bench.mean("before")
    result = await rpr.run(bench.ctx("rpr"), rpr_config())
    rewards = bench.logged("reward")
    assert rewards[-1] > rewards[0] + 0.2
    assert await bench.made.policy.load(result.outputs["policy"])
    await bench.sync()
    assert await bench.mean("after") > before + 0.3
    assert result.summary["validation_after"] == max(bench.logged("validation"))
    assert bench.nothing_is_held()


async def test_rpr_makes_exactly_four_critic_only_updates(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    start = await bench.made.policy.checksum()
    recorder = Recorder(bench, monkeypatch)
    await rpr.run(bench.ctx("rpr"), rpr_config(steps=3, optim=PolicyOptimConfig(minibatches=2)))
    kinds = [kind for kind, _ in recorder.calls]
    assert kinds == ["critic"] * 4 + ["critic", "policy", "policy"] * 3
    assert [checksum for _, checksum in recorder.calls[:6]] == [start] * 6  # nothing moved until the first joint update
    assert recorder.calls[6][1] != start
    assert len(bench.logged("critic_only_loss")) == 4
    first = bench.logged("critic_only_loss")
    assert first[-1] < first[0]


async def test_rpr_uses_values_and_log_probabilities_from_before_the_update(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(bench, monkeypatch)
    await rpr.run(bench.ctx("rpr"), rpr_config(steps=2, credit=CreditConfig(whiten=False), optim=PolicyOptimConfig(minibatches=2)))
    for batch in recorder.batches:
        for sample in batch:
            assert sample.old_logp == sample.sampler_logp  # on-policy: the actor that sampled is the one that is updated
            on = [i for i, m in enumerate(sample.mask) if m]
            last = sample.advantages[on[-1]] + sample.old_values[on[-1]]
            assert sample.returns[on[-1]] == pytest.approx(last)  # the reward, seen by both from the same kept value
            assert not any(a for a, m in zip(sample.advantages, sample.mask, strict=True) if not m)


async def test_rpr_stops_if_the_actor_moves_while_only_the_critic_should(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, update = bench.made, bench.made.critic.update

    async def meddle(samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        made.policy.skill = replace(made.policy.skill, half=made.policy.skill.half + 1e-9)
        return await update(samples, lr, value_clip)

    monkeypatch.setattr(made.critic, "update", meddle)
    with pytest.raises(StageError, match="actor changed"):
        await rpr.run(bench.ctx("rpr"), rpr_config(steps=1))


async def test_rpr_retains_the_best_by_validation_actor_and_critic_of_one_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scripted actor: it improves, then falls back, improves again without exceeding, and ends bad."""
    script = [FakeSkill(1.0, 0.0), FakeSkill(4.0, 0.0), FakeSkill(-3.0, 3.0), FakeSkill(1.0, 0.0), NEVER]
    policy, critic = bench.made.policy, bench.made.critic
    critics: list[str] = []

    async def update(samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        critics.append(await critic.checksum())
        policy.skill = script[len(critics) - 1]
        return UpdateMetrics(0.0, 0.0, 0, 0.0)

    monkeypatch.setattr(policy, "update", update)
    ctx = bench.ctx("rpr")
    result = await rpr.run(ctx, rpr_config(steps=len(script), retention=RetentionConfig(every=1, k=8, max_drop=1.0)))
    log = json.loads((ctx.out / "retention.json").read_text())
    means = [entry["mean"] for entry in log]
    assert [entry["step"] for entry in log] == list(range(len(script) + 1))
    best = means.index(max(means))  # of equals the first
    assert best == 2
    assert result.summary["retained_step"] == best
    assert result.summary["validation_before"] == means[0]
    kept_policy, kept_critic = FakePolicy(), FakeCritic()
    await kept_policy.load(result.outputs["policy"])
    assert kept_policy.skill == script[best - 1]
    assert await kept_critic.load(result.outputs["critic"]) == critics[best - 1]
    assert policy.skill == NEVER  # the host holds the last step, the directory the best


@pytest.mark.parametrize("whiten", [True, False])
async def test_the_actor_learns_from_contrast_and_the_critic_from_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, whiten: bool
) -> None:
    recorder = Recorder(bench, monkeypatch)
    seen: list[int] = []
    update = bench.made.critic.update

    async def on_critic(samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        seen.append(len(samples))
        return await update(samples, lr, value_clip)

    monkeypatch.setattr(bench.made.critic, "update", on_critic)
    await rpr.run(bench.ctx("rpr"), rpr_config(steps=2, only_contrast=True, credit=CreditConfig(whiten=whiten)))
    assert set(seen) == {32}
    assert [len(batch) for batch in recorder.batches] == [int(n) for n in bench.logged("learned_from")]
    assert min(len(batch) for batch in recorder.batches) < 32
    for batch in recorder.batches:
        values = [a for sample in batch for a, m in zip(sample.advantages, sample.mask, strict=True) if m]
        whitened = abs(sum(values) / len(values)) < 1e-9 and abs(sum(v * v for v in values) / len(values) - 1) < 1e-6
        assert whitened is whiten


async def test_rpr_keeps_the_start_if_nothing_beats_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.use(FakeSkill(50.0))
    start = await bench.made.policy.checksum()
    result = await rpr.run(bench.ctx("rpr"), rpr_config(steps=2))
    assert result.summary["retained_step"] == 0
    assert "no candidate" in result.verdict
    assert await FakePolicy().load(result.outputs["policy"]) == start


async def test_a_suite_that_falls_too_far_is_guarded(bench: Bench) -> None:
    from termrsi.stages.retain import Candidate, decide

    old, new = Candidate(0, {"a": 0.5, "b": 0.5}), Candidate(2, {"a": 1.0, "b": 0.1})
    assert decide(old, new, RetentionConfig(max_drop=0.5)) == (True, "mean 0.550 exceeds 0.500 of step 0")
    kept, why = decide(old, new, RetentionConfig(max_drop=0.3))
    assert not kept
    assert "suite b falls by 0.400" in why
    assert not decide(old, Candidate(2, dict(old.suites)), RetentionConfig())[0]


# --- tasks of a step -----------------------------------------------------------------------------------------------


def test_a_step_has_no_task_twice_and_an_epoch_has_all() -> None:
    tasks = fakes.dry_tasks(train=8).train
    stream = TaskStream(tasks, "seed")
    taken = [[t.id for t in stream.take(3)] for _ in range(40)]
    assert all(len(set(step)) == 3 for step in taken)
    counts = Counter(i for step in taken for i in step)
    assert set(counts.values()) == {15}
    assert [[t.id for t in TaskStream(tasks, "seed").take(8)]] != [[t.id for t in tasks]]


def test_a_step_larger_than_the_pool_has_no_episode_twice(bench: Bench) -> None:
    ctx = bench.ctx("rpr")
    tasks = TaskStream(ctx.tasks.train, "seed").take(12)
    specs = specs_of(ctx, tasks, 1, 2, 1.0)
    assert len({s.id for s in specs}) == len(specs) == 24


# --- recovery ------------------------------------------------------------------------------------------------------


async def test_recovery_data_continues_failures_and_trains_the_continuation_only(bench: Bench) -> None:
    ctx = bench.ctx("collect")
    result = await collect_recovery.run(ctx, CollectRecoveryConfig())
    counts, chat = result.counts, bench.made.chat
    points = [point for line in lines(ctx.out / "recovered.jsonl") for point in line["value"]["points"]]
    first = {r["rollout"]["id"]: r for r in lines(ctx.out / "rollouts.jsonl") if not r["rollout"]["recovery_id"]}
    assert counts["failures"] == len(points) == sum(not r["verdict"]["strict"] for r in first.values()) > 0
    assert counts["continuations"] == 2 * counts["failures"]
    after = ("refused_format", "refused_compliance", "refused_efficiency", "split_history", "more_than_one", "kept")
    assert counts["verified"] == sum(counts[k] for k in after)
    assert counts["refused_verifier"] == counts["continuations"] - counts["verified"]
    told = json.loads((ctx.out / "statistics.json").read_text())
    assert told["filters"]["continuations"] == counts["continuations"]
    assert sum(told["turns"].values()) == pytest.approx(1.0)
    history = {p["id"]: p["history_ids"] for p in points}
    samples = samples_in(Path(result.outputs["data"]))
    assert len(samples) == counts["kept"] > 0
    recovered = {r["rollout"]["id"]: r["rollout"]["recovery_id"] for r in lines(ctx.out / "rollouts.jsonl")}
    for sample in samples:
        failed = history[recovered[sample.rollout_id]]
        assert list(sample.ids[: len(failed)]) == failed
        assert not any(sample.mask[: len(failed)])
        context = chat.decode(sample.ids[: sample.mask.index(1)])
        task = next(t for t in bench.made.tasks.train if t.id == sample.group_id)
        assert RECOVERY_PROMPT.format(instruction=task.instruction) in context
        assert "Work like this" not in chat.decode(sample.ids)
    for row in rows_in(Path(result.outputs["data"])):
        assert (row.strict, row.lineage.kind, row.lineage.runbook) == (True, Kind.recovery, None)
        assert row.lineage.parent in first
        assert not first[row.lineage.parent]["verdict"]["strict"]
    assert bench.nothing_is_held()


async def test_sft_on_recoveries_raises_success(bench: Bench) -> None:
    before = await bench.mean("before")
    data = (await collect_recovery.run(bench.ctx("collect"), CollectRecoveryConfig())).outputs["data"]
    await sft.run(bench.ctx("sft", data=Path(data)), SftConfig(data="collect", epochs=4))
    await bench.sync()
    assert await bench.mean("after") > before + 0.1


async def test_recovery_without_a_success_is_an_error(bench: Bench) -> None:
    await bench.use(NEVER)
    with pytest.raises(StageError, match="no recovery was verified"):
        await collect_recovery.run(bench.ctx("collect"), CollectRecoveryConfig())
    assert bench.nothing_is_held()


def reterm_config(**changes: object) -> RetermConfig:
    settings = {"steps": 4, "original_groups": 4, "recovery_groups": 2, "group_size": 4}
    return RetermConfig(**(settings | changes))  # pyright: ignore[reportArgumentType]


async def test_reterm_starts_recovery_groups_from_failed_states(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is a failure of an earlier step; its machine is the one the failed episode left; it is used once."""
    world = bench.made.pool.world
    states: dict[str, list[str]] = {}
    lease = bench.made.pool.lease

    async def watch(task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        sandbox = await lease(task, snapshot)
        if snapshot is not None:
            states[snapshot.id] = sorted(world.snapshots[snapshot.handle].files)
        return sandbox

    monkeypatch.setattr(bench.made.pool, "lease", watch)
    ctx = bench.ctx("reterm")
    result = await reterm.run(ctx, reterm_config())
    failed = {f"point:{r['rollout']['id']}": r for r in lines(ctx.out / "rollouts.jsonl") if not r["rollout"]["recovery_id"]}
    recovery = [s for s in bench.runner.specs if s.recovery]
    points = {s.recovery.id: s.recovery for s in recovery if s.recovery}
    assert result.summary["recovery_groups"] == len(points) == len({s.group_id for s in recovery}) > 0
    assert len(recovery) == 4 * len(points)
    for spec in recovery:
        point = spec.recovery
        assert point is not None
        origin = failed[point.id]
        assert not origin["verdict"]["strict"]
        assert list(point.history_ids) == origin["rollout"]["chunks"][0]["ids"]
        assert int(spec.id.split("/")[1]) > point.born_step
        commands = [t["command"] for t in origin["rollout"]["turns"] if t["command"]]
        assert states[point.snapshot.id] == (["/app/half"] if commands == ["half"] else [])
    assert any(state == ["/app/half"] for state in states.values())
    steps = json.loads((ctx.out / "steps.json").read_text())
    assert steps[0]["recovery_groups"] == 0
    assert steps[0]["recovery"] is None
    assert all(s["recovery_groups"] <= 2 for s in steps)
    assert bench.nothing_is_held()
    assert await bench.made.queue.size() == 0


async def test_reterm_frees_what_its_queue_pushes_out_and_takes_the_newest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recovery group a step out of a queue of two that four failures a step run through."""
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    held: list[tuple[int, int]] = []
    queue, push = bench.made.queue, bench.made.queue.push

    async def watch(points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        held.append((len(bench.made.pool.world.snapshots), len(points)))
        return await push(points)

    monkeypatch.setattr(queue, "push", watch)
    await reterm.run(bench.ctx("reterm"), reterm_config(capacity=2, recovery_groups=1, steps=4))
    assert [points for _, points in held] == [4] * 4
    assert [snapshots for snapshots, _ in held] == [16] + [16 + 2] * 3  # this step's, what it began from, and the one left
    for spec in bench.runner.specs:
        if spec.recovery:
            assert int(spec.id.split("/")[1]) == spec.recovery.born_step + 1
    assert bench.nothing_is_held()


@pytest.mark.parametrize("pop", [True, False])
async def test_reterm_drops_the_points_that_were_lost_with_their_node(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pop: bool
) -> None:
    """What the first step left is lost before the second one draws; what the second leaves is started from in the third."""
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    push = bench.made.queue.push
    lost: list[str] = []

    async def loses(points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        if not lost:
            lost.extend(point.id for point in points)
            for point in points[:-1]:
                del bench.made.pool.world.snapshots[point.snapshot.handle]
        return await push(points)

    monkeypatch.setattr(bench.made.queue, "push", loses)
    ctx = bench.ctx("reterm")
    await reterm.run(ctx, reterm_config(steps=3, recovery_groups=3, pop=pop))
    drawn = {spec.recovery.id for spec in bench.runner.specs if spec.recovery}
    assert drawn.isdisjoint(lost[:-1])
    assert lost[-1] in drawn, "what is still there is started from"
    assert [entry["recovery_groups"] for entry in json.loads((ctx.out / "steps.json").read_text())] == [0, 1, 3]
    assert [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()] == [
        "reterm: 3 of 4 restart points are dropped: their snapshots are gone"
    ]
    assert ctx.costs.dropped == 0
    assert bench.nothing_is_held()


async def test_reterm_learns_inside_each_group_and_raises_success(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(bench, monkeypatch)
    before = await bench.mean("before")
    result = await reterm.run(bench.ctx("reterm"), reterm_config(steps=6))
    for batch in recorder.batches:
        groups: dict[str, list[float]] = {}
        for sample in batch:
            values = {a for a, m in zip(sample.advantages, sample.mask, strict=True) if m}
            assert len(values) == 1  # one advantage for all tokens of a rollout
            groups.setdefault(sample.group_id, []).append(values.pop())
        assert all(len(g) == 4 for g in groups.values())
        assert all(abs(sum(g)) < 1e-9 for g in groups.values())
    assert any(len({s.group_id for s in batch}) > 4 for batch in recorder.batches)  # original and recovery in one update
    await bench.made.policy.load(result.outputs["policy"])
    await bench.sync()
    assert await bench.mean("after") > before + 0.2
    assert {kind for kind, _ in recorder.calls} == {"policy"}


async def test_reterm_empties_a_queue_that_an_earlier_stage_left(bench: Bench) -> None:
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    await reterm.run(bench.ctx("first"), reterm_config(steps=1))
    assert bench.nothing_is_held()
    ctx = bench.ctx("left")
    spec = specs_of(ctx, ctx.tasks.train[:1], 0, 1, 1.0, keep_snapshot=True)
    (failure,) = await ctx.episodes(spec, "left")
    from termrsi.stages.points import point_of

    await bench.made.queue.push([point_of(failure, ctx.tasks.train[0], 0)])
    assert not bench.nothing_is_held()
    await reterm.run(bench.ctx("second"), reterm_config(steps=1))
    assert bench.nothing_is_held()
    assert not any(s.recovery for s in bench.runner.specs)


# --- grpo -----------------------------------------------------------------------------------------------------------


def grpo_config(**changes: object) -> GrpoConfig:
    return GrpoConfig(**({"steps": 4, "groups": 4, "group_size": 4} | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("loss", [Loss.grpo, Loss.dapo, Loss.dr_grpo, Loss.gspo])
async def test_grpo_raises_success(bench: Bench, loss: Loss) -> None:
    before = await bench.mean("before")
    plain = loss is Loss.dr_grpo  # without the division by the deviation its steps are smaller
    result = await grpo.run(bench.ctx("grpo"), grpo_config(steps=18 if plain else 6, loss=loss, normalise=not plain))
    await bench.made.policy.load(result.outputs["policy"])
    await bench.sync()
    assert await bench.mean("after") > before + 0.2
    assert not any(spec.keep_snapshot for spec in bench.runner.specs)
    assert bench.nothing_is_held()


async def test_groups_without_contrast_are_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(bench, monkeypatch)
    optim = PolicyOptimConfig(lr=1e-12, tis_cap=0.0)
    result = await grpo.run(bench.ctx("grpo"), grpo_config(loss=Loss.dppo, normalise=False, replace_zero_variance=40, optim=optim))
    assert int(result.summary["groups_without_contrast"] or 0) == sum(bench.logged("refused_groups")) > 0
    assert sum(bench.logged("missing_groups")) == result.summary["groups_missing"] == 0
    refused = bench.logged("refused_groups")
    assert bench.logged("replaced") == [pytest.approx(n / (n + 4)) for n in refused]
    for batch in recorder.batches:
        groups: dict[str, set[float]] = {}
        for sample in batch:
            groups.setdefault(sample.group_id, set()).update(a for a, m in zip(sample.advantages, sample.mask, strict=True) if m)
        assert len(groups) == 4
        assert all(len(values) == 2 for values in groups.values())
        assert all(abs(value) <= 0.75 for values in groups.values() for value in values)  # reward less mean, not over the spread


async def test_groups_that_never_differ_end_the_stage(bench: Bench) -> None:
    await bench.use(NEVER)
    with pytest.raises(StageError, match="all 14 groups of a step had equal rewards"):
        await grpo.run(bench.ctx("grpo"), grpo_config(replace_zero_variance=10))
    assert bench.nothing_is_held()


async def test_a_step_replaces_no_more_groups_than_it_may(bench: Bench) -> None:
    await bench.use(FakeSkill(solve=0.0, half=0.0))
    config = grpo_config(steps=4, replace_zero_variance=1, optim=PolicyOptimConfig(lr=1e-12))
    result = await grpo.run(bench.ctx("grpo"), config)
    refused, missing = bench.logged("refused_groups"), bench.logged("missing_groups")
    assert result.summary["groups_missing"] == sum(missing) > 0
    assert all(r - m <= 1 for r, m in zip(refused, missing, strict=True))


async def test_repeated_turns_are_charged_in_groups_of_equal_rewards_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy only ever does half of the task, again and again: no reward differs, and each repetition costs."""
    recorder = Recorder(bench, monkeypatch)
    await bench.use(FakeSkill(solve=-50.0, half=50.0))
    await grpo.run(bench.ctx("grpo"), grpo_config(steps=1, repetition_penalty=0.05))
    (batch,) = recorder.batches
    charged = {a for sample in batch for a, m in zip(sample.advantages, sample.mask, strict=True) if m}
    assert charged <= {0.0, -0.05}
    (repeated,) = bench.logged("repeated_turns")
    turns = {(s.rollout_id, t) for s in batch for a, t in zip(s.advantages, s.turn_ids, strict=True) if a}
    assert len(turns) == repeated


async def test_a_policy_held_near_its_reference_asks_it_for_every_sample(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(bench, monkeypatch)
    bench.reference = FakePolicy()
    await grpo.run(bench.ctx("grpo"), grpo_config(steps=2, optim=PolicyOptimConfig(kl=0.01)))
    assert len(recorder.batches) == 2
    assert all(len(sample.ref_logp) == len(sample.ids) for batch in recorder.batches for sample in batch)


# --- two stages in a row -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_the_loop_of_the_first_paper_rises_stage_by_stage(tmp_path: Path, seed: int) -> None:
    """evaluate, rsr, sft, warm-up, rpr, evaluate: what each leaves is what the next one reads."""
    bench = Bench(tmp_path, seed)
    base = await bench.mean("base")
    data = (await rsr.run(bench.ctx("rsr"), RsrConfig())).outputs["data"]
    tuned = (await sft.run(bench.ctx("sft", data=Path(data)), SftConfig(data="rsr"))).outputs["policy"]
    await bench.made.policy.load(tuned)
    await bench.sync()
    middle = await bench.mean("middle")
    warm = (await warmup_critic.run(bench.ctx("warmup"), WarmupCriticConfig(tasks_per_step=8))).outputs["critic"]
    await bench.made.critic.load(warm)
    assert bench.made.critic.fresh_optimizer
    refined = (await rpr.run(bench.ctx("rpr"), rpr_config())).outputs["policy"]
    await bench.made.policy.load(refined)
    await bench.sync()
    final = await bench.mean("final")
    assert base < middle < final
    assert final > 0.6
    assert bench.nothing_is_held()
