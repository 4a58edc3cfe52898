"""Replies of Terminus-2's two protocols to actions: a JSON object, or XML-like tags, with keystrokes for a terminal.

The protocols are Harbor's (0.26, `harbor.agents.terminus_2`), the code and the wording are ours. Different from there: reasoning
before `</think>` is never searched for the reply, and where the first object in braces is not one, the next that has `commands` is
taken. Keystrokes of a reply that claims to be done are ignored if they are malformed, as there.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from termrsi.harness.actions import Action, Command, FormatError, refuse, without_thinking

DEFAULT_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
JSON_FORM = '{"analysis": "...", "plan": "...", "commands": [{"keystrokes": "ls -l\\n", "duration": 0.5}], "task_complete": false}'
XML_FORM = (
    "<response><analysis>...</analysis><plan>...</plan>"
    '<commands><keystrokes duration="0.5">ls -l\n</keystrokes></commands></response>'
)
_REQUIRED = ("analysis", "plan", "commands")
_KNOWN = {*_REQUIRED, "task_complete"}
_TRUE = ("true", "1", "yes")
_KEYS = re.compile(r"<keystrokes(?P<attributes>[^>]*)>(?P<text>.*?)</keystrokes>", re.DOTALL)
_SAID = re.compile(r"<(analysis|plan|commands)>.*?(?:</\1>|$)", re.DOTALL)  # in which a word is no claim
_DURATION = re.compile(r"""duration\s*=\s*["']([^"']*)["']""")


def parse_json(text: str) -> Action:
    """A JSON object with analysis, plan, commands, and perhaps task_complete."""
    text = without_thinking(text)
    data, problem, extra = _object(text)
    if data is None:
        return refuse(FormatError.not_json, f"{problem} Reply with one JSON object like {JSON_FORM}")
    done = data.get("task_complete") is True or str(data.get("task_complete", "")).lower() in _TRUE
    missing = [name for name in _REQUIRED if name not in data]
    if missing and not (done and missing == ["commands"]):
        return refuse(FormatError.missing_field, f"Your JSON lacks {', '.join(missing)}. It must look like {JSON_FORM}")
    warnings = [f"text {where} the JSON was ignored" for where in extra]
    warnings += [f"unknown field {name!r} was ignored" for name in data if name not in _KNOWN]
    commands: list[Command] = []
    given = data.get("commands", [])
    if not isinstance(given, list):
        told = f'"commands" is {_kind(given)}, not a list. It must look like {JSON_FORM}'
        return Action(done=True, warnings=(told,)) if done else refuse(FormatError.wrong_type, told)
    for number, one in enumerate(given, 1):
        if not isinstance(one, dict) or not isinstance(one.get("keystrokes"), str):
            what = _kind(one) if not isinstance(one, dict) else f'without a text "keystrokes" ({_kind(one.get("keystrokes"))})'
            told = f'Command {number} is {what}. Each command must look like {{"keystrokes": "ls -l\\n", "duration": 0.5}}'
            if not done:
                return refuse(FormatError.wrong_type, told)
            warnings.append(told)
            continue
        wait_s, warning = _wait(one.get("duration"), number)
        warnings += [*warning, *(f"unknown field {name!r} of command {number} was ignored" for name in one if name not in _COMMAND)]
        commands.append(Command(one["keystrokes"], wait_s))
    return Action(tuple(commands), done, warnings=tuple(warnings + _unfinished(commands)))


def parse_xml(text: str) -> Action:
    """`<response>` with analysis, plan, commands of keystrokes, and perhaps task_complete. What is inside is raw: no entities."""
    text = without_thinking(text)
    begin = text.find("<response>")
    if begin < 0:
        return refuse(FormatError.no_action, f"Your reply had no <response>. It must look like {XML_FORM}")
    end = text.find("</response>", begin)
    body = text[begin + len("<response>") : end if end >= 0 else len(text)]
    outside = _KEYS.sub("", body)
    if "<keystrokes" in outside and "</commands>" not in body:  # cut off in a command: what stands in it is no claim
        return refuse(FormatError.unclosed_block, "A <keystrokes> was not closed. End each with </keystrokes>.")
    apart = _SAID.sub("", outside)
    done = (_tag(apart, "task_complete") or "").strip().lower() in _TRUE
    commands_at = body.find("<commands>")
    closed = body.rfind("</commands>")
    if commands_at < 0 and not re.search(r"<commands\s*/>", body):
        if done:
            return Action(done=True)
        return refuse(FormatError.missing_field, f"Your <response> had no <commands>. It must look like {XML_FORM}")
    if commands_at >= 0 and closed < commands_at:
        return refuse(
            FormatError.unclosed_block, "Your <commands> was not closed. End it with </commands>, and the reply with </response>."
        )
    inner = body[commands_at:closed] if commands_at >= 0 else ""
    if "<keystrokes" in _KEYS.sub("", inner):
        return refuse(FormatError.unclosed_block, "A <keystrokes> was not closed. End each with </keystrokes>.")
    commands, warnings = [], []
    for number, found in enumerate(_KEYS.finditer(inner), 1):
        duration = _DURATION.search(found["attributes"])
        wait_s, warning = _wait(duration[1] if duration else None, number)
        warnings += warning
        commands.append(Command(found["text"], wait_s))
    missing = [name for name in ("analysis", "plan") if _tag(outside, name) is None]
    warnings += [f"<{name}> is missing" for name in missing]
    warnings += ["a second <response> was ignored"] if end >= 0 and "<response>" in text[end:] else []
    return Action(tuple(commands), done, warnings=tuple(warnings + _unfinished(commands)))


_COMMAND = {"keystrokes", "duration"}


def _object(text: str) -> tuple[dict[str, Any] | None, str, list[str]]:  # Any: parsed JSON
    """The reply's object, or what is wrong with the text; where other text stands ("before", "after")."""
    problem = "Your reply had no JSON object."
    fallback: tuple[dict[str, Any], list[str]] | None = None
    for begin, end in _objects(text):
        try:
            data = json.loads(text[begin:end])
        except json.JSONDecodeError as error:
            if problem.startswith("Your reply had no"):
                problem = f"Your JSON is not valid: {error.msg} at line {error.lineno}, column {error.colno}."
            continue
        except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists
            continue
        extra = [name for name, rest in (("before", text[:begin]), ("after", text[end:])) if rest.strip()]
        if "commands" in data or "task_complete" in data:
            return data, "", extra
        fallback = fallback or (data, extra)
    if fallback is not None:
        return fallback[0], "", fallback[1]
    begin = text.find("{")
    if begin >= 0 and (depth := _depth(text[begin:])) > 0:  # cut off between two values: closed for it
        try:
            data = json.loads(text[begin:] + "}" * depth)
        except (ValueError, RecursionError):
            return None, "Your JSON object was not closed.", []
        return data, "", []
    return None, problem, []


