"""Harnesses as data: who is shown what, and how much of an output the agent sees."""

import pytest

from termrsi.errors import ConfigError
from termrsi.harness import variants
from termrsi.harness.actions import FormatError
from termrsi.harness.parse import parse
from termrsi.harness.render import ChatFormat


def test_the_harnesses() -> None:
    assert {"react", "terminus_json", "terminus_xml", "mini_text", "mini_tool", "openhands", "vanillux", "state"} < set(
        variants.names()
    )
    assert [n for n in variants.names() if variants.get(n).assisting] == ["fewshot", "guided", "retry", "reflect"]
    asking = {n: variants.get(n).checks_on_done for n in variants.names() if variants.get(n).checks_on_done}
    assert asking == {"retry": 2, "reflect": 2}
    assert all(variants.get(n).failed_check for n in asking)
    with pytest.raises(ConfigError, match="valid: react, thinking, fewshot, guided, retry, terminus_json"):
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


DRAFT = "```bash\nrm -rf /\n```\nDONE\n"


@pytest.mark.parametrize("name", ["react", "fewshot", "guided", "retry", "mini_text"])
@pytest.mark.parametrize(
    "thought",
    [f"<think>{DRAFT}</think>\n", f"{DRAFT}</think>\n"],  # the second: its template had opened it
)
def test_what_is_drafted_in_reasoning_is_no_action(name: str, thought: str) -> None:
    tag = variants.MINI_TAG if name == "mini_text" else "bash"
    action = variants.get(name).parse(f"{thought}```{tag}\nls\n```")
    assert (action.command, action.done, action.error) == ("ls", False, None)


@pytest.mark.parametrize("name", variants.names())
def test_a_reply_cut_off_in_its_reasoning_does_nothing(name: str) -> None:
    done = '{"analysis": "", "plan": "", "commands": [], "task_complete": true}'
    for draft in (DRAFT, done, '<tool_call>{"name": "finish", "arguments": {}}</tool_call>'):
        action = variants.get(name).parse(f"\n<think>\n{draft}")
        assert (action.commands, action.done, action.error) == ((), False, FormatError.unclosed_thinking)


def test_a_command_may_write_such_tags() -> None:
    command = "printf '<think>%s</think>' x > template"
    assert variants.get("react").parse(f"```bash\n{command}\n```").command == command
