"""Broken copies of a task's solution: a verifier that takes one for the whole is too weak (mutation test; the operators are ours).

One change each: a command or an inner line is left out, the script ends half-way, or a literal is another. Nothing here runs a
script: bash is asked only where its commands end (`bash -n`).
"""

import random
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import yaml

LARGEST_LINES = 400  # of a script whose commands are told apart; above it, and in other languages, each line is one
LARGEST_CHARS = 1 << 16  # of a file that is looked at: a larger one is data
LONGEST_LINE = 1000  # in which literals are looked for
_LITERAL = re.compile(
    r"'[^'\n]*\w[^'\n]*'|\"[^\"\n]*\w[^\"\n]*\"|(?<![\w.$-])\d+(?![\w(])|(?<![\w./-])(?:[\w./-]*\.\w+|/[\w./-]*\w)"
)
_IDLE = re.compile(r"\s*(?:#.*|set\s+[-+].*|)$")  # what does nothing by itself


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of the solution with another text; `what` says where, and what was done to it."""

    file: str
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class _Edit:
    """Characters of a file, and what stands there instead. `whole`: only where what it leaves is still a script."""

    file: str
    what: str
    start: int
    end: int
    new: str = ""
    whole: bool = False


def mutants(files: Mapping[str, str], limit: int, seed: str) -> list[Mutant]:
    """At most `limit`, of all files, no two alike: half-way ends first, then by turns lines left out and literals changed.

    Where there are more, which ones is drawn by `seed`.
    """
    draw = random.Random(seed)
    ends: list[_Edit] = []
    drops: list[_Edit] = []
    literals: list[_Edit] = []
    typed: list[Mutant] = []
    for name, text in files.items():
        if name.endswith(".yaml"):
            typed += _typed(name, text)
        elif len(text) <= LARGEST_CHARS:
            parts = _parts(name, text)
            drops += _without(name, text, parts)
            literals += _altered(name, text)
            if name.endswith(".sh") and len(parts) > 1:
                at = parts[len(parts) // 2][0]
                ends.append(_Edit(name, f"{name}: ends before line {at}", _starts(text)[at - 1], len(text)))
    if len(ends) + len(drops) + len(literals) + len(typed) > limit:
        for some in (drops, literals, typed):
            draw.shuffle(some)
    found: dict[tuple[str, str], Mutant] = {(one.file, one.text): one for one in typed}
    for edit in chain(ends, (one for pair in zip_longest(drops, literals) for one in pair if one is not None)):
        if len(found) >= limit:
            break
        old = files[edit.file]
        text = old[: edit.start] + edit.new + old[edit.end :]
        if text != old and (not edit.whole or _whole(text)):
            found.setdefault((edit.file, text), Mutant(edit.file, edit.what, text))
    return list(found.values())[:limit]


def commands(script: str) -> list[tuple[int, str]]:
    """(number of its first line, text) of each top-level command of a bash script, those that do nothing left out.

    What never becomes a whole command is the last one.
    """
    found: list[tuple[int, str]] = []
    first, held = 1, ""
    for number, line in enumerate(script.splitlines(keepends=True), start=1):
        held += line
        if not _whole(held):
            continue
        if not _IDLE.match(held):
            found.append((first, held))
        first, held = number + 1, ""
    return [*found, (first, held)] if held.strip() else found


def _whole(text: str) -> bool:
    if text.rstrip("\n").endswith("\\"):
        return False
    clean = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, env=clean, check=False)
    return done.returncode == 0 and "here-document" not in done.stderr


def _parts(name: str, text: str) -> list[tuple[int, str]]:
    lines = text.splitlines(keepends=True)
    if name.endswith(".sh") and len(lines) <= LARGEST_LINES:
        return commands(text)
    return [(number, line) for number, line in enumerate(lines, start=1) if not _IDLE.match(line)]


def _starts(text: str) -> list[int]:
    """Where each line begins, and the end."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _without(name: str, text: str, parts: Sequence[tuple[int, str]]) -> Iterator[_Edit]:
    """Each command left out; of one of several lines each inner line too."""
    lines, starts = text.splitlines(), _starts(text)
    for first, part in parts:
        count = len(part.splitlines())
        shown = part.strip().splitlines()[0][:80]
        yield _Edit(name, f"{name} line {first}: without {shown!r}", starts[first - 1], starts[first - 1 + count])
        for at in range(first, first + count - 2):
            if lines[at].strip():
                yield _Edit(
                    name, f"{name} line {at + 1}: without {lines[at].strip()[:80]!r}", starts[at], starts[at + 1], whole=True
                )


def _altered(name: str, text: str) -> Iterator[_Edit]:
    """Each literal with its last letter or digit another: a quoted string, a number, a path."""
    start = 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        passed_over = _IDLE.match(line) or len(line) > LONGEST_LINE
        for match in () if passed_over else _LITERAL.finditer(line):
            old = match.group()
            at = max(i for i, sign in enumerate(old) if sign.isalnum() or sign == "_")
            new = old[:at] + _next(old[at]) + old[at + 1 :]
            what = f"{name} line {number}: {old[:60]} is {new[:60]}"
            yield _Edit(name, what, start + match.start(), start + match.end(), new)
        start += len(line)


def _next(sign: str) -> str:
    if sign.isdigit():
        return str((int(sign) + 1) % 10) if sign.isascii() else "0"
    return {"z": "a", "Z": "A", "_": "x"}.get(sign, chr(ord(sign) + 1) if sign.isascii() else "x")


def _typed(name: str, text: str) -> Iterator[Mutant]:
    """A list of commands to type without each of them; nothing of what is no such list."""
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    for at in range(len(entries) if isinstance(entries, list) else 0):
        left = yaml.safe_dump(entries[:at] + entries[at + 1 :])
        yield Mutant(name, f"{name}: without command {at + 1}, {str(entries[at])[:80]}", left)
