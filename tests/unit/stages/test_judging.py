"""What a judge is shown, how its one JSON object is found, and how it is asked again."""

import json

import pytest
from pydantic import BaseModel, ConfigDict

from termrsi import fakes
from termrsi.records import Message, SamplingParams, Turn
from termrsi.stages import judging
from termrsi.stages.judging import Invalid
from termrsi.stages.roles import PolicyWriter
from tests.scripted import Scripted


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        'Here it is:\n```json\n{"a": 1}\n```\nThat is all.',
        'A set {x} is no JSON, this is: {"a": 1}',
        '<think>perhaps {"a": 2}</think>{"a": 1}',
        'perhaps {"a": 2}, no</think>\n{"a": 1}',
    ],
)
def test_the_one_object_is_found_in_a_fence_or_not(text: str) -> None:
    assert judging.one_object(text) == {"a": 1}


def test_a_tag_inside_the_object_is_text() -> None:
    assert judging.one_object('{"a": "x</think>{y}"}') == {"a": "x</think>{y}"}


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("nothing", "no_object"),
        ("", "no_object"),
        ("[1, 2]", "no_object"),
        ('{"a": 1} {"a": 1}', "several_objects"),
        ('```json\n{"a": 1}\n```\n```json\n{"a": 2}\n```', "several_objects"),
        ('{"a": {"b": 1}, "c": {"d": 2}, "e', "no_object"),  # broke off: the parts are not the answer
        ('{"a": 1, "a": 2}', "key_twice"),
        ('{"a": NaN}', "no_object"),
        ('{"a": ' * 100_000, "no_object"),
        ('{"a": 1' + "0" * 5000 + "}", "no_object"),
    ],
)
def test_what_is_not_one_object_is_refused(text: str, category: str) -> None:
    with pytest.raises(Invalid) as caught:
        judging.one_object(text)
    assert caught.value.category == category


class _Pair(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    a: list[int]


def test_the_field_at_fault_is_named() -> None:
    assert judging.formed(_Pair, {"a": [1]}).a == [1]
    for value, where in (({"a": [True]}, "x.a.0"), ({"a": ["1"]}, "x.a.0"), ({"a": [], "b": 1}, "x.b"), ([], "x")):
        with pytest.raises(Invalid) as caught:
            judging.formed(_Pair, value, "x")
        assert (caught.value.category, caught.value.where) == ("bad_form", where)


def _read(text: str) -> int:
    if not text.isdigit():
        raise Invalid("no_number", "all of it")
    return int(text)


async def test_an_answer_at_fault_is_asked_for_again_and_its_category_told() -> None:
    writer, first = Scripted(["one", "two", "3"]), [Message("user", "how many?")]
    asked = await judging.ask(writer, first, SamplingParams(seed=5), _read, rounds=2)
    assert (asked.answer, asked.faults) == (3, ("no_number", "no_number"))
    assert (asked.prompt_tokens, asked.completion_tokens, asked.cost) == (30, 9, 1.5)
    assert writer.asked[0] == first
    assert [m.content for m in writer.asked[2]] == [
        "how many?",
        "two",
        "Your last answer was refused (no_number in all of it). Answer again, with one JSON object as asked for.",
    ], "of earlier answers the last alone"
    assert writer.seeds == [5, 6, 7]


async def test_the_rounds_are_bounded() -> None:
    asked = await judging.ask(Scripted(["x"] * 9), [], SamplingParams(), _read, rounds=1)
    assert (asked.answer, len(asked.faults)) == (None, 2)
    assert (await judging.ask(Scripted(["x"]), [], SamplingParams(), _read, rounds=0)).faults == ("no_number",)


async def test_an_answer_that_a_limit_cut_is_told_so() -> None:
    writer = Scripted(["x", "1"], cut=frozenset({0}))
    asked = await judging.ask(writer, [], SamplingParams(), _read, rounds=1)
    assert (asked.answer, asked.faults) == (1, ("cut",))
    assert "it was too long" in writer.asked[1][-1].content


def test_turns_are_numbered_and_texts_keep_both_ends() -> None:
    turns = [
        Turn("...", "ls -l", "a" * 60 + "b" * 60, 0),
        Turn("...", "sleep 99", "", 124, timed_out=True),
        Turn("what?", None, "one command, please", format_error="no_action"),
        Turn("DONE", None, ""),
    ]
    assert judging.numbered(turns, chars=100) == "\n".join(
        [
            "Turn 1 (exit 0)",
            "  $ ls -l",
            f"  | {'a' * 50}",
            "  | [... 20 characters left out ...]",
            f"  | {'b' * 50}",
            "Turn 2 (timed out)",
            "  $ sleep 99",
            "Turn 3 (nothing executed: no_action)",
            "  said: what?",
            "  | one command, please",
            "Turn 4 (no command)",
            "  said: DONE",
        ]
    )


def test_no_output_can_pass_for_a_turn() -> None:
    text = judging.numbered([Turn("", "cat\nTurn 8 (exit 0)", "x\rTurn 9 (exit 0)\u2028Turn 9 (exit 0)", 0)], chars=100)
    assert [line for line in text.splitlines() if line.startswith("Turn")] == ["Turn 1 (exit 0)"]


def test_long_texts_are_halved_until_they_fit() -> None:
    turns = [Turn("", "cat f", "x" * 1000, 0)]
    assert judging.fitted(turns, chars=1000, fits=lambda text: True) == judging.numbered(turns, chars=1000)
    assert judging.fitted(turns, chars=1000, fits=lambda text: len(text) < 400) == judging.numbered(turns, chars=250)
    least = judging.numbered(turns, chars=judging.LEAST_CHARS)
    assert judging.fitted(turns, chars=1000, fits=lambda text: text == least) == least
    assert judging.fitted(turns, chars=1000, fits=lambda text: False) is None


async def test_the_policy_writes_what_follows() -> None:
    made = fakes.dry_parts()
    writer = PolicyWriter(made.generator, made.chat)
    messages = [Message("system", "Is there a hidden test?"), Message("user", "?")]
    writing = await writer.write(messages, SamplingParams(max_tokens=9), begun="It is ")
    assert (writing.text, writing.completion_tokens, writing.cut) == ("no", 2, False)
    assert writing.prompt_tokens == len(made.chat.prompt(messages)) + len(made.chat.encode("It is "))
    assert (await writer.write(messages, SamplingParams(max_tokens=1))).cut


def test_what_the_fakes_answer_is_json() -> None:
    assert json.loads(fakes.FakeGenerator()._judgement("- repeated_failure: x\n"))["repeated_failure"]["answer"] == "no"
