"""What a reply asks for, whichever harness it was written in. A bad reply is data: a category, and words for the agent."""

import enum
import re
from dataclasses import dataclass, field


class FormatError(enum.StrEnum):
    """Why nothing of a reply is executed."""

    no_action = "no_action"
    several_actions = "several_actions"
    unclosed_block = "unclosed_block"
    empty_command = "empty_command"
    done_with_command = "done_with_command"
    not_json = "not_json"
    missing_field = "missing_field"
    wrong_type = "wrong_type"
    unknown_tool = "unknown_tool"
    missing_state = "missing_state"
    unclosed_thinking = "unclosed_thinking"


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to execute: shell text, or keystrokes for a terminal. `wait_s`: None is the episode's limit."""

    text: str
    wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """Commands in order, a claim to be done (beside commands only where the harness lets it), or an error and nothing else."""

    commands: tuple[Command, ...] = ()
    done: bool = False
    error: FormatError | None = None
    detail: str = field(default="", compare=False)  # of the error, in words for the agent
    warnings: tuple[str, ...] = field(default=(), compare=False)  # what was ignored; the rest is executed

    @property
    def command(self) -> str | None:
        """All of it as one text; None if there is none."""
        return "\n".join(command.text for command in self.commands) if self.commands else None


THINK, THINK_END = "<think>", "</think>"
# With one of these an action has begun: a tag behind it is the action's own, as in a command that writes a page.
_BEGUN = re.compile(r"```|[{]|<(?:tool_call|function|response|commands|keystrokes)\b")


def without_thinking(text: str) -> str:
    """What follows the reasoning that a reply begins with; all of it if there is none, or if it is not closed.

    A reply may lack the opening tag, where only plain text stands before the closing one. Where a chat template opens it,
    `ChatFormat.reply` says so.
    """
    before, closed, after = text.partition(THINK_END)
    if not closed:
        return text
    opened = before.lstrip().startswith(THINK)
    return after if opened or not (THINK in before or _BEGUN.search(before)) else text


def run(text: str) -> Action:
    """An action of one command."""
    return Action((Command(text),))


def refuse(error: FormatError, detail: str) -> Action:
    return Action(error=error, detail=detail)
