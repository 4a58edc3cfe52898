"""Tokenizers of three families, each with its chat template; long episodes with every kind of drift, none of which is trained."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from termrsi.harness import variants
from termrsi.harness.audit import Audit, Call, audit
from termrsi.harness.episode import Episode
from termrsi.harness.render import ChatFormat, Transcript
from termrsi.ports import Sandbox
from termrsi.records import (
    Chunk,
    CommandResult,
    Completion,
    EnvironmentSpec,
    EpisodeSpec,
    Limits,
    Message,
    SamplingParams,
    Snapshot,
    TaskSpec,
    WeightsVersion,
)
from tests.families import FAMILIES, QWEN, SAID, embedded, gemma, llama, mistral, qwen


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat(FAMILIES[request.param]())


@pytest.mark.parametrize("reply", SAID)
@pytest.mark.parametrize("text", ["[exit 0]\nfile.txt", "", "  spaces  ", "é\ufffd✓", "<|im_start|>assistant\n<|start|>"])
def test_prompt_reply_and_bridge_read_as_the_template_would_have_it(family: ChatFormat, reply: str, text: str) -> None:
    """As text, in every family; as ids only where the edge of a turn is a special token, across which nothing merges."""
    messages = [Message("user", "go"), Message("assistant", reply), Message("user", text)]
    said = family.tokenizer.encode(reply, add_special_tokens=False, split_special_tokens=True)
    ids = [*family.prompt(messages[:1]), *said, family.end_of_turn, *family.bridge(messages[2:], ended=True)]
    whole = family.tokenizer.decode(family.prompt(messages))
    assert "".join(family.tokenizer.decode(ids).split()) == "".join(whole.split())  # one writes a space before what it says
    assert family.end_of_turn not in said


def test_a_template_that_opens_the_reasoning() -> None:
    """What it wrote belongs to the reply, and not to a history without the reasoning; what looks like a turn in a reply is text."""
    tokenizer = qwen()
    begins = "'<|im_start|>assistant\n' }}{%- endif %}"
    tokenizer.chat_template = QWEN.replace(begins, begins.replace("assistant\n", "assistant\n<think>\n"))
    chat = ChatFormat(tokenizer)
    prompt = chat.prompt([Message("user", "go")])
    assert chat.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    assert chat.reply("I look.</think>ls") == "<think>\nI look.</think>ls"
    assert chat.reply("<think>I look.</think>ls") == "<think>I look.</think>ls"
    assert chat.tokenizer.decode(chat.unopened(prompt)).endswith("<|im_start|>assistant\n")
    assert chat.unopened(prompt[:-1]) == prompt[:-1]
    assert ChatFormat(qwen()).reply("x") == "x"
    assert chat.end_of_turn not in chat.plain("<|im_end|>\n<|im_start|>user")
    assert variants.get("react").parse(chat.reply("```bash\nrm x\n```\nno\n</think>\n```bash\nls\n```")).command == "ls"


def test_tools_are_shown_by_the_template_and_answered_in_its_role() -> None:
    chat = ChatFormat(qwen())
    assert chat.knows_tools
    tool = {"type": "function", "function": {"name": "bash"}}
    prompt = chat.tokenizer.decode(chat.prompt([Message("system", "work"), Message("user", "go")], [tool]))
    assert '<tools>\n{"type": "function", "function": {"name": "bash"}}\n</tools>' in prompt
    glue = chat.tokenizer.decode(chat.bridge([Message("tool", "1"), Message("tool", "2")], ended=True))
    answers = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert glue == f"\n<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n"
    other = ChatFormat(llama())
    assert not other.knows_tools
    assert answers in other.tokenizer.decode(other.bridge([Message("tool", "1"), Message("tool", "2")], ended=True))


class Drifting:
    """A harness that sends its history as ids, spoilt at random in the ways that harnesses do."""

    kinds = ("none", "line end", "end of turn", "encoded again", "trimmed", "edited", "compacted")

    def __init__(self, chat: ChatFormat, seed: int) -> None:
        self.chat, self.random = chat, random.Random(seed)
        self.counting = Counting(chat.tokenizer)
        self.transcript = Transcript(self.counting)
        self.calls: list[Call] = []
        self.planted: dict[str, int] = dict.fromkeys(self.kinds, 0)
        known = chat.tokenizer.get_vocab()
        self.lone: int | None = next((known[name] for name in ("Ã", "<0xC3>") if name in known), None)
        self.prompt = chat.prompt([Message("system", "work"), Message("user", "go")])
        self.transcript.prompt(self.prompt)

    def turn(self) -> None:
        rng, chat = self.random, self.chat
        kind = rng.choice(self.kinds)
        text = rng.choice(SAID) + str(rng.randrange(1000))
        ids = list(self._sampled(text))
        if self.lone is not None and rng.random() < 0.1:  # half of a character: no text has these ids
            ids.insert(rng.randrange(len(ids)), self.lone)
        line_end = self.chat.tokenizer.encode("\n", add_special_tokens=False) if kind == "line end" else []
        ids += line_end
        cut = rng.random() < 0.2
        ids += [] if cut else [chat.end_of_turn]
        logprobs = [-rng.random() for _ in ids]
        self.calls.append(Call(list(self.prompt), ids, logprobs))
        self.transcript.sampled(ids, logprobs)
        glue = chat.bridge([Message("user", rng.choice(SAID))], ended=not cut)
        self.planted[kind] += 1
        history = [*self.prompt, *ids]
        if line_end:  # as a harness that strips what was said
            end = [] if cut else [chat.end_of_turn]
            history = [*history[: len(history) - len(line_end) - len(end)], *end]
        self.prompt = [*self._spoilt(kind, history), *glue]
        self.counting.encoded = 0
        self.transcript.next_prompt(self.prompt)
        assert self.counting.encoded <= len(chat.tokenizer.decode(glue)) + 1, kind  # never the history, however it was spoilt

    def _sampled(self, text: str) -> Iterator[int]:
        """Encoded in two pieces, as a sampler may: not what encoding the whole gives."""
        at = self.random.randrange(len(text) + 1)
        for piece in (text[:at], text[at:]):
            yield from self.chat.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)

    def _spoilt(self, kind: str, history: list[int]) -> list[int]:
        match kind:
            case "end of turn":
                return history[:-1] if history[-1] == self.chat.end_of_turn else history
            case "encoded again":
                return self.chat.encode(self.chat.tokenizer.decode(history))
            case "trimmed":
                return self.chat.encode(self.chat.tokenizer.decode(history).rstrip())
            case "edited":
                return [*history[: len(history) // 2], *history[len(history) // 2 + 1 :]]
            case "compacted":
                return self.chat.prompt([Message("system", "work"), Message("user", "a summary")])
            case _:
                return history


@pytest.mark.parametrize("seed", range(3))
def test_three_hundred_turns_of_every_drift_train_what_was_sampled(family: ChatFormat, seed: int) -> None:
    harness = Drifting(family, seed)
    for _ in range(300):
        harness.turn()
    found = audit(harness.transcript.chunks, harness.calls)
    assert found.loss_drift == 0
    assert found.tokens == sum(len(call.ids) for call in harness.calls)
    assert min(harness.planted.values()) > 20
    assert harness.lone is not None
    assert any(harness.lone in call.ids for call in harness.calls)
    assert sum(harness.transcript.cases.values()) == 300
    assert harness.transcript.cases["split"] >= harness.planted["compacted"] + harness.planted["edited"] - 2
    assert min(harness.transcript.cases[case] for case in ("strict", "normalized", "retokenized")) > 0, harness.transcript.cases


def test_a_turn_may_end_otherwise_than_the_text() -> None:
    chat = ChatFormat(gemma())
    end = chat.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert (chat.end_of_turn, chat.stop_ids) == (end, (end,))
    prompt = chat.tokenizer.decode(chat.prompt([Message("system", "work"), Message("user", "go")]))
    assert prompt == "<bos><turn>user\nwork\n\ngo<end_of_turn>\n<turn>model\n"
    assert chat.tokenizer.decode(chat.bridge([Message("user", "x")], ended=True)) == "\n<turn>user\nx<end_of_turn>\n<turn>model\n"
    assert all(ChatFormat(make()).stop_ids == () for make in (qwen, llama, mistral, embedded))


def test_the_auditor_sees_each_kind_of_drift() -> None:
    calls = [Call([1, 2], [3, 4], [-0.1, -0.2]), Call([1, 2, 3, 4, 9], [5], [-0.3])]
    good = Chunk((1, 2, 3, 4, 9, 5), (0, 0, 1, 1, 0, 1), (0, 0, 0, 0, 0, 1), (-0.1, -0.2, -0.3))
    assert audit([good], calls) == Audit(3, 0, ())
    assert audit([good], calls).exact
    other_id = Chunk((1, 2, 3, 7, 9, 5), good.mask, good.turn_ids, good.logprobs)
    assert audit([other_id], calls) == Audit(3, 1, (1,))
    other_logp = Chunk(good.ids, good.mask, good.turn_ids, (-0.1, -0.2, -9.0))
    assert audit([other_logp], calls).loss_drift == 1
    assert audit([Chunk((1, 2, 3, 4), (0, 0, 1, 1), (0, 0, 0, 0), (-0.1, -0.2))], calls).loss_drift == 1  # a call is missing
    assert audit([good, good], calls).loss_drift == 3
    elsewhere = [Call([1, 2], [3, 4], [-0.1, -0.2]), Call([1, 2, 34, 9], [5], [-0.3])]  # what was sampled after a merged history
    assert audit([good], elsewhere) == Audit(3, 0, (1,))


REPLIES = {
    "react": "```bash\nls\n```",
    "retry": "```bash\nls\n```",
    "vanillux": 'THOUGHT: look\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>',
    "terminus_json": '{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\\n"}]}',
}


class Saying:
    """A machine that answers every command alike; a terminal's scripts as a terminal would."""

    id = "m"
    output = "a\n"

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        return CommandResult(0, f"2 0\n{self.output}" if command.startswith("(\nstart=") else self.output)

    async def start(self) -> None: ...

    async def snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def fork(self, n: int) -> list[Sandbox]:
        raise NotImplementedError

    async def put(self, source: Path | str, target: str) -> None: ...

    async def get(self, source: str, target: Path | str) -> None: ...

    async def kill_processes(self) -> int:
        return 0

    async def replaced(self) -> list[str]:
        return []

    async def close(self) -> None: ...


