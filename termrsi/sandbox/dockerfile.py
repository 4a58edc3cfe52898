"""The subset of Dockerfiles that terminal tasks use, parsed into instructions. What is not understood is refused by line."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from termrsi.errors import TaskError

IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME")
KNOWN = ("FROM", "WORKDIR", "COPY", "ADD", "RUN", "ENV", "ARG", "USER", "SHELL")
_HEREDOC = re.compile(r"(?<![<\w])<<(?!<)(-?)(['\"]?)([A-Za-z_]\w*)\2")
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?::?([-+])([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """Lines up to `name`, without it. `literal`: its name was quoted, so that nothing in it is expanded."""

    name: str
    body: str
    literal: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `flags`: `--name=value`; `words`: arguments, not yet expanded; `rest`: the text after the flags.

    `heredocs`: the lines below it that belong to it, in order.
    """

    name: str
    flags: dict[str, str]
    words: tuple[str, ...]
    rest: str
    where: str  # file:line
    heredocs: tuple[Heredoc, ...] = ()


def parse(path: Path) -> list[Instruction]:
    """Raises TaskError naming file:line and the instruction."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="strict").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot be read: {error}", str(path)) from error
    found: list[Instruction] = []
    for number, text, heredocs in _logical_lines(lines, path):
        found.append(replace(_instruction(text, f"{path}:{number}"), heredocs=heredocs))
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


def _logical_lines(lines: list[str], path: Path) -> list[tuple[int, str, tuple[Heredoc, ...]]]:
    """Joined at trailing backslashes, comments dropped, also between continued lines; with the heredocs that follow each."""
    found: list[tuple[int, str, tuple[Heredoc, ...]]] = []
    text, start = "", 0
    numbered = iter(enumerate(lines, 1))
    for number, line in numbered:
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start or number
        stripped = line.rstrip()
        if stripped.endswith("\\"):
            text += stripped[:-1]
            continue
        whole = (text + line).strip()
        heredocs = tuple(_heredoc(mark, numbered, f"{path}:{start}") for mark in _marks(whole))
        found.append((start, whole, heredocs))
        text, start = "", 0
    if text.strip():
        found.append((start, text.strip(), ()))
    return [entry for entry in found if entry[1]]


def _marks(text: str) -> list[re.Match[str]]:
    """The heredocs that an instruction announces; of others than these three Docker knows none."""
    return list(_HEREDOC.finditer(text)) if text.split(None, 1)[0].upper() in ("RUN", "COPY", "ADD") else []


def _heredoc(mark: re.Match[str], numbered: Iterator[tuple[int, str]], where: str) -> Heredoc:
    """Consumes its lines. Raises TaskError if the file ends before it."""
    tabs, quote, name = mark.groups()
    body: list[str] = []
    for _, line in numbered:
        line = line.lstrip("\t") if tabs else line
        if line == name:
            return Heredoc(name, "".join(f"{one}\n" for one in body), bool(quote))
        body.append(line)
    raise TaskError(f"the heredoc {name} has no end", where, f"a line that is {name} alone")


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
    if name == "USER" and not re.fullmatch(r"[\w.$@{}-]+(:[\w.${}-]+)?", rest):
        raise TaskError(f"USER {rest} is not a name", where, "USER NAME, or NAME:GROUP")
    if name == "SHELL" and not _is_list(rest):
        raise TaskError(f"SHELL {rest} is not a list", where, 'for example SHELL ["/bin/bash", "-c"]')
    if name == "ADD" and re.search(r"(^|\s)(https?|git|ftp)://|^git@", rest):
        raise TaskError("ADD of a URL is not supported", where, "there is no network in a build")


def _is_list(text: str) -> bool:
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)


def _words(name: str, rest: str, where: str) -> tuple[str, ...]:
    if name == "RUN":
        return ()
    if rest.startswith("[") and name in ("COPY", "ADD", "SHELL"):
        try:
            words = json.loads(rest)
        except ValueError as error:
            raise TaskError(f"{name}: {error}", where) from error
        return tuple(str(word) for word in words)
    try:
        return tuple(shlex.split(rest.replace("\\$", "\\\\$")))
    except ValueError as error:
        raise TaskError(f"{name}: {error}", where) from error
