"""Replies to actions: one fenced `bash` block, or the word DONE alone. A bad reply is data, with a category of its own.

The feedback names what was wrong and shows what would be valid; no input raises or is mistaken for done.
"""

import enum
import re
from dataclasses import dataclass

_OPEN = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*$", re.MULTILINE)
_SHELLS = frozenset({"bash", "sh", "shell"})
DONE_WORD = "DONE"


class FormatError(enum.StrEnum):
    """Why a reply holds no single action."""

    no_action = "no_action"
    several_actions = "several_actions"
    unclosed_block = "unclosed_block"
    empty_command = "empty_command"
    done_with_command = "done_with_command"


FEEDBACK = {
    FormatError.no_action: "Your reply had no command. Reply with one ```bash block, or with DONE alone.",
    FormatError.several_actions: "Your reply had more than one ```bash block. Reply with exactly one.",
    FormatError.unclosed_block: "Your ```bash block was not closed. End it with ``` on a line of its own.",
    FormatError.empty_command: "Your ```bash block was empty. Put one command into it, or reply with DONE alone.",
    FormatError.done_with_command: "Reply with a command or with DONE, not with both at once.",
}


@dataclass(frozen=True, slots=True)
class Action:
    """Exactly one of: a command, done, or an error."""

    command: str | None = None
    done: bool = False
    error: FormatError | None = None


def parse(text: str) -> Action:
    """The one action of a reply."""
    blocks, unclosed, outside = _blocks(text)
    said_done = any(line.strip().strip("*`.") == DONE_WORD for line in outside.splitlines())
    if unclosed:
        return Action(error=FormatError.unclosed_block)
    if len(blocks) > 1:
        return Action(error=FormatError.several_actions)
    if not blocks:
        return Action(done=True) if said_done else Action(error=FormatError.no_action)
    if said_done:
        return Action(error=FormatError.done_with_command)
    command = blocks[0].strip("\n")
    return Action(command=command) if command.strip() else Action(error=FormatError.empty_command)


def _blocks(text: str) -> tuple[list[str], bool, str]:
    """Bodies of shell blocks, whether a shell block stays open, and the text outside of all blocks."""
    blocks: list[str] = []
    outside: list[str] = []
    body: list[str] | None = None
    shell = False
    for line in text.splitlines():
        fence = _OPEN.match(line)
        if body is None and fence:
            body, shell = [], fence.group(1).lower() in _SHELLS
        elif body is not None and fence and not fence.group(1):
            if shell:
                blocks.append("\n".join(body))
            body = None
        elif body is None:
            outside.append(line)
        else:
            body.append(line)
    return blocks, body is not None and shell, "\n".join(outside)
