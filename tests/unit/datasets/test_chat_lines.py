"""Rows to chat messages and back: the same tokens where they were sampled, other programs' files, every way a line is malformed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi import fakes
from termrsi.datasets import DataSet, Kind, Lineage, Row, chat_lines, write
from termrsi.errors import ConfigError
from termrsi.harness.group import RECOVERY_PROMPT, task_group
from termrsi.harness.render import ChatFormat
from termrsi.records import Limits, Message, Sample, SamplingParams, ScoredRollout
from tests.families import FAMILIES, SAID, llama, qwen

LINEAGE = Lineage(Kind.rsr, "run", "terminal_rsi", "rsr_1", "react", 2, 7, "abc", "parent/0")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat(FAMILIES[request.param]())


def row(sample: Sample) -> Row:
    return Row(replace(sample, rollout_id="r/1", group_id="t"), "files", 0.5, False, LINEAGE)


def back(chat: ChatFormat, one: Row) -> tuple[Row, dict]:
    line = chat_lines.to_line(chat, one)
    assert "\n" not in line
    return chat_lines.from_line(chat, line), json.loads(line)


def sampled(chat: ChatFormat, replies: Sequence[list[int]], told: str = "[exit 0]\n<|im_end|>") -> Sample:
    """Sampled ids, whatever they are, between a prompt and bridges, as a transcript has them."""
    ids = chat.prompt([Message("system", "work"), Message("user", "go")])
    mask, turns = [0] * len(ids), [0] * len(ids)
    for turn, reply in enumerate(replies):
        glue = chat.bridge([Message("user", told)], ended=ids[-1] == chat.end_of_turn) if turn else []
        ids += [*glue, *reply]
        mask += [*(0 for _ in glue), *(1 for _ in reply)]
        turns += [*(turn - 1 for _ in glue), *(turn for _ in reply)]
    return Sample(tuple(ids), tuple(mask), tuple(turns))


def test_replies_as_text_gives_them_need_no_tokens(family: ChatFormat) -> None:
    first = family.prompt([Message("user", "go")])
    replies = [[*family.answer(first, text)[1], family.end_of_turn] for text in SAID]
    one = row(sampled(family, replies))
    again, line = back(family, one)
    assert again == one
    assert "tokens" not in line["termrsi"]
    assert [m["content"] for m in line["messages"] if m["role"] == "assistant"] == SAID
    assert not any("weight" in m for m in line["messages"])
    assert {k: v for k, v in line["termrsi"].items() if k in ("kind", "runbook", "parent", "reward", "task")} == {
        "kind": "rsr", "runbook": 2, "parent": "parent/0", "reward": 0.5, "task": "t",
    }  # fmt: skip


def test_replies_that_text_would_give_otherwise_keep_their_tokens(family: ChatFormat) -> None:
    """Sampled in pieces, cut off, half a character, a special token in the middle: each comes back, as do log-probabilities."""
    known = family.tokenizer.get_vocab()
    lone = next(known[name] for name in ("Ã", "<0xC3>") if name in known)
    letters = [i for c in "naive" for i in family.tokenizer.encode(c, add_special_tokens=False)]
    for reply in ([*letters, family.end_of_turn], letters, [lone, *letters], [family.tokenizer.bos_token_id or 0, *letters]):
        sample = sampled(family, [reply, [*letters, family.end_of_turn], reply])
        logp = tuple(-0.25 * one for one in sample.mask)
        for one in (row(sample), row(replace(sample, sampler_logp=logp, temperature=0.6))):
            assert back(family, one)[0] == one


def test_an_edited_line_is_encoded_anew() -> None:
    chat = ChatFormat(qwen())
    letters = [i for c in "naive" for i in chat.encode(c)]
    _, line = back(chat, row(sampled(chat, [[*letters, chat.end_of_turn]])))
    assert chat_lines.from_line(chat, json.dumps(line)).sample.ids[-len(letters) - 1 : -1] == tuple(letters)
    line["messages"][-1]["content"] = "naive!"
    edited = chat_lines.from_line(chat, json.dumps(line)).sample
    said = [*chat.encode("naive!"), chat.end_of_turn]
    assert list(edited.ids[-len(said) :]) == said
    assert edited.mask == (*(0,) * (len(edited.ids) - len(said)), *(1,) * len(said))
    elsewhere = ChatFormat(llama())
    assert elsewhere.messages_of(chat_lines.from_line(elsewhere, json.dumps(line)).sample.ids)[-1].content == "naive!"


def test_a_history_that_is_not_trained_has_a_weight(family: ChatFormat) -> None:
    """As a recovery: the failed turns are context, and the recovery's first call is turn 0."""
    failed = sampled(family, [[*family.answer([], "rm")[1], family.end_of_turn]] * 2)
    glue = family.bridge([Message("user", RECOVERY_PROMPT.format(instruction="go"))], ended=True)
    reply = [*family.answer([], "ls")[1], family.end_of_turn]
    context = len(failed.ids) + len(glue)
    ids = (*failed.ids, *glue, *reply)
    one = row(Sample(ids, (*(0,) * context, *(1,) * len(reply)), (0,) * len(ids)))
    again, line = back(family, one)
    assert again == one
    assert [m.get("weight") for m in line["messages"] if m["role"] == "assistant"] == [0, 0, None]
    assert "tokens" not in line["termrsi"]


