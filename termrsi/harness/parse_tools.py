"""Tool calls in a reply's text to actions: `<tool_call>` with a JSON object, or with `<function=…>` and `<parameter=…>` tags.

The first form is what Hermes and Qwen 2.5 and 3 write, the second what Qwen3-Coder does. A malformed call means that nothing of the
reply is executed, and the agent is told which call, what is wrong, and what would be valid.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from termrsi.harness.actions import Action, Command, FormatError, refuse, without_thinking

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "boolean": (bool,)}
Many = Literal["all", "first", "one"]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: Literal["string", "number", "boolean"]
    description: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the agent may call. It runs its parameter `command`, or, with `ends`, claims that the task is done."""

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()
    ends: bool = False

    def schema(self) -> dict[str, Any]:  # Any: JSON
        """As chat templates and OpenAI-compatible servers take it."""
        properties = {p.name: {"type": p.kind, "description": p.description} for p in self.parameters}
        required = [p.name for p in self.parameters if p.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}


LONGEST_S = 86_400


def parse_calls(text: str, tools: Sequence[Tool], many: Many = "all") -> Action:
    """Calls in order. `many`: all are executed, only the first is, or more than one is an error. One that ends comes last."""
    text = without_thinking(text)
    bodies = _CALL.findall(text)
    if "<tool_call>" in _CALL.sub("", text):
        return refuse(FormatError.unclosed_block, "A <tool_call> was not closed. End each call with </tool_call>.")
    if not bodies:
        return refuse(FormatError.no_action, f"Your reply had no tool call. Call {_names(tools)}, like this: {_example(tools[0])}")
    if many == "one" and len(bodies) > 1:
        return refuse(FormatError.several_actions, f"Your reply had {len(bodies)} tool calls. Make exactly one.")
    warnings = [f"only the first of {len(bodies)} calls was executed"] if many == "first" and len(bodies) > 1 else []
    commands: list[Command] = []
    done = False
    for number, body in enumerate(bodies[:1] if many == "first" else bodies, 1):
        read = _read(body, number, tools)
        if isinstance(read, Action):
            return read
        tool, arguments = read
        if done:
            return refuse(FormatError.done_with_command, f"Call {number} comes after the one that ends the task. End it last.")
        checked = _checked(tool, arguments, number)
        if isinstance(checked, Action):
            return checked
        known = {parameter.name for parameter in tool.parameters}
        warnings += [f"unknown argument {name!r} of call {number} was ignored" for name in arguments if name not in known]
        if tool.ends:
            done = True
        else:
            commands.append(checked)
    return Action(tuple(commands), done, warnings=tuple(warnings))


def _read(body: str, number: int, tools: Sequence[Tool]) -> tuple[Tool, dict[str, Any]] | Action:  # Any: parsed JSON
    """The tool and the arguments of one call, or what is wrong."""
    tagged = _FUNCTION.fullmatch(body)
    if tagged:
        name: object = tagged[1]
        arguments: object = {key: _untagged(value) for key, value in _PARAMETER.findall(tagged[2])}
    else:
        try:
            data = json.loads(body)
            name = data.get("name") if isinstance(data, dict) else None
            arguments = data.get("arguments", {}) if isinstance(data, dict) else None
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except json.JSONDecodeError as error:
            told = f"Call {number} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
            return refuse(FormatError.not_json, f"{told} A call looks like this: {_example(tools[0])}")
        except (ValueError, RecursionError):
            return refuse(FormatError.not_json, f"Call {number} is nested too deeply, or holds a number of thousands of digits.")
    if not isinstance(name, str):
        return refuse(FormatError.missing_field, f"Call {number} names no tool. A call looks like this: {_example(tools[0])}")
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        return refuse(FormatError.unknown_tool, f"Call {number} is of {name!r}, which is no tool. There is {_names(tools)}.")
    if not isinstance(arguments, dict):
        return refuse(FormatError.wrong_type, f"The arguments of call {number} are no JSON object.")
    return found, arguments


def _checked(tool: Tool, arguments: dict[str, Any], number: int) -> Command | Action:  # Any: parsed JSON
    for parameter in tool.parameters:
        value = arguments.get(parameter.name)
        if value is None:
            if parameter.required:
                return refuse(FormatError.missing_field, f"Call {number} of {tool.name} lacks its argument {parameter.name!r}.")
        elif parameter.kind == "number" and isinstance(value, str):
            try:
                arguments[parameter.name] = float(value)
            except ValueError:
                return refuse(FormatError.wrong_type, f"{parameter.name!r} of call {number} is no number: {value[:40]!r}.")
        elif not isinstance(value, _TYPES[parameter.kind]) or (parameter.kind == "number" and isinstance(value, bool)):
            if parameter.kind == "boolean" and str(value).lower() in ("true", "false"):
                continue
            return refuse(FormatError.wrong_type, f"{parameter.name!r} of call {number} must be a {parameter.kind}.")
    if tool.ends:
        return Command("")
    text = arguments["command"]
    if not text.strip():
        return refuse(FormatError.empty_command, f"The command of call {number} is empty.")
    wait_s = arguments.get("timeout")
    if wait_s is not None and not 0 < wait_s <= LONGEST_S:
        return refuse(FormatError.wrong_type, f"'timeout' of call {number} must be more than 0 and at most {LONGEST_S} seconds.")
    return Command(text, float(wait_s) if wait_s is not None else None)


def _untagged(value: str) -> str:
    """One line break at each end belongs to the tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _names(tools: Sequence[Tool]) -> str:
    return " or ".join(tool.name for tool in tools)


def _example(tool: Tool) -> str:
    arguments = {parameter.name: "ls -l" for parameter in tool.parameters if parameter.required and parameter.kind == "string"}
    return f"<tool_call>{json.dumps({'name': tool.name, 'arguments': arguments})}</tool_call>"
