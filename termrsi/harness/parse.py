"""Replies in plain text to actions: one fenced block, or a word alone; and the same behind a `<state>` block.

The feedback names what was wrong and shows what would be valid; no input raises or is mistaken for done.
"""

import re
from collections.abc import Collection

from termrsi.harness.actions import Action, FormatError, refuse, run

_OPEN = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*$", re.MULTILINE)
_STATE = re.compile(r"<state>(.*?)</state>", re.DOTALL)
SHELLS = frozenset({"bash", "sh", "shell"})
DONE_WORD = "DONE"

_OR_DONE = ", or {word} alone"
_FEEDBACK = {
    FormatError.no_action: "Your reply had no command. Reply with one ```{tag} block{or_done}.",
    FormatError.several_actions: "Your reply had more than one ```{tag} block. Reply with exactly one.",
    FormatError.unclosed_block: "Your ```{tag} block was not closed. End it with ``` on a line of its own.",
    FormatError.empty_command: "Your ```{tag} block was empty. Put one command into it{or_done}.",
    FormatError.done_with_command: "Reply with a command or with {word}, not with both at once.",
}


def parse(text: str, *, tags: Collection[str] = SHELLS, tag: str = "bash", word: str = DONE_WORD) -> Action:
    """The one action of a reply: a block fenced with one of `tags` (`tag` is the one that the feedback names), or `word` on a
    line of its own ("": none means done)."""

    def no(error: FormatError) -> Action:
        or_done = _OR_DONE.format(word=word) if word else ""
        return refuse(error, _FEEDBACK[error].format(tag=tag, word=word, or_done=or_done))

    blocks, unclosed, outside = _blocks(text, tags)
    said_done = bool(word) and any(line.strip().strip("*`.") == word for line in outside.splitlines())
    if unclosed:
        return no(FormatError.unclosed_block)
    if len(blocks) > 1:
        return no(FormatError.several_actions)
    if not blocks:
        return Action(done=True) if said_done else no(FormatError.no_action)
    if said_done:
        return no(FormatError.done_with_command)
    command = blocks[0].strip("\n")
    return run(command) if command.strip() else no(FormatError.empty_command)


def parse_with_state(text: str) -> Action:
    """As `parse`, of what follows one `<state>` block that says something."""
    before = text.partition("```")[0]
    found = _STATE.search(before)
    if found is None:
        if "<state>" in before:
            return refuse(FormatError.unclosed_block, "Your <state> was not closed. End it with </state>, then give your command.")
        told = (
            "Your reply had no state. Begin with <state>, what you know and plan, </state>; then one ```bash block, or DONE alone."
        )
        return refuse(FormatError.missing_state, told)
    if not found[1].strip():
        return refuse(
            FormatError.missing_state, "Your <state> was empty. Write down what you know, what is done, and what comes next."
        )
    return parse(text[: found.start()] + text[found.end() :])


def _blocks(text: str, tags: Collection[str]) -> tuple[list[str], bool, str]:
    """Bodies of blocks with one of the tags, whether one of them stays open, and the text outside of all blocks."""
    blocks: list[str] = []
    outside: list[str] = []
    body: list[str] | None = None
    ours = False
    for line in text.splitlines():
        fence = _OPEN.match(line)
        if body is None and fence:
            body, ours = [], fence.group(1).lower() in tags
        elif body is not None and fence and not fence.group(1):
            if ours:
                blocks.append("\n".join(body))
            body = None
        elif body is None:
            outside.append(line)
        else:
            body.append(line)
    return blocks, body is not None and ours, "\n".join(outside)
