"""Tool calls in text: both forms, each fault by its own name, and no text that raises or passes for done."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.harness.actions import Action, Command, FormatError
from termrsi.harness.parse_tools import Parameter, Tool, parse_calls

BASH = Tool("bash", "runs", (Parameter("command", "string", "what"), Parameter("timeout", "number", "s", required=False)))
FINISH = Tool("finish", "ends", (Parameter("message", "string", "m", required=False),), ends=True)
TOOLS = (BASH, FINISH)


def call(name: str = "bash", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tagged(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


LS = Action((Command("ls"),))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (call(command="ls"), LS),
        (f"THOUGHT: I look.\n{call(command='ls')}\nThen more.", LS),
        (tagged("bash", command="ls"), LS),
        (tagged("bash", command="cat <<X\n</a>\nX", timeout="2.5"), Action((Command("cat <<X\n</a>\nX", 2.5),))),
        (call(command="ls", timeout=5), Action((Command("ls", 5.0),))),
        (call(command="a") + call(command="b"), Action((Command("a"), Command("b")))),
        (call("finish"), Action(done=True)),
        (call("finish", message="all there"), Action(done=True)),
        (call(command="a") + call("finish"), Action((Command("a"),), done=True)),
        ('<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>', LS),
        (f"<think>{call('finish')}</think>{call(command='ls')}", LS),
        (call(command="ls", speed="high"), LS),
    ],
)
def test_calls(text: str, action: Action) -> None:
    assert parse_calls(text, TOOLS) == action


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", FormatError.no_action, "Call bash or finish, like this: <tool_call>"),
        ("finish", FormatError.no_action, "no tool call"),
        ('{"name": "finish", "arguments": {}}', FormatError.no_action, "no tool call"),
        ('<tool_call>{"name": "bash"', FormatError.unclosed_block, "</tool_call>"),
        (call(command="a") + "<tool_call>", FormatError.unclosed_block, "not closed"),
        ("<tool_call>ls</tool_call>", FormatError.not_json, "Call 1 is not valid JSON: Expecting value at line 1, column 1"),
        (call(command="a") + "<tool_call>{'a'}</tool_call>", FormatError.not_json, "Call 2"),
        ("<tool_call>[]</tool_call>", FormatError.missing_field, "names no tool"),
        ('<tool_call>{"arguments": {}}</tool_call>', FormatError.missing_field, "names no tool"),
        (call("bsh", command="ls"), FormatError.unknown_tool, "'bsh', which is no tool. There is bash or finish"),
        (call(), FormatError.missing_field, "Call 1 of bash lacks its argument 'command'"),
        (call(command=None), FormatError.missing_field, "lacks"),
        (call(command=3), FormatError.wrong_type, "'command' of call 1 must be a string"),
        (call(command=" \n"), FormatError.empty_command, "empty"),
        (call(command="ls", timeout="soon"), FormatError.wrong_type, "no number: 'soon'"),
        (call(command="ls", timeout=True), FormatError.wrong_type, "must be a number"),
        (call(command="ls", timeout=0), FormatError.wrong_type, "more than 0"),
        (
            '<tool_call>{"name": "bash", "arguments": {"command": "ls", "timeout": NaN}}</tool_call>',
            FormatError.wrong_type,
            "more than 0",
        ),
        ('<tool_call>{"name": "bash", "arguments": ["ls"]}</tool_call>', FormatError.wrong_type, "no JSON object"),
        (call("finish") + call(command="rm x"), FormatError.done_with_command, "Call 2 comes after"),
        (call("finish", message=3), FormatError.wrong_type, "must be a string"),
    ],
)
def test_refused(text: str, error: FormatError, said: str) -> None:
    action = parse_calls(text, TOOLS)
    assert action == Action(error=error)
    assert said in action.detail


def test_how_many() -> None:
    two = call(command="ls") + call(command="rm x")
    assert parse_calls(two, TOOLS, "first") == LS
    assert parse_calls(two, TOOLS, "first").warnings == ("only the first of 2 calls was executed",)
    assert parse_calls(two, TOOLS, "one").error is FormatError.several_actions
    assert parse_calls(call(command="ls", speed=1), TOOLS).warnings == ("unknown argument 'speed' of call 1 was ignored",)


def test_a_schema_is_what_servers_take() -> None:
    function = BASH.schema()["function"]
    assert function["name"] == "bash"
    assert function["parameters"]["required"] == ["command"]
    assert function["parameters"]["properties"]["timeout"] == {"type": "number", "description": "s"}


PIECES = (
    *("<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"bash"', '"arguments"', '"command"', ",", '"ls"', "<function=bash>"),
    *("</function>", "<parameter=command>", "</parameter>", "finish", "\n", "null", "<think>", "</think>", "9" * 5000, "[" * 2000),
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_no_text_raises_or_is_taken_for_done(text: str) -> None:
    action = parse_calls(text, TOOLS)
    claims = re.search(r'"name"\s*:\s*"finish"|<function=finish>', text)
    assert not action.done or claims
    assert action.error is None or (not action.commands and action.detail)


@pytest.mark.parametrize("timeout", ["9" * 310, "9" * 5000, "1e999", "[" * 5000])
def test_numbers_and_lists_without_end_are_errors(timeout: str) -> None:
    text = f'<tool_call>{{"name": "bash", "arguments": {{"command": "ls", "timeout": {timeout}}}}}</tool_call>'
    assert parse_calls(text, TOOLS).error in (FormatError.not_json, FormatError.wrong_type)
