"""The subset of Dockerfiles that terminal tasks use, parsed into instructions. What is not understood is refused by line."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from termrsi.errors import TaskError

IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
KNOWN = ("FROM", "WORKDIR", "COPY", "ADD", "RUN", "ENV", "ARG", "USER")
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `flags`: `--name=value`; `words`: arguments, not yet expanded; `rest`: the text after the flags."""

    name: str
    flags: dict[str, str]
    words: tuple[str, ...]
    rest: str
    where: str  # file:line


def parse(path: Path) -> list[Instruction]:
    """Raises TaskError naming file:line and the instruction."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="strict").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot be read: {error}", str(path)) from error
    found: list[Instruction] = []
    for number, text in _logical_lines(lines):
        found.append(_instruction(text, f"{path}:{number}"))
    if not any(instruction.name == "FROM" for instruction in found):
        raise TaskError("no FROM instruction", str(path), "a Dockerfile begins with FROM")
    first = next(i for i, instruction in enumerate(found) if instruction.name == "FROM")
    for i, instruction in enumerate(found):
        if i < first and instruction.name != "ARG":
            raise TaskError(f"{instruction.name} before FROM", instruction.where, "only ARG may stand there")
        if i > first and instruction.name == "FROM":
            raise TaskError("a second FROM", instruction.where, "builds of one stage are supported")
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$X`, `${X}`, `${X:-word}`, `${X:+word}` as Docker does; an unknown name is empty, a backslash quotes."""

    def value(match: re.Match[str]) -> str:
        quoted, plain, braced, operator, word = match.groups()
        if quoted is not None:
            return quoted if quoted == "$" else "\\" + quoted
        found = variables.get(plain or braced, "")
        if operator == "-":
            return found or word
        if operator == "+":
            return word if found else ""
        return found

    return _VARIABLE.sub(value, text)


def pairs(instruction: Instruction) -> dict[str, str]:
    """The `name=value` of ENV, or its old form `ENV name value`. Raises TaskError."""
    first = instruction.rest.split(None, 1)
    if len(first) == 2 and "=" not in first[0]:
        return {first[0]: first[1].strip()}
    found: dict[str, str] = {}
    for word in instruction.words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise TaskError(f"{instruction.name} {word!r}", instruction.where, "name=value is needed")
        found[name] = value
    return found


def _logical_lines(lines: list[str]) -> list[tuple[int, str]]:
    """Joined at trailing backslashes, comments dropped, also between continued lines."""
    found: list[tuple[int, str]] = []
    text, start = "", 0
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start or number
        stripped = line.rstrip()
        if stripped.endswith("\\"):
            text += stripped[:-1]
            continue
        found.append((start, (text + line).strip()))
        text, start = "", 0
    if text.strip():
        found.append((start, text.strip()))
    return [(number, text) for number, text in found if text]


def _instruction(text: str, where: str) -> Instruction:
    name, _, rest = text.partition(" ")
    name, rest = name.upper(), rest.strip()
    if name in IGNORED:
        return Instruction(name, {}, (), rest, where)
    if name not in KNOWN:
        raise TaskError(f"instruction {name} is not supported", where, f"supported: {', '.join(KNOWN)}")
    flags: dict[str, str] = {}
    while rest.startswith("--") and name in ("COPY", "ADD", "RUN", "FROM"):
        flag, _, rest = rest.partition(" ")
        key, _, value = flag[2:].partition("=")
        flags[key] = value
        rest = rest.lstrip()
    if not rest:
        raise TaskError(f"{name} without arguments", where)
    _check(name, flags, rest, where)
    return Instruction(name, flags, _words(name, rest, where), rest, where)


def _check(name: str, flags: dict[str, str], rest: str, where: str) -> None:
    allowed = {"COPY": ("chmod", "chown"), "ADD": ("chmod", "chown"), "FROM": ("platform",)}.get(name, ())
    for flag, value in flags.items():
        if flag not in allowed:
            raise TaskError(f"{name} --{flag} is not supported", where, f"supported: {', '.join(allowed) or 'no flag'}")
        if flag == "chown" and value not in ("root", "root:root", "0", "0:0"):
            raise TaskError(f"{name} --chown={value} is not supported", where, "supported: root")
        if flag == "chmod" and not re.fullmatch(r"[0-7]{3,4}", value):
            raise TaskError(f"{name} --chmod={value} is not supported", where, "an octal mode is needed")
    if "<<" in rest and name in ("COPY", "ADD", "RUN") and re.search(r"<<-?['\"]?\w+", rest):
        raise TaskError(f"{name} with a heredoc is not supported", where)
    if name == "USER" and rest.split(":")[0] not in ("root", "0"):
        raise TaskError(f"USER {rest} is not supported", where, "supported: root")
    if name == "ADD" and re.search(r"(^|\s)(https?|git|ftp)://|^git@", rest):
        raise TaskError("ADD of a URL is not supported", where, "there is no network in a build")


def _words(name: str, rest: str, where: str) -> tuple[str, ...]:
    if name == "RUN":
        return ()
    if rest.startswith("[") and name in ("COPY", "ADD"):
        try:
            words = json.loads(rest)
        except ValueError as error:
            raise TaskError(f"{name}: {error}", where) from error
        return tuple(str(word) for word in words)
    try:
        return tuple(shlex.split(rest.replace("\\$", "\\\\$")))
    except ValueError as error:
        raise TaskError(f"{name}: {error}", where) from error
