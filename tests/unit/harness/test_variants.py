"""Harnesses as data: who is shown what, and how much of an output the agent sees."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
def test_what_is_drafted_in_reasoning_is_no_action(name: str) -> None:
    """Where a template has opened it, the opening is put before the reply; without that, it cannot be told from a reply."""
    tag = variants.MINI_TAG if name == "mini_text" else "bash"
    for thought in (f"<think>{DRAFT}</think>\n", "first I look\n</think>\n"):
        action = variants.get(name).parse(f"{thought}```{tag}\nls\n```")
        assert (action.command, action.done, action.error) == ("ls", False, None)
    unopened = variants.get(name).parse(f"{DRAFT}</think>\n```{tag}\nls\n```")
    assert not unopened.done
    assert unopened.command in (None, "ls")


@pytest.mark.parametrize("name", variants.names())
def test_a_closing_tag_in_a_command_belongs_to_it(name: str) -> None:
    """As in one that writes a page about such tags; the word in it is no claim."""
    script = "cat > page.txt <<'E'\n</think>\nDONE\nE"
    call = '<tool_call>{"name": "%s", "arguments": {"command": %s}}</tool_call>'
    variant = variants.get(name)
    match variant.carrier:
        case variants.Carrier.terminus_json:
            text = json.dumps({"analysis": "", "plan": "", "commands": [{"keystrokes": script}]})
        case variants.Carrier.terminus_xml:
            text = (
                f"<response><analysis>a</analysis><plan>p</plan><commands><keystrokes>{script}</keystrokes></commands></response>"
            )
        case variants.Carrier.tool_calls:
            text = call % (variant.tools[0].name, json.dumps(script))
        case variants.Carrier.mini:
            text = f"```{variants.MINI_TAG}\n{script}\n```"
        case _:
            text = f"<state>s</state>\n```bash\n{script}\n```" if name == "state" else f"```bash\n{script}\n```"
    action = variant.parse(text)
    assert (action.command, action.done, action.error) == (script, False, None)


PIECES = [
    *(
        "<think>",
        "</think>",
        "<state>",
        "</state>",
        "```",
        "```bash\n",
        f"```{variants.MINI_TAG}\n",
        "DONE",
        "\n",
        " ",
        "ls",
        "{",
        "}",
        '"',
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "finish", "arguments": {}}',
        "<function=bash>",
        "</function>",
        "<response>",
        "</response>",
    ),
    *("<commands>", "</commands>", "<keystrokes>", "</keystrokes>", "<analysis>", "</analysis>", "<plan>", "</plan>"),
    *("<task_complete>", "true", "</task_complete>", '"task_complete": true', '"commands": []', '"analysis": "a", "plan": "p", '),
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@settings(max_examples=400)
def test_no_mixture_of_what_replies_are_made_of_raises_or_acts_and_claims_at_once(text: str) -> None:
    for name in variants.names():
        action = variants.get(name).parse(text)
        assert (action.error is None) or (not action.commands and not action.done), (name, text)
        if action.done and variants.get(name).carrier in (variants.Carrier.fenced, variants.Carrier.stated):
            assert not action.commands, (name, text)
            assert "DONE" in text.rpartition("</think>")[2] or "</think>" in text.partition("```")[2], (name, text)


@pytest.mark.parametrize("name", variants.names())
def test_a_reply_cut_off_in_its_reasoning_does_nothing(name: str) -> None:
    done = '{"analysis": "", "plan": "", "commands": [], "task_complete": true}'
    for draft in (DRAFT, done, '<tool_call>{"name": "finish", "arguments": {}}</tool_call>'):
        action = variants.get(name).parse(f"\n<think>\n{draft}")
        assert (action.commands, action.done, action.error) == ((), False, FormatError.unclosed_thinking)


def test_a_command_may_write_such_tags() -> None:
    command = "printf '<think>%s</think>' x > template"
    assert variants.get("react").parse(f"```bash\n{command}\n```").command == command