async def test_rollouts_of_the_fakes_come_back(tmp_path: Path) -> None:
    made = fakes.dry_parts()
    specs = [
        spec
        for harness in ("react", "vanillux")
        for task in made.tasks.train
        for spec in task_group(task, 2, label=harness, harness=harness, sampling=SamplingParams(), limits=Limits(), seed=0)
    ]
    rows: list[Row] = []
    async for scored in made.rollouts.run(specs):
        assert isinstance(scored, ScoredRollout)
        for chunk in scored.rollout.chunks:
            places = iter(chunk.logprobs)
            logp = tuple(next(places) if one else 0.0 for one in chunk.mask)
            rows += [row(Sample(chunk.ids, chunk.mask, chunk.turn_ids, sampler_logp=known)) for known in (logp, ())]
    write(tmp_path / "d.parquet", rows)
    with DataSet(tmp_path / "d.parquet") as data:
        again = [back(made.chat, one) for one in data]
    assert [one for one, _ in again] == rows
    assert sum("tokens" not in line["termrsi"] for _, line in again) > len(rows) / 4
    assert len(rows) >= 2 * len(specs)


def test_other_programs_files() -> None:
    chat = ChatFormat(qwen())
    messages = [
        {"role": "system", "content": "work", "name": "x"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ls", "weight": 0},
        {"role": "tool", "content": "a\n", "tool_call_id": "1"},
        {"role": "assistant", "content": "cat a", "tool_calls": []},
        {"role": "user", "content": "thanks"},
    ]
    one = chat_lines.from_line(chat, json.dumps({"messages": messages, "id": 3}))
    sample = one.sample
    assert (one.lineage, one.reward, one.strict) == (Lineage(), None, None)
    assert chat.tokenizer.decode(sample.ids) == (
        "<|im_start|>system\nwork<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nls<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\na\n\n</tool_response><|im_end|>\n<|im_start|>assistant\ncat a<|im_end|>\n"
        "<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    )
    trained = [token for token, mask in zip(sample.ids, sample.mask, strict=True) if mask]
    assert trained == [*chat.encode("cat a"), chat.end_of_turn]
    tools = [{"type": "function", "function": {"name": "bash"}}]
    shown = chat_lines.from_line(chat, json.dumps({"messages": messages, "tools": tools})).sample
    assert '"name": "bash"' in chat.tokenizer.decode(shown.ids)


GOOD = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ls"}]
TOKENS = {"ids": [1, 2], "mask": [0, 1], "turn_ids": [0, 0]}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is no JSON"),
        ("NaN", "NaN is no number"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", 'has no list "messages"'),
        ('{"messages": {}}', 'has no list "messages"'),
        ({"messages": [1]}, "messages[0]: is no object"),
        ({"messages": [{"role": "human", "content": "a"}]}, "messages[0]: role is 'human'; valid: system, user, assistant, tool"),
        ({"messages": [GOOD[0], {"role": "assistant", "content": None}]}, "messages[1]: content is no string"),
        ({"messages": [GOOD[0], {"role": "assistant", "content": "\ud800"}]}, "messages[1]: content is no string of whole char"),
        ({"messages": [GOOD[0], {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[1]: tool_calls are not text"),
        ({"messages": [GOOD[0], {**GOOD[1], "weight": 2}]}, "messages[1]: weight is 2; valid: 0 or 1"),
        ({"messages": [GOOD[0], {**GOOD[1], "weight": True}]}, "messages[1]: weight is True"),
        ({"messages": []}, "no assistant message to train on"),
        ({"messages": GOOD[:1]}, "no assistant message to train on"),
        ({"messages": [GOOD[0], {**GOOD[1], "weight": 0}]}, "no assistant message to train on"),
        ({"messages": GOOD[1:]}, "the conversation begins with the assistant"),
        ({"messages": [GOOD[0], *GOOD]}, "the tokenizer's chat template refuses it: No such role here"),
        ({"messages": GOOD, "tools": [{}]}, "has tools, which this tokenizer's template does not show"),
        ({"messages": GOOD, "tools": {"a": 1}}, '"tools" is no list of objects'),
        ({"messages": GOOD, "termrsi": []}, '"termrsi": is no object'),
        ({"messages": GOOD, "termrsi": {"kinds": "rsr"}}, "\"termrsi\": unknown key 'kinds'; valid: rollout_id, task"),
        ({"messages": GOOD, "termrsi": {"kind": "rsi"}}, "kind is 'rsi'; valid: rsr, recovery, source, imported"),
        ({"messages": GOOD, "termrsi": {"seed": "1"}}, '"termrsi": seed is "1"; must be of type int'),
        ({"messages": GOOD, "termrsi": {"seed": 1 << 63}}, "must be of type int"),
        ({"messages": GOOD, "termrsi": {"strict": 1}}, "must be of type bool"),
        ({"messages": GOOD, "termrsi": {"tokens": {"ids": [1.5], "mask": [0], "turn_ids": [0]}}}, '"tokens": ids must be'),
        ({"messages": GOOD, "termrsi": {"tokens": TOKENS | {"mask": [0, 2]}}}, "the mask of 0 and 1"),
        ({"messages": GOOD, "termrsi": {"tokens": TOKENS | {"turn_ids": [0]}}}, "turn_ids must be 2 numbers"),
        ({"messages": GOOD, "termrsi": {"tokens": {"ids": [1]}}}, "must be of one length"),
    ],
)
def test_malformed_lines_say_why(line: str | dict, why: str) -> None:
    chat = ChatFormat(FAMILIES["gemma"]())
    with pytest.raises(ConfigError) as caught:
        chat_lines.from_line(chat, line if isinstance(line, str) else json.dumps(line))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokens_of_another_tokenizer_are_not_taken() -> None:
    chat = ChatFormat(qwen())
    for ids in ([1, 2], [1 << 40, 2], [-1, 2]):
        line = {"messages": GOOD, "termrsi": {"tokens": TOKENS | {"ids": ids}}}
        assert (
            chat_lines.from_line(chat, json.dumps(line)).sample == chat_lines.from_line(chat, json.dumps({"messages": GOOD})).sample
        )
