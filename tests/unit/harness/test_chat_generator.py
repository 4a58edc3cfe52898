"""A model that speaks text plays real episodes: what it read, what became of its words, and that only SFT learns from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from termrsi import fakes
from termrsi.errors import EngineError, StageError, TaskError, WeightsError
from termrsi.fakes import FakeGenerator, FakePolicy, FakePool, FakeSkill, FakeTokenizer, FakeVerifier
from termrsi.harness.actions import without_thinking
from termrsi.harness.chat_generator import ChatGenerator
from termrsi.harness.group import task_group
from termrsi.harness.render import ChatFormat
from termrsi.harness.runner import Runner
from termrsi.records import (
    Completion,
    DroppedRollout,
    EpisodeSpec,
    Limits,
    Message,
    RecoveryPoint,
    SamplingParams,
    ScoredRollout,
    WeightsVersion,
    Writing,
)
from termrsi.stages import credit
from termrsi.stages.rsr.collect import collect
from tests.families import FAMILIES, QWEN, SAID, qwen

CHAT = ChatFormat(FakeTokenizer())
TASK = fakes.dry_tasks().train[0]
SOLVE = ("```bash\nsolve\n```", "DONE")


@dataclass
class Scripted:
    """`ports.Writer`: replies in turn, 0.25 each."""

    replies: Sequence[str]
    cut: bool = False
    read: list[list[Message]] = field(default_factory=list)

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        self.read.append(list(messages))
        if len(self.read) > len(self.replies):
            raise EngineError("spent", "scripted")
        return Writing(self.replies[len(self.read) - 1], 100, 5, 0.25, "other-1", self.cut)


def spec(model: str = "solver", **limits: int) -> EpisodeSpec:
    made = task_group(TASK, 1, label="x", harness="react", sampling=SamplingParams(), limits=Limits(**limits), seed=0, model=model)
    return made[0]


async def played(writer: Scripted, one: EpisodeSpec) -> ScoredRollout | DroppedRollout:
    runner = Runner(FakePool(), FakeVerifier(), FakeGenerator(), CHAT, players={"solver": ChatGenerator(writer, CHAT)})
    return await runner.run_one(one)


async def replied(chat: ChatFormat, text: str, *, max_tokens: int = 256, cut: bool = False) -> tuple[list[int], Completion]:
    prompt = chat.prompt([Message("user", "Do it.")])
    return prompt, await ChatGenerator(Scripted([text], cut), chat).generate(prompt, SamplingParams(max_tokens=max_tokens))


# --- an episode ----------------------------------------------------------------------------------------------------


async def test_it_plays_an_episode_in_the_policys_stead() -> None:
    writer = Scripted(SOLVE)
    result = await played(writer, spec())
    assert isinstance(result, ScoredRollout)
    assert result.verdict.strict
    rollout = result.rollout
    assert (rollout.model, rollout.cost, [t.command for t in rollout.turns]) == ("other-1", 0.5, ["solve", None])
    (chunk,) = rollout.chunks
    assert chunk.logprobs == (), "nobody knows them"
    trained = [token for token, mask in zip(chunk.ids, chunk.mask, strict=True) if mask]
    assert CHAT.tokenizer.decode(trained) == "```bash\nsolve\n```<|im_end|>DONE<|im_end|>"
    first, second = writer.read
    assert first[-1].role == "user"
    assert TASK.instruction in first[-1].content
    assert second == [*first, Message("assistant", SOLVE[0]), Message("user", rollout.turns[0].observation)]


async def test_the_policy_plays_what_names_no_role() -> None:
    writer = Scripted(SOLVE)
    result = await played(writer, spec(""))
    assert isinstance(result, ScoredRollout)
    assert (result.rollout.model, result.rollout.cost, writer.read) == ("", 0.0, [])
    assert result.rollout.chunks[0].logprobs


async def test_such_a_rollout_is_for_cross_entropy_alone() -> None:
    result = await played(Scripted(SOLVE), spec())
    assert isinstance(result, ScoredRollout)
    with pytest.raises(StageError, match=r"other-1 told no log-probabilities.*valid: sft"):
        credit.samples_of(result, 1.0)
    ((_, sample),), counts = collect(CHAT, TASK, [("react", result)], 8)
    assert (counts["kept"], sample.sampler_logp) == (1, ())
    policy = FakePolicy(FakeSkill())
    before = policy.skill.solve
    assert (await policy.fit([sample], 1e-5)).tokens == sum(sample.mask)
    assert policy.skill.solve > before


async def test_a_model_that_cannot_be_had_ends_the_run() -> None:
    with pytest.raises(EngineError, match="spent"):
        await played(Scripted(SOLVE[:1]), spec())


async def test_a_conversation_that_cannot_be_read_back_drops_its_episode() -> None:
    with pytest.raises(TaskError, match="cannot be read back"):
        await ChatGenerator(Scripted(SOLVE), CHAT).generate(CHAT.encode("no template wrote this"), SamplingParams())
    pool = FakePool()
    snapshot = await (await pool.lease(TASK)).snapshot()
    point = RecoveryPoint("p", TASK, snapshot, tuple(CHAT.encode("no template wrote this")), 1)
    players = {"solver": ChatGenerator(Scripted(SOLVE), CHAT)}
    again = replace(spec(), recovery=point, recovery_prompt="Again.")
    result = await Runner(pool, FakeVerifier(), FakeGenerator(), CHAT, players=players).run_one(again)
    assert isinstance(result, DroppedRollout)
    assert (result.attempts, "cannot be read back" in result.reason) == (1, True)


async def test_its_weights_are_not_ours() -> None:
    with pytest.raises(WeightsError):
        await ChatGenerator(Scripted(()), CHAT).pull(WeightsVersion("w", 1, "c"))


# --- a reply -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_its_words_stand_where_the_template_has_a_reply(family: str) -> None:
    chat = ChatFormat(FAMILIES[family]())
    for text in SAID:
        prompt, completion = await replied(chat, text)
        assert completion.ids[-1] == chat.end_of_turn
        assert chat.messages_of([*prompt, *completion.ids])[1:] == [Message("assistant", text)]


async def test_special_tokens_in_it_are_only_text() -> None:
    chat = ChatFormat(qwen())
    _, completion = await replied(chat, "a<|im_end|>b")
    assert completion.ids.count(chat.end_of_turn) == 1


async def test_a_cut_reply_has_no_end_of_turn_in_whosever_tokens_it_was_cut() -> None:
    _, whole = await replied(CHAT, "one two three")
    assert (whole.finish, len(whole.ids)) == ("stop", 4)
    _, theirs = await replied(CHAT, "one two three", cut=True)
    assert (theirs.finish, theirs.ids) == ("length", whole.ids[:3])
    _, ours = await replied(CHAT, "one two three", max_tokens=2)
    assert (ours.finish, ours.ids) == ("length", whole.ids[:2])
    _, exact = await replied(CHAT, "one two three", max_tokens=4)
    assert exact == whole


async def test_an_empty_reply_is_the_agents() -> None:
    _, completion = await replied(CHAT, "")
    assert completion.ids == (CHAT.end_of_turn,)


@pytest.mark.parametrize("text", ["ls", "<think>\nHm.\n</think>\n\nls", "Hm.\n</think>\n\nls"])
async def test_reasoning_that_the_template_opens_is_closed(text: str) -> None:
    tokenizer = qwen()
    tokenizer.chat_template = QWEN.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
    chat = ChatFormat(tokenizer)
    _, completion = await replied(chat, text)
    reply = chat.reply(chat.decode(completion.ids))
    assert reply.count("<think>") == reply.count("</think>") == 1
    assert without_thinking(reply).strip() == "ls"
    assert ("Hm." in reply) == ("Hm." in text)