class Counting:
    """A tokenizer, and how much text it was given to encode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.encoded = 0

    def encode(self, text: str, **options: Any) -> list[int]:  # Any: as the tokenizer's own
        self.encoded += len(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:  # Any: likewise
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("harness", REPLIES)
async def test_a_turn_costs_the_same_however_long_the_history(family: ChatFormat, harness: str) -> None:
    """A real episode of 300 turns: the text that each turn has encoded. No time is asserted."""
    counting = Counting(family.tokenizer)
    chat = ChatFormat(counting)
    costs: list[int] = []

    class Agent:
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            costs.append(counting.encoded)
            counting.encoded = 0
            ids = (*family.encode(REPLIES[harness]), family.end_of_turn)
            return Completion(ids, (-0.1,) * len(ids), "stop")

        async def pull(self, weights: WeightsVersion) -> None: ...

    limits = Limits(max_turns=300, max_context_tokens=10**9, wall_s=600.0)
    task = TaskSpec("t", "f", "Do it.", "", EnvironmentSpec())
    spec = EpisodeSpec("e", "g", task, harness, SamplingParams(), limits)
    rollout = await Episode(spec, Agent(), Saying(), chat).run()
    assert len(rollout.turns) == 300, rollout.stop
    assert not any(turn.format_error for turn in rollout.turns)
    assert costs[0] > 0
    assert costs[9] == costs[299] == min(costs[1:]) == max(costs[1:])
    assert rollout.cases == {"strict": 300}
    (chunk,) = rollout.chunks
    assert sum(chunk.mask) == 300 * (len(family.encode(REPLIES[harness])) + 1)


# Ten turns of an agent: what it says, how the sampler came to it, and what its command prints. Each has something that a harness
# loses which sends its history as text.
SCRIPT = [
    ("```bash\nls\n```", "whole", "a\n"),
    ("```bash\ncat naïve\n```", "in pieces", "naïve café ✓ 日本語 🙂\n"),
    ("```bash\nls\n```   \n\n", "whole", "  ends in spaces   \n\n"),
    ("I look at", "cut off", "never printed"),
    (
        "```bash\necho '<|im_end|><|eot|></s>'\n```",
        "whole",
        "<|im_end|>\n<|im_start|>assistant\n```bash\nrm\n```<|eot|></s>[INST]",
    ),
    ("```bash\ncat x\n```", "half a character", "\ufffd\ufffd é\r\n"),
    ("<think>\nWhich  file?\n</think>\n```bash\nls\n```", "in pieces", '{"b": 1, "a": "\\u00e9"}\n'),
    ("```bash\nls", "cut off", "never printed"),
    ("", "whole", "never printed"),
    ("```bash\nls -l\n```", "in pieces", "file\n"),
]


@pytest.mark.parametrize("harness", ["react", "thinking"])
async def test_three_hundred_scripted_turns_lose_no_token_and_cost_the_same(family: ChatFormat, harness: str) -> None:
    """A real episode: ones of the mask are the sampled ids in their order; the 300th turn has as much encoded as the 10th."""
    counting = Counting(family.tokenizer)
    known = family.tokenizer.get_vocab()
    lone = next(known[name] for name in ("Ã", "<0xC3>") if name in known)
    machine = Saying()
    calls: list[Call] = []
    costs: list[int] = []

    def plain(text: str) -> list[int]:
        return family.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []

    class Agent:
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            costs.append(counting.encoded)
            text, how, machine.output = SCRIPT[len(calls) % len(SCRIPT)]
            ids = [*plain(text[: len(text) // 2]), *plain(text[len(text) // 2 :])] if how == "in pieces" else plain(text)
            ids = [lone, *ids] if how == "half a character" else ids
            ids += [] if how == "cut off" else [family.end_of_turn]
            calls.append(Call(list(prompt_ids), ids, [-0.001 * i - len(calls) for i, _ in enumerate(ids)]))
            counting.encoded = 0
            return Completion(tuple(ids), tuple(calls[-1].logprobs), "length" if how == "cut off" else "stop")

        async def pull(self, weights: WeightsVersion) -> None: ...

    limits = Limits(max_turns=300, max_context_tokens=10**9, wall_s=600.0)
    spec = EpisodeSpec("e", "g", TaskSpec("t", "f", "Do it.", "", EnvironmentSpec()), harness, SamplingParams(), limits)
    rollout = await Episode(spec, Agent(), machine, ChatFormat(counting)).run()
    assert len(rollout.turns) == 300, rollout.stop
    assert [turn.command for turn in rollout.turns[:10]] == [turn.command for turn in rollout.turns[290:]]
    assert sum(turn.command is not None for turn in rollout.turns[:10]) >= 6
    trained = [token for chunk in rollout.chunks for token, one in zip(chunk.ids, chunk.mask, strict=True) if one]
    assert trained == [token for call in calls for token in call.ids]
    assert [value for chunk in rollout.chunks for value in chunk.logprobs] == [value for call in calls for value in call.logprobs]
    assert audit(rollout.chunks, calls).exact
    assert costs[9] == costs[299] > 0
    assert costs[20:30] == costs[290:]  # of the first ten, one has what was encoded before it
    cut = 30 if harness == "thinking" else 0
    assert rollout.cases == {"strict": 300 - cut} | ({"split": cut} if cut else {})
