"""Rules that flag a teacher's continuation for the judge of recoveries. They look for what may be wrong; the judge decides.

ReTerm (arXiv 2610.18484) states that rules flag and a model judges; the rules are ours. They see instruction and turns, never a
verifier. Shell is read roughly, by its words: a flag too many costs one question to the judge, and is no refusal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from termrsi.algo.advantage import jaccard, words
from termrsi.records import Turn

TIMES = 3  # so many failures of one command, with no successful change between them
ALIKE = 0.8  # commands are equivalent above this similarity of their words, as River's repetition penalty has it

# Programs that change nothing by themselves; tests are among them, whatever caches they leave.
_LOOKS = re.compile(
    r"\[|awk|basename|cat|cd|cmp|command|curl|cut|date|df|diff|dirname|du|echo|egrep|env|false|fgrep|file|find|free|grep|head|hexdump|"
    r"history|hostname|id|jq|less|ls|lsof|man|md5sum|more|nc|netstat|nl|od|pgrep|pg_isready|ping|printf|ps|pwd|pytest|readlink|"
    r"realpath|rg|sed|sha256sum|sleep|sort|ss|stat|tail|test|tr|tree|true|type|uname|uniq|wait|wc|which|whoami|xxd"
)
_BEFORE = frozenset({"sudo", "env", "time", "nohup", "nice", "exec"})
_CHANGES = re.compile(
    r"\bsed\s+(?:\S+\s+)*?-\w*i|\bfind\b.*\s-(?:delete|exec)|\bcurl\b.*\s-(?:\w*[oOTdFX]|-output|-data|-request)|\btee\b"
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_HARMLESS = re.compile(r"\d?>&\d|&?\d?>>?\s*/dev/(?:null|stdout|stderr)")
_WAITS = re.compile(r"\b(?:sleep|wait|until|inotifywait)\b|--wait\b|--retry\b")

# A line's end alone ends no sentence: authors wrap their lines.
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*(?=(?:[-*#]|\d+[.)])\s)")
_NOT = (
    r"(?:must|may|shall|should|do|does|can|could) not|mustn't|shouldn't|don't|cannot|can't|never|avoid|forbidden|prohibited|"
    r"not allowed|without|unchanged|untouched|intact|no (?:network|internet|sudo|root|external|other|new|additional|further)"
)
_BOUND = r"only|at most|no more than|not more than|except|nothing else"
_PROHIBITS, _BOUNDS = (re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for pattern in (_NOT, _BOUND))
_OBJECT = re.compile(r"`([^`]+)`|(?<![\w/])(~?/[\w./*-]+|[\w-]+(?:/[\w.-]+)+/?|[\w-]*\.?[\w-]+\.\w{1,6})(?![\w/])")
_ALTERS = re.compile(
    r"\b(?:modif|chang|edit|overwrit|alter|touch|delet|remov|renam|mov|writ|creat|replac|unchanged|untouched|intact)", re.IGNORECASE
)
# What a sentence forbids -> the programs that do it.
_ACTIONS = (
    (r"network|internet|download|online", r"curl|wget|pip3?|apt|apt-get|git\s+(?:clone|pull|fetch)|npm|ssh|scp|rsync|nc"),
    (r"install", r"pip3?|apt|apt-get|dpkg|npm|conda|cargo|gem|make\s+install"),
    (r"sudo|root|superuser", r"sudo|su"),
    (r"delet|remov", r"rm|unlink|shred|rmdir|truncate|git\s+clean|-delete"),
    (r"renam|mov(?:e|ing)", r"mv|rename"),
    (r"permission|owner|chmod|chown", r"chmod|chown|chgrp|setfacl"),
    (r"restart|kill|stop|reboot", r"kill|pkill|killall|systemctl|service|reboot|shutdown"),
)
_FORBIDS = tuple(
    (re.compile(rf"\b(?:{said})", re.IGNORECASE), re.compile(rf"(?<![\w/.-])(?:{run})(?![\w-])")) for said, run in _ACTIONS
)


@dataclass(frozen=True, slots=True)
class Touch:
    """A sentence of the instruction that constrains, and the turns (from 1) whose commands may touch it."""

    sentence: str
    turns: tuple[int, ...]


@dataclass(slots=True)
class _Failing:
    """One failing command since the last successful change."""

    said: frozenset[str]
    turns: list[int] = field(default_factory=list)
    waited: bool = True  # before each time after the first


def repeated_failures(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """Turns (from 1) of each command that failed TIMES or more, itself or an equivalent, with no successful change between.

    Only commands are compared: equal errors of unlike commands are none, nor are tests run again after another repair. Polling is
    none where something waited before each further try and the command succeeded in the end.
    """
    failing: list[_Failing] = []
    found: list[tuple[int, ...]] = []
    waited = False

    def close(ended: Sequence[_Failing]) -> None:
        found.extend(tuple(one.turns) for one in ended if len(one.turns) >= TIMES)

    for number, turn in enumerate(turns, 1):
        if not turn.command:
            continue
        said = words(turn.command)
        waited = waited or bool(_WAITS.search(turn.command))
        same = next((one for one in failing if jaccard(one.said, said) > ALIKE), None)
        if turn.timed_out or turn.exit_code not in (None, 0):
            if same is None:
                same = _Failing(said)
                failing.append(same)
            elif not waited:
                same.waited = False
            same.turns.append(number)
            waited = bool(_WAITS.search(turn.command))
            continue
        if same is not None:  # it succeeded in the end
            failing.remove(same)
            close([] if same.waited else [same])
        if changes(turn.command):
            close(failing)
            failing = []
    close(failing)
    return sorted(found)


def changes(command: str) -> bool:
    """Whether it may change anything: any program but those that look, or output sent to a file."""
    if _CHANGES.search(command):
        return True
    plain = _HARMLESS.sub("", _QUOTED.sub("_", command))
    return ">" in plain or any(not _LOOKS.fullmatch(_program(part)) for part in re.split(r"&&|\|\||[;|&\n]", plain) if part.strip())


def touched_constraints(instruction: str, turns: Sequence[Turn]) -> list[Touch]:
    """Sentences that forbid or bound something, with the commands that may touch it; those that no command touches are left out.

    A sentence that forbids is touched by a command that names what it names (where it speaks of altering: a command that may change
    it, or a directory above it), or that runs a program known to do what it forbids; if it names nothing that can be looked for, by
    any command that may change something. So is one that bounds: only, at most, except.
    """
    commands = [(number, turn.command) for number, turn in enumerate(turns, 1) if turn.command]
    found = []
    for sentence in (" ".join(part.split()) for part in _SENTENCE.split(instruction)):
        if _PROHIBITS.search(sentence) or _BOUNDS.search(sentence):
            touching = tuple(number for number, command in commands if _touches(sentence, command))
            if touching:
                found.append(Touch(sentence, touching))
    return found


def _touches(sentence: str, command: str) -> bool:
    if not _PROHIBITS.search(sentence):
        return changes(command)
    named = [(quoted or name).rstrip(".,:") for quoted, name in _OBJECT.findall(sentence)]
    objects = [name for name in named if name not in {"e.g", "i.e"}]
    programs = [run for said, run in _FORBIDS if said.search(sentence)]
    if any(run.search(command) for run in programs):
        return True
    if objects:
        alters = changes(command)
        return (alters or not _ALTERS.search(sentence)) and any(_names(command, name, alters=alters) for name in objects)
    return not programs and changes(command)


def _names(command: str, name: str, *, alters: bool) -> bool:
    """Whether the command names the object, by path or last part; one that alters, also by a directory above it or a pattern."""
    last = name.rstrip("/").rpartition("/")[2] or name
    if re.search(rf"(?<![\w-]){re.escape(last)}(?![\w-])", command):
        return True
    above = [word.rstrip("/*") for word in re.split(r"[\s;&|<>'\"=()]+", command) if word.startswith(("/", "~"))]
    return alters and ("*" in command or any(word and name.startswith(f"{word}/") for word in above))


def _program(part: str) -> str:
    """The name of what a simple command runs, without settings and wrappers before it."""
    names = [word for word in part.split() if not re.match(r"\w+=", word)]
    while names and (names[0] in _BEFORE or (names[0] == "timeout" and len(names) > 2)):
        names = names[2:] if names[0] == "timeout" else names[1:]
    if names[:2] and names[0].startswith("python") and names[1:3] in (["-m", "pytest"], ["-m", "unittest"]):
        return "pytest"
    return names[0].rpartition("/")[2] if names else "true"
