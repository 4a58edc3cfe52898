"""Harnesses as data: who is shown what, and how much of an output the agent sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.errors import ConfigError
from termrsi.harness import variants
from termrsi.harness.parse import parse
from termrsi.harness.render import ChatFormat


def test_the_harnesses() -> None:
    assert variants.names() == ("react", "fewshot", "guided", "retry")
    assert [n for n in variants.names() if not variants.get(n).assisting] == ["react"]
    assert {n: variants.get(n).checks_on_done for n in variants.names() if variants.get(n).checks_on_done} == {"retry": 2}
    assert variants.get("retry").failed_check
    with pytest.raises(ConfigError, match="valid: react, fewshot, guided, retry"):
        variants.get("raect")


def test_the_examples_of_guided_look_like_its_own_task() -> None:
    """Runbook, blank line, task: as `messages` puts a runbook before the task that is to be solved."""
    guided = variants.get("guided")
    *examples, last = [
        m.content for m in guided.messages("Do it.", "Milestones: run `it`") if m.role == "user" and "Task: " in m.content
    ]
    assert last == "Milestones: run `it`\n\nTask: Do it."
    assert len(examples) == len(guided.examples)
    for (shown, command), text in zip(guided.examples, examples, strict=True):
        assert shown == text
        assert command in text.partition("\n\nTask: ")[0]


@pytest.mark.parametrize("name", ["react", "fewshot", "guided", "retry"])
def test_roles_alternate_and_the_task_comes_last(name: str) -> None:
    messages = variants.get(name).messages("Make a file.")
    assert [m.role for m in messages] == ["system", *("user", "assistant") * ((len(messages) - 2) // 2), "user"]
    assert messages[-1].content == "Make a file."


def test_the_trained_harness_shows_no_example() -> None:
    assert len(variants.get("react").messages("x")) == 2


@pytest.mark.parametrize("name", ["fewshot", "retry"])
def test_the_examples_are_replies_that_parse(name: str) -> None:
    """A worked example that the parser refuses would teach a format error."""
    replies = [m.content for m in variants.get(name).messages("x") if m.role == "assistant"]
    actions = [parse(r) for r in replies]
    assert [a.command for a in actions[::2]] == [command for _, command in variants.get(name).examples]
    assert all(a.done for a in actions[1::2])


@pytest.mark.parametrize("name", ["react", "fewshot", "retry"])
def test_guidance_stands_beside_the_task_and_can_be_stripped(name: str, chat: ChatFormat) -> None:
    plain, guided = variants.get(name).messages("Make a file."), variants.get(name).messages("Make a file.", "1. touch")
    assert guided[:-1] == plain[:-1]
    assert guided[-1].content == "1. touch\n\nTask: Make a file."
    assert "1. touch" not in chat.decode(chat.prompt(plain))


def test_short_output_is_shown_whole() -> None:
    assert variants.observation("a\nb\n", 0) == "[exit 0]\na\nb"
    assert variants.observation("", 1) == "[exit 1]"
    assert variants.observation("\n\n", 0) == "[exit 0]"
    assert variants.observation("part", 124, timed_out=True) == "[timed out]\npart"


def test_the_middle_of_long_output_is_cut_out() -> None:
    text = "h" * 60 + "m" * 500 + "t" * 60
    seen = variants.observation(text, 0, limit_chars=100)
    assert seen == f"[exit 0]\n{'h' * 50}\n[... 520 characters left out ...]\n{'t' * 50}"
    assert variants.observation("x" * 100, 0, limit_chars=100) == f"[exit 0]\n{'x' * 100}"


@given(st.text(), st.integers(2, 40))
def test_what_is_seen_is_bounded_and_counts_what_is_not(output: str, limit_chars: int) -> None:
    seen = variants.observation(output, 0, limit_chars=limit_chars)
    text = output.rstrip("\n")
    assert len(seen) <= len("[exit 0]\n") + limit_chars + len("\n[... 000 characters left out ...]\n") + len(str(len(text)))
    if len(text) > limit_chars:
        assert f"[... {len(text) - 2 * (limit_chars // 2)} characters left out ...]" in seen
