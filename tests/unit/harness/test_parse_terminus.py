"""Terminus-2's two protocols: what is executed, what is refused and why, and no text that raises or passes for done."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.harness.actions import Action, Command, FormatError
from termrsi.harness.parse_terminus import JSON_FORM, XML_FORM, is_key, parse_json, parse_xml


def reply(**fields: object) -> str:
    return json.dumps({"analysis": "a", "plan": "p", "commands": []} | fields)


def keys(*texts: str, seconds: float = 1.0) -> Action:
    return Action(tuple(Command(text, seconds) for text in texts))


LS = {"keystrokes": "ls\n"}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (JSON_FORM, keys("ls -l\n", seconds=0.5)),
        (reply(commands=[LS, {"keystrokes": "C-c", "duration": 2}]), Action((Command("ls\n", 1.0), Command("C-c", 2.0)))),
        (reply(commands=[{"keystrokes": "", "duration": 600}]), keys("", seconds=60.0)),
        (reply(commands=[{"keystrokes": "ls\n", "duration": "0.1"}]), keys("ls\n", seconds=0.1)),
        (reply(commands=[{"keystrokes": "ls\n", "duration": float("nan")}]), keys("ls\n")),
        (reply(commands=[{"keystrokes": "ls\n", "duration": -1, "shell": 1}]), keys("ls\n")),
        (reply(), Action()),
        (reply(task_complete=True), Action(done=True)),
        (reply(task_complete="Yes"), Action(done=True)),
        (reply(task_complete=False), Action()),
        (reply(task_complete="no"), Action()),
        (reply(task_complete=True, commands=[LS]), Action((Command("ls\n", 1.0),), done=True)),
        (reply(task_complete=True, commands=[{"keys": "ls"}]), Action(done=True)),
        (reply(task_complete=True, commands="ls"), Action(done=True)),
        (f"I look first.\n```json\n{reply(commands=[LS])}\n```", keys("ls\n")),
        (f"<think>use {{x}} {reply(task_complete=True)}</think>{reply(commands=[LS])}", keys("ls\n")),
        (f"The set {{x}} is small. {reply(commands=[LS])}", keys("ls\n")),
        (reply(commands=[{"keystrokes": 'echo "}{" \\"\n'}]), keys('echo "}{" \\"\n')),
        (reply(commands=[LS])[:-1], keys("ls\n")),  # one brace short
        (reply(plan="{"), Action()),
    ],
)
def test_json(text: str, action: Action) -> None:
    assert parse_json(text) == action


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", FormatError.not_json, "no JSON object"),
        ("DONE", FormatError.not_json, "no JSON object"),
        ('"task_complete": true', FormatError.not_json, "no JSON object"),
        ("[1, 2]", FormatError.not_json, "no JSON object"),
        ('{"analysis": "a\nb"}', FormatError.not_json, "Invalid control character at at line 1, column 16"),
        ("{'analysis': 1}", FormatError.not_json, "line 1, column 2"),
        ('{"analysis": "cut off', FormatError.not_json, "not closed|no JSON"),
        ("{}", FormatError.missing_field, "lacks analysis, plan, commands"),
        ('{"analysis": "a", "plan": "p"}', FormatError.missing_field, "lacks commands"),
        ('{"task_complete": true}', FormatError.missing_field, "lacks analysis, plan"),
        (reply(commands="ls"), FormatError.wrong_type, '"commands" is a text, not a list'),
        (reply(commands=["ls"]), FormatError.wrong_type, "Command 1 is a text"),
        (reply(commands=[LS, {"keystrokes": 3}]), FormatError.wrong_type, "Command 2 is without a text .*a number"),
        (reply(commands=[{}]), FormatError.wrong_type, "Command 1 is without a text .*nothing"),
    ],
)
def test_json_refused(text: str, error: FormatError, said: str) -> None:
    action = parse_json(text)
    assert action == Action(error=error)
    assert re.search(said, action.detail), action.detail


def test_json_warnings_are_told_and_the_rest_is_executed() -> None:
    action = parse_json("x " + reply(commands=[{"keystrokes": "ls", "duration": "soon", "z": 1}, LS], mood="good"))
    assert action.command == "ls\nls\n"
    assert action.warnings == (
        "text before the JSON was ignored",
        "unknown field 'mood' was ignored",
        "the duration of command 1 is no number of seconds: 1 was taken",
        "unknown field 'z' of command 1 was ignored",
        "command 1 does not end with a newline: the next one was typed behind it",
    )


def xml(inner: str = "", more: str = "") -> str:
    return f"<response><analysis>a</analysis><plan>p</plan><commands>{inner}</commands>{more}</response>"


DONE = "<task_complete>true</task_complete>"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (XML_FORM, keys("ls -l\n", seconds=0.5)),
        (xml("<keystrokes>a &lt; b\n</keystrokes>"), keys("a &lt; b\n")),
        (xml("<keystrokes duration='99'>x</keystrokes>"), keys("x", seconds=60.0)),
        (xml('<keystrokes duration="soon">x</keystrokes>'), keys("x")),
        (xml(), Action()),
        (xml("", DONE), Action(done=True)),
        (xml("<keystrokes>ls\n</keystrokes>", DONE), Action((Command("ls\n", 1.0),), done=True)),
        (xml(f"<keystrokes>echo '{DONE}'\n</keystrokes>"), keys(f"echo '{DONE}'\n")),  # what is typed is no claim
        (f"<response>{DONE}</response>", Action(done=True)),
        ("<response><analysis>a</analysis><plan>p</plan><commands/></response>", Action()),
        (xml("<keystrokes>ls\n</keystrokes>").removesuffix("</response>"), keys("ls\n")),
        (xml("<keystrokes>ls\n</keystrokes>") + xml("<keystrokes>rm\n</keystrokes>"), keys("ls\n")),
        (f"<think>{xml('', DONE)}</think>" + xml(), Action()),
    ],
)
def test_xml(text: str, action: Action) -> None:
    assert parse_xml(text) == action


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", FormatError.no_action),
        (DONE, FormatError.no_action),
        ("<response>x</response>", FormatError.missing_field),
        ("<response><commands><keystrokes>ls</keystrokes>", FormatError.unclosed_block),
        (xml("<keystrokes>ls"), FormatError.unclosed_block),
        ("<response><task_complete>false</task_complete></response>", FormatError.missing_field),
    ],
)
def test_xml_refused(text: str, error: FormatError) -> None:
    action = parse_xml(text)
    assert action == Action(error=error)
    assert action.detail


@pytest.mark.parametrize(
    ("text", "key"), [("C-c", True), ("Enter", True), ("Up", True), ("echo C-c", False), ("C-c\n", False), ("", False)]
)
def test_names_of_keys(text: str, key: bool) -> None:
    assert is_key(text) is key


PIECES = (
    *("{", "}", '"', "\\", "analysis", "plan", "commands", "keystrokes", ":", ",", "[", "]", "<response>", "</response>"),
    *(
        "<commands>",
        "</commands>",
        "<keystrokes>",
        "</keystrokes>",
        "\n",
        "true",
        "x",
        "<think>",
        "</think>",
        "1e999",
        "\ud800",
        "9" * 5000,
        "[" * 2000,
        '"task_complete": true',
    ),
)
FIELDS = st.sampled_from(["analysis", "plan", "commands", "keystrokes", "duration"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner)
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join), VALUES.map(json.dumps)))
def test_no_text_raises_or_is_taken_for_done(text: str) -> None:
    for parse in (parse_json, parse_xml):
        action = parse(text)
        assert not action.done  # none of the pieces is a claim
        assert (action.error is None) or (not action.commands and action.detail)
