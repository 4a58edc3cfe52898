"""The format of an author's replies: sections under headings, and `=== end ===` alone after the last. Strict; nothing here raises.

    === check word_count ===
    [ "$(cat /app/count.txt)" = 42 ]
    === end ===

A heading has a kind, and for some kinds a name. Outside of sections stands nothing; what a model thought before is taken away.
"""

import enum
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

_HEADING = re.compile(r"^=== ([a-z_]+)(?: (\S+))? ===$")
_CHECK = re.compile(r"[a-z][a-z0-9_]{0,39}")
_PATH = re.compile(r"[\w.@+-]+(?:/[\w.@+-]+)*")
_MANY = 100  # sections of one kind


class Fault(enum.StrEnum):
    """What is wrong with a reply: all that its author is told."""

    cut = "cut"  # a length limit ended it
    no_end = "no_end"
    text_outside = "text_outside"
    unknown_section = "unknown_section"
    missing_section = "missing_section"
    repeated_section = "repeated_section"
    empty_section = "empty_section"
    bad_name = "bad_name"  # missing, where none is meant, or not of its form
    fenced = "fenced"  # ``` around a section


@dataclass(frozen=True, slots=True)
class Section:
    kind: str
    name: str
    body: str


@dataclass(frozen=True, slots=True)
class Form:
    """The sections that one reply may have: kind -> fewest and most. `named`: with a name; `empty`: may be empty."""

    sections: Mapping[str, tuple[int, int]]
    named: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()


FORMS: dict[str, Form] = {
    "template": Form({"instruction": (1, 1), "truth": (1, 1)}),
    "initial_test": Form({"initial_test": (1, 1)}),
    "final_test": Form({"check": (1, _MANY)}, named=frozenset({"check"})),
    "environment": Form(
        {"file": (0, _MANY), "setup": (0, 1), "dockerfile": (0, 1), "compose": (0, 1), "solution": (0, 1)},
        named=frozenset({"file"}),
        empty=frozenset({"file"}),
    ),
}


def sections(text: str, form: Form, *, cut: bool = False) -> tuple[Section, ...] | Fault:
    """The sections of a reply in their order, or the first fault. Bodies end with a newline, without blank lines around them."""
    if cut:
        return Fault.cut
    found = _taken_apart(without_thought(text).encode("utf-8", "replace").decode())
    if isinstance(found, Fault):
        return found
    counts = Counter(section.kind for section in found)
    if any(kind not in form.sections for kind in counts):
        return Fault.unknown_section
    if any(counts[kind] < fewest for kind, (fewest, _) in form.sections.items()):
        return Fault.missing_section
    keys = [(section.kind, section.name) for section in found]
    if any(counts[kind] > most for kind, (_, most) in form.sections.items()) or len(set(keys)) < len(keys):
        return Fault.repeated_section
    if any((section.kind in form.named) is not bool(section.name) for section in found) or not _names_hold(found):
        return Fault.bad_name
    if any(not section.body.strip() and section.kind not in form.empty for section in found):
        return Fault.empty_section
    if any(section.body.startswith("```") for section in found if section.kind != "file"):
        return Fault.fenced
    return tuple(found)


def without_thought(text: str) -> str:
    """What follows the end of a thought that stands before the first heading; its opening may have been the template's."""
    before, mark, after = text.partition("</think>")
    return after if mark and not any(_HEADING.match(line.rstrip()) for line in before.split("\n")) else text


def _taken_apart(text: str) -> list[Section] | Fault:
    found: list[Section] = []
    heading: tuple[str, str] | None = None
    body: list[str] = []
    ended = False
    for line in text.split("\n"):
        match = None if ended else _HEADING.match(line.rstrip())
        if match is None:
            if heading is None and line.strip():
                return Fault.text_outside
            body.append(line)
            continue
        if heading is not None:
            found.append(Section(*heading, _body(body)))
        heading, body = (match[1], match[2] or ""), []
        if match[1] == "end":
            heading, ended = None, True
    return found if ended else Fault.no_end


def _body(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"{text}\n" if text else ""


def _names_hold(found: list[Section]) -> bool:
    """Checks are words; files are paths below the working directory, none of them inside another."""
    files = {PurePosixPath(section.name) for section in found if section.kind == "file"}
    if any(parent in files for path in files for parent in path.parents):
        return False
    return all(
        _CHECK.fullmatch(section.name)
        if section.kind == "check"
        else _PATH.fullmatch(section.name) and len(section.name) <= 200 and not {".", ".."} & set(section.name.split("/"))
        for section in found
        if section.name
    )