def _objects(text: str) -> Iterator[tuple[int, int]]:
    """Where each balanced `{…}` of the top level begins and ends, braces in strings not counted. Linear in the text."""
    begin, depth, in_string, escaped = -1, 0, False, False
    for at, sign in enumerate(text):
        if depth and in_string:
            if escaped:
                escaped = False
            elif sign == "\\":
                escaped = True
            elif sign == '"':
                in_string = False
        elif depth and sign == '"':
            in_string = True
        elif sign == "{":
            begin = at if depth == 0 else begin
            depth += 1
        elif sign == "}" and depth:
            depth -= 1
            if depth == 0:
                yield begin, at + 1


def _depth(text: str) -> int:
    """Braces that stay open at the end, 0 if a string does."""
    depth, in_string, escaped = 0, False, False
    for sign in text:
        if in_string:
            in_string = sign != '"' or escaped
            escaped = sign == "\\" and not escaped
        elif sign == '"':
            in_string = True
        elif sign in "{}":
            depth += 1 if sign == "{" else -1
    return 0 if in_string else depth


def _wait(value: object, number: int) -> tuple[float, list[str]]:
    if value is None:
        return DEFAULT_WAIT_S, []
    try:
        seconds = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        seconds = -1.0
    if not seconds >= 0.0:  # NaN, too
        return DEFAULT_WAIT_S, [f"the duration of command {number} is no number of seconds: {DEFAULT_WAIT_S:g} was taken"]
    return min(seconds, LONGEST_WAIT_S), []


def _unfinished(commands: list[Command]) -> list[str]:
    """A command that the next one is typed behind, on the same line."""
    return [
        f"command {number} does not end with a newline: the next one was typed behind it"
        for number, command in enumerate(commands[:-1], 1)
        if command.text and not command.text.endswith("\n") and not is_key(command.text)
    ]


def is_key(text: str) -> bool:
    """Whether keystrokes name one key, as tmux does, rather than text to type."""
    return bool(re.fullmatch(r"C-[a-z@\[\\\]^_?]|Enter|Escape|Tab|Space|BSpace|Up|Down|Left|Right|Home|End|PPage|NPage|DC", text))


def _tag(text: str, name: str) -> str | None:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[1] if found else None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "nothing")
