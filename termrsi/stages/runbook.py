"""The five blocks of a runbook, and how a text is taken apart into them (secondary notes on RSR; limits are ours)."""

import re

BLOCKS = ("Target end state", "Milestones", "Useful checks", "Recovery strategies", "Pitfalls")
MAX_CHARS = 1200
MAX_CODE_LINES = 4

_HEADING = re.compile(r"^[\s#*\-\d.]*(" + "|".join(re.escape(b) for b in BLOCKS) + r")[*\s]*:?[*\s]*", re.IGNORECASE | re.MULTILINE)


def take_apart(text: str) -> dict[str, list[str]]:
    """Contents per heading, in order of appearance; a heading that comes twice has two entries."""
    found: dict[str, list[str]] = {}
    matches = list(_HEADING.finditer(text))
    ends = [match.start() for match in matches[1:]] + [len(text)]
    for match, end in zip(matches, ends, strict=False):  # without a heading there is one end and no match
        name = next(b for b in BLOCKS if b.lower() == match.group(1).lower())
        found.setdefault(name, []).append(text[match.end() : end].strip())
    return found


def faults(text: str) -> tuple[str, ...]:
    """Categories of what is wrong with the form; empty if it is a runbook."""
    blocks = take_apart(text)
    wrong = []
    if any(name not in blocks for name in BLOCKS):
        wrong.append("block_missing")
    if any(len(contents) > 1 for contents in blocks.values()):
        wrong.append("block_twice")
    if any(not c for contents in blocks.values() for c in contents):
        wrong.append("block_empty")
    if len(text) > MAX_CHARS:
        wrong.append("too_long")
    if any(len(code.splitlines()) > MAX_CODE_LINES for code in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)):
        wrong.append("long_code")
    return tuple(wrong)
