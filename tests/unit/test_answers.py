"""How a model's one JSON object is found, how it is asked for again, and what becomes of a request that is refused."""

from collections.abc import Sequence

import pytest
from pydantic import BaseModel, ConfigDict

from termrsi import answers
from termrsi.answers import Invalid
from termrsi.errors import EngineError, RequestRefused
from termrsi.records import Message, SamplingParams, Writing
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
    assert answers.one_object(text) == {"a": 1}


def test_a_tag_inside_the_object_is_text() -> None:
    assert answers.one_object('{"a": "x</think>{y}"}') == {"a": "x</think>{y}"}


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
        answers.one_object(text)
    assert caught.value.category == category


class _Pair(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    a: list[int]


def test_the_field_at_fault_is_named() -> None:
    assert answers.formed(_Pair, {"a": [1]}).a == [1]
    for value, where in (({"a": [True]}, "x.a.0"), ({"a": ["1"]}, "x.a.0"), ({"a": [], "b": 1}, "x.b"), ([], "x")):
        with pytest.raises(Invalid) as caught:
            answers.formed(_Pair, value, "x")
        assert (caught.value.category, caught.value.where) == ("bad_form", where)


def _read(text: str) -> int:
    if not text.isdigit():
        raise Invalid("no_number", "all of it")
    return int(text)


async def test_an_answer_at_fault_is_asked_for_again_and_its_category_told() -> None:
    writer, first = Scripted(["one", "two", "3"]), [Message("user", "how many?")]
    asked = await answers.ask(writer, first, SamplingParams(seed=5), _read, rounds=2)
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
    asked = await answers.ask(Scripted(["x"] * 9), [], SamplingParams(), _read, rounds=1)
    assert (asked.answer, len(asked.faults)) == (None, 2)
    assert (await answers.ask(Scripted(["x"]), [], SamplingParams(), _read, rounds=0)).faults == ("no_number",)


async def test_an_answer_that_a_limit_cut_is_told_so() -> None:
    writer = Scripted(["x", "1"], cut=frozenset({0}))
    asked = await answers.ask(writer, [], SamplingParams(), _read, rounds=1)
    assert (asked.answer, asked.faults) == (1, ("cut",))
    assert "it was too long" in writer.asked[1][-1].content


class Refusing(Scripted):
    """Raises at the second request."""

    error: EngineError = RequestRefused("400 too long", "http://h")

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        if len(self.asked) == 1:
            raise self.error
        return await super().write(messages, sampling, key, begun)


async def test_a_refused_request_is_an_outcome_and_a_dead_model_is_an_error() -> None:
    asked = await answers.ask(Refusing(["x"] * 9), [], SamplingParams(), _read, rounds=5)
    assert (asked.answer, asked.faults, asked.cost) == (None, ("no_number", "refused"), 0.5)
    dead = Refusing(["x"] * 9)
    dead.error = EngineError("dead")
    with pytest.raises(EngineError, match="dead"):
        await answers.ask(dead, [], SamplingParams(), _read, rounds=5)
