"""The fake model is what it claims: true log-probabilities, exact gradients, versions, and a tokenizer that loses nothing."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi import fakes
from termrsi.errors import CheckpointError, ConfigError, EngineError, WeightsError
from termrsi.fakes import ACTIONS, BASE, FakeCritic, FakeGenerator, FakePolicy, FakeSkill, FakeTokenizer
from termrsi.harness import variants
from termrsi.harness.episode import Episode, first_prompt
from termrsi.harness.group import RECOVERY_PROMPT, task_group
from termrsi.harness.render import ChatFormat, Transcript
from termrsi.records import Limits, Message, Sample, SamplingParams, WeightsVersion, Writing
from termrsi.reward.shaping import FamilyScale
from termrsi.stages.collect_recovery import SHORT_PROMPT
from termrsi.stages.credit import samples_of
from termrsi.stages.roles import PolicyWriter
from termrsi.stages.rsr.plan import Planner
from termrsi.stages.rsr.screen import Screener
from termrsi.stages.runbook import BLOCKS, faults, take_apart

CHAT = ChatFormat(FakeTokenizer())
TASK = fakes.dry_tasks().train[0]


def prompt_of(harness: str = "react", guidance: str = "") -> list[int]:
    return CHAT.prompt(variants.get(harness).messages(TASK.instruction, guidance))


async def served(skill: FakeSkill) -> FakeGenerator:
    generator = FakeGenerator()
    await generator.pull(await FakePolicy(skill).publish())
    return generator


async def sampled(size: int = 6, skill: FakeSkill | None = None, harness: str = "react", guidance: str = "") -> list[Sample]:
    """Samples of real episodes."""
    made = fakes.dry_parts()
    await made.generator.pull(await FakePolicy(skill or FakeSkill()).publish())
    specs = task_group(
        TASK, size, label="t", harness=harness, sampling=SamplingParams(), limits=Limits(), seed=0, guidance=guidance
    )
    results = [await made.rollouts.run_one(spec) for spec in specs]
    return [sample for result in results for sample in samples_of(result, 1.0)]  # pyright: ignore[reportArgumentType]  # none dropped


# --- tokenizer -----------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    tokenizer = FakeTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 2**63 for i in ids)


def test_ids_are_the_same_in_every_tokenizer_and_special_tokens_are_one_id() -> None:
    text = "<|im_start|>user\nwords and 12345678 ```bash\nls\n```<|im_end|>\n"
    ids = FakeTokenizer().encode(text)
    assert ids == FakeTokenizer().encode(text)
    assert (ids[0], ids[-2]) == (1, FakeTokenizer.eos_token_id)
    assert FakeTokenizer().decode(ids, skip_special_tokens=True) == "user\nwords and 12345678 ```bash\nls\n```\n"
    assert FakeTokenizer().decode(FakeTokenizer().encode("wörd")) == "wörd"


def test_the_glue_between_turns_is_the_templates_own() -> None:
    messages = variants.get("react").messages(TASK.instruction)
    reply, seen = "```bash\nsolve\n```", Message("user", "[exit 0]")
    whole = CHAT.prompt([*messages, Message("assistant", reply), seen])
    assert [*CHAT.prompt(messages), *CHAT.encode(reply), CHAT.end_of_turn, *CHAT.bridge([seen], ended=True)] == whole
    assert [*CHAT.prompt(messages), *CHAT.encode(reply), *CHAT.bridge([seen], ended=False)] == whole


def test_a_transcript_matches_histories_by_their_text() -> None:
    """`retokenized` needs the text of single tokens, characters beyond ASCII included."""
    transcript = Transcript(FakeTokenizer())
    transcript.prompt(CHAT.encode("a wörd"))
    transcript.sampled(CHAT.encode("é") + CHAT.encode("x"), [0.0, 0.0])
    assert transcript.next_prompt([*CHAT.encode("a wö"), *CHAT.encode("r"), *CHAT.encode("déx and more")]) == "retokenized"
    assert CHAT.decode(transcript.ids) == "a wördéx and more"


# --- generator -----------------------------------------------------------------------------------------------------


async def test_choices_are_drawn_as_often_as_their_probability_says() -> None:
    generator, skill, n = await served(FakeSkill(0.3, -0.4)), FakeSkill(0.3, -0.4), 3000
    drawn = Counter()
    for seed in range(n):
        completion = await generator.generate(prompt_of(), SamplingParams(seed=seed))
        action = next(a for a in ACTIONS if a in CHAT.decode(completion.ids))
        drawn[action] += 1
        assert completion.logprobs[0] == math.log(skill.probs(helped=False)[ACTIONS.index(action)])
        assert not any(completion.logprobs[1:])
        assert completion.ids[-1] == CHAT.end_of_turn
    for action, p in zip(ACTIONS, skill.probs(helped=False), strict=True):
        assert abs(drawn[action] / n - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_probabilities() -> None:
    plain, helped = (FakeSkill(1.0, 0.0).probs(helped=h) for h in (False, True))
    assert sum(plain) == pytest.approx(1.0)
    assert plain[0] == pytest.approx(math.e / (math.e + 2))
    assert helped[0] == pytest.approx(math.exp(1 + fakes.HELP) / (math.exp(1 + fakes.HELP) + 2))
    assert FakeSkill(1.0, 2.0).probs(helped=False, temperature=0.0) == (0.0, 1.0, 0.0)
    assert FakeSkill(1.0, 0.0).probs(helped=False, temperature=0.5)[0] == pytest.approx(math.e**2 / (math.e**2 + 2))


async def test_the_seed_decides_and_a_reply_is_cut_at_its_limit() -> None:
    generator = FakeGenerator(seed=1)
    params = SamplingParams(seed=7)
    assert await generator.generate(prompt_of(), params) == await generator.generate(prompt_of(), params)
    cut = await generator.generate(prompt_of(), replace(params, max_tokens=2))
    assert (len(cut.ids), len(cut.logprobs), cut.finish) == (2, 2, "length")
    assert (await generator.generate(prompt_of(), params)).finish == "stop"


@pytest.mark.parametrize(
    ("messages", "helped"),
    [
        (variants.get("react").messages(TASK.instruction), False),
        (variants.get("fewshot").messages(TASK.instruction), True),
        (variants.get("retry").messages(TASK.instruction), True),
        (variants.get("react").messages(TASK.instruction, "Milestones: run solve"), True),
        ([Message("system", "-"), Message("user", RECOVERY_PROMPT.format(instruction="x"))], True),
        ([Message("system", "-"), Message("user", SHORT_PROMPT.format(instruction="x"))], True),
    ],
)
async def test_what_helps(messages: list[Message], helped: bool) -> None:
    skill = FakeSkill(0.0, 0.0)
    generator = await served(skill)
    logprobs = [(await generator.generate(CHAT.prompt(messages), SamplingParams(seed=s))).logprobs[0] for s in range(20)]
    assert {round(x, 9) for x in logprobs} <= {round(math.log(p), 9) for p in skill.probs(helped=helped)}


async def test_after_a_commands_result_it_is_done() -> None:
    for seen in ("[exit 0]", "[exit 1]\nno", "[timed out]"):
        ids = [*prompt_of("fewshot"), *CHAT.encode("```bash\nhalf\n```"), *CHAT.bridge([Message("user", seen)], ended=False)]
        completion = await FakeGenerator().generate(ids, SamplingParams())
        assert CHAT.decode(completion.ids) == "DONE"


async def test_it_dies_when_told_to() -> None:
    generator = FakeGenerator(dies_at=2)
    await generator.generate(prompt_of(), SamplingParams())
    for _ in range(2):
        with pytest.raises(EngineError):
            await generator.generate(prompt_of(), SamplingParams())


async def test_completions_carry_the_versions_they_saw() -> None:
    generator, policy = FakeGenerator(), FakePolicy()
    await generator.pull(await policy.publish())
    first = asyncio.create_task(generator.generate(prompt_of(), SamplingParams()))
    await asyncio.sleep(0)
    await generator.pull(await policy.publish())
    completion = await first
    assert (completion.version_low, completion.version_high) == (1, 2)
    after = await generator.generate(prompt_of(), SamplingParams())
    assert (after.version_low, after.version_high) == (2, 2)


async def test_weights_that_differ_after_a_pull_are_refused() -> None:
    weights = await FakePolicy().publish()
    for bad in (replace(weights, handle={"solve": 9.0, "half": 0.5}), replace(weights, handle=None), WeightsVersion("x", 1, "")):
        with pytest.raises(WeightsError):
            await FakeGenerator().pull(bad)
        with pytest.raises(WeightsError):
            await FakeCritic().pull(bad)


async def test_planner_and_critic_get_what_they_ask_for() -> None:
    """The last block of a first draft is empty now and then; a draft that was refused is written whole."""
    generator = FakeGenerator(sloppy=0.5)
    policy = PolicyWriter(generator, CHAT)

    async def ask(role: str, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        return await policy.write(messages, sampling, key, begun)

    planner = Planner(ask, SamplingParams(max_tokens=160))
    drafts = [await planner.write(TASK.instruction, ("solve",), seed) for seed in range(40)]
    assert {faults(text) for text in drafts} == {(), ("block_empty",)}
    bad = next(text for text in drafts if faults(text))
    for seed in range(10):
        text = await planner.write(TASK.instruction, ("half", "solve"), seed, bad, ("block_empty",))
        assert set(take_apart(text)) == set(BLOCKS)
        assert "solve" in text
        assert await Screener(ask, fakes.fake_scan, 16).refusals(TASK, text, seed) == ()
        leak = text.replace("Look with ls", "all_done looks")
        assert await Screener(ask, fakes.fake_scan, 16).refusals(TASK, leak, seed) == ("leak_test_name",)


# --- policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("harness", "guidance"), [("react", ""), ("react", "Milestones: x"), ("retry", "")])
async def test_the_learner_finds_the_samplers_log_probabilities(harness: str, guidance: str) -> None:
    """Exactly, on episodes of several turns, and under other weights not."""
    skill = FakeSkill(-1.5, 0.1)
    samples = await sampled(8, skill, harness, guidance)
    assert any(sum(x != 0 for x in s.sampler_logp) > 1 for s in samples) == (harness == "retry")
    assert await FakePolicy(skill).logp(samples) == [list(s.sampler_logp) for s in samples]
    assert await FakePolicy(FakeSkill(-1.4, 0.1)).logp(samples) != [list(s.sampler_logp) for s in samples]


async def objective(skill: FakeSkill, samples: list[Sample], weights: list[float]) -> float:
    rows = await FakePolicy(skill).logp(samples)
    return sum(w * sum(row) for w, row in zip(weights, rows, strict=True)) / len(samples)


@pytest.mark.parametrize("kind", ["update", "fit"])
async def test_a_step_is_the_exact_gradient(kind: str) -> None:
    """Against central differences of the mean of sum(advantage x logp)."""
    skill, rate, h = FakeSkill(0.2, 0.1), 1e-3, 1e-5
    samples = await sampled(8, skill, "retry")
    weights = [float(i) - 3.0 for i in range(len(samples))] if kind == "update" else [1.0] * len(samples)
    policy = FakePolicy(skill)
    if kind == "update":
        rows = await policy.logp(samples)
        batch = [
            replace(s, advantages=tuple(w * m for m in s.mask), old_logp=tuple(row))
            for s, w, row in zip(samples, weights, rows, strict=True)
        ]
        metrics = await policy.update(batch, {"kind": "ppo"}, rate / fakes.UPDATE_SCALE)
    else:
        metrics = await policy.fit(samples, rate / fakes.FIT_SCALE)
    gradient = []
    for name in ("solve", "half"):
        up, down = (replace(skill, **{name: getattr(skill, name) + d}) for d in (h, -h))
        gradient.append((await objective(up, samples, weights) - await objective(down, samples, weights)) / (2 * h))
    assert policy.skill.solve - skill.solve == pytest.approx(rate * gradient[0], abs=1e-9)
    assert policy.skill.half - skill.half == pytest.approx(rate * gradient[1], abs=1e-9)
    assert metrics.grad_norm == pytest.approx(math.hypot(*gradient), abs=1e-6)
    assert metrics.loss == pytest.approx(-await objective(skill, samples, weights))
    assert metrics.tokens == sum(sum(s.mask) for s in samples)


async def test_an_update_needs_advantages_and_anchors_and_knows_its_arguments() -> None:
    samples = await sampled(1)
    with pytest.raises(ValueError, match="advantages"):
        await FakePolicy().update(samples, {"kind": "ppo"}, 1e-6)
    for loss in ({}, {"kind": "ppo", "clip": 0.2}):
        with pytest.raises(ConfigError):
            await FakePolicy().update(samples, loss, 1e-6)


async def test_weights_go_to_disk_and_back(tmp_path: Path) -> None:
    policy = FakePolicy(FakeSkill(0.25, -1.5))
    saved = await policy.save(str(tmp_path / "a" / "policy"))
    assert (tmp_path / "a" / "policy" / "config.json").is_file()
    other = FakePolicy()
    assert await other.checksum() != saved
    assert await other.load(str(tmp_path / "a" / "policy")) == saved == await other.checksum()
    assert other.skill == policy.skill
    assert await other.load(BASE) == await FakePolicy().checksum()
    with pytest.raises(CheckpointError):
        await other.load(str(tmp_path / "none"))


# --- critic --------------------------------------------------------------------------------------------------------


async def test_values_move_to_the_mean_return_of_each_situation(tmp_path: Path) -> None:
    samples = await sampled(12)
    critic = FakeCritic()
    assert critic.fresh_optimizer
    old = await critic.values(samples)
    assert old == [[0.0] * len(s.ids) for s in samples]
    batch = [replace(s, returns=tuple(float(m) for m in s.mask), old_values=tuple(v)) for s, v in zip(samples, old, strict=True)]
    first = await critic.update(batch, 0.5 / fakes.CRITIC_SCALE, 0.0)
    assert first.loss == pytest.approx(0.5)
    assert not critic.fresh_optimizer
    for row, sample in zip(await critic.values(samples), samples, strict=True):
        assert row == [0.5 * m for m in sample.mask]
    clipped = FakeCritic()
    await clipped.update(batch, 1.0 / fakes.CRITIC_SCALE, 0.2)
    assert list(clipped.table.values()) == pytest.approx([0.2] * len(clipped.table))


async def test_a_success_is_worth_more_once_it_is_in_sight() -> None:
    """So that explained variance can become positive, which no constant does."""
    made = fakes.dry_parts()
    specs = task_group(TASK, 24, label="t", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)
    results = [await made.rollouts.run_one(spec) for spec in specs]
    critic, batch = FakeCritic(), []
    for result in results:
        (sample,) = samples_of(result, 1.0)  # pyright: ignore[reportArgumentType]  # none is dropped
        won = float(result.verdict.strict)  # pyright: ignore[reportAttributeAccessIssue]
        batch.append(replace(sample, returns=tuple(won * m for m in sample.mask)))
    await critic.update(batch, 1.0 / fakes.CRITIC_SCALE, 0.0)
    assert 0.0 < critic.table[""] < critic.table["solve"] == 1.0
    assert critic.table["half"] == 0.0


async def test_a_refitted_critic_has_all_its_values_on_the_new_scale() -> None:
    """Those of situations that it has not seen, too."""
    critic, samples = FakeCritic(), await sampled(4)
    batch = [replace(s, returns=tuple(float(m) for m in s.mask)) for s in samples]
    await critic.update(batch[:1], 1.0 / fakes.CRITIC_SCALE, 0.0)
    before = await critic.values(samples)
    await critic.refit(0.5, 0.25)
    assert critic.fresh_optimizer
    for row, old, sample in zip(await critic.values(samples), before, samples, strict=True):
        assert row == [(0.5 * v + 0.25) * m for v, m in zip(old, sample.mask, strict=True)]
    other = FakeCritic()
    await other.pull(await critic.publish())
    assert await other.values(samples) == await critic.values(samples)


async def test_a_critic_travels_as_weights_with_a_fresh_optimizer(tmp_path: Path) -> None:
    critic, samples = FakeCritic(), await sampled(4)
    batch = [replace(s, returns=tuple(float(m) for m in s.mask)) for s in samples]
    await critic.update(batch, 1.0 / fakes.CRITIC_SCALE, 0.0)
    other = FakeCritic()
    await other.update(batch, 0.1 / fakes.CRITIC_SCALE, 0.0)
    await other.pull(await critic.publish())
    assert other.fresh_optimizer
    assert await other.checksum() == await critic.checksum()
    saved = await critic.save(str(tmp_path / "critic"))
    third = FakeCritic()
    assert await third.load(str(tmp_path / "critic")) == saved
    assert (third.table, third.fresh_optimizer) == (critic.table, True)
    await FakePolicy().save(str(tmp_path / "policy"))
    for fresh in (str(tmp_path / "policy"), BASE):
        await third.load(fresh)
        assert third.table == {}
    with pytest.raises(CheckpointError):
        await third.load(str(tmp_path / "none"))


# --- the bundle ----------------------------------------------------------------------------------------------------


async def test_the_parts_fit_together() -> None:
    made = fakes.dry_parts(3)
    every = [*made.tasks.train, *made.tasks.validation, *made.tasks.heldout]
    assert len({t.id for t in every}) == len({t.instruction for t in every}) == len(every) == len(made.checks)
    assert {t.level for t in made.tasks.validation} == {1, 2}
    scale = FamilyScale.fit(made.checks[t.id] for t in made.tasks.train)
    assert scale.progress(made.checks[every[0].id], ("half_done",)) == 0.5
    spec = task_group(every[0], 1, label="t", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)[0]
    sandbox = await made.pool.lease(every[0])
    rollout = await Episode(spec, made.generator, sandbox, made.chat).run()
    assert rollout.chunks[0].ids[: len(first_prompt(spec, made.chat))] == tuple(first_prompt(spec, made.chat))
    assert [t.command in (*ACTIONS, None) for t in rollout.turns] == [True, True]
    assert await made.policy.load(made.model) == await FakePolicy().checksum()
