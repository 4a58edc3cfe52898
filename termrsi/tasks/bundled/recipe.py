"""What one generated task is made of, and the seeded draw that its names and numbers come from."""

import hashlib
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from termrsi.tasks.bundled.words import pool


@dataclass(frozen=True, slots=True)
class Recipe:
    """One task before it is written. Paths are relative to /app, where agent, checks and solution run.

    `wordings`: instructions of the same meaning, a multiple of five. Of each five the first three are for train, the fourth for
    validation, the fifth for heldout. `checks`: name -> bash that succeeds; the functions `text FILE TEXT`, `flat FILE TEXT`
    and `run COMMAND` are at hand. `setup`: RUN lines.
    """

    wordings: tuple[str, ...]
    checks: dict[str, str]
    solution: str
    files: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()


class Draw:
    """Names, words and numbers for one task; no word comes twice."""

    def __init__(self, family: str, level: int, split: str, seed: int) -> None:
        # The split is hashed in: the same seed number gives unrelated tasks in different splits.
        self.rng = _rng(f"{family}/{level}/{split}/{seed}")
        first = list(pool(split))
        _rng(f"{family}/{level}/{split}").shuffle(first)
        # The first word, which every instruction names, goes through the pool seed by seed: no two tasks alike before its end.
        lead = first[seed % len(first)]
        self._words = [word for word in first if word != lead]
        self.rng.shuffle(self._words)
        self._words.append(lead)

    def word(self) -> str:
        return self._words.pop()

    def words(self, n: int) -> list[str]:
        return [self.word() for _ in range(n)]

    def file(self, extension: str = "txt") -> str:
        return f"{self.word()}.{extension}"

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def text(self, lines: int) -> str:
        """Lines of two words; ends with a newline. Takes two of the words out of the pool, and mixes them with numbers."""
        first, second = self.word(), self.word()
        rows = [f"{first} {self.number(10, 99)}" if i % 2 else f"{second} {self.number(100, 999)}" for i in range(lines)]
        return "\n".join(rows) + "\n"


def _rng(label: str) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big"))


Maker = Callable[[Draw], Recipe]


def same(file: str, content: str) -> str:
    """A check: the file holds exactly this, newlines at its end aside."""
    return f"text {file} {shlex.quote(content.rstrip(chr(10)))}"


def flat(file: str, content: str) -> str:
    """A check: the file holds this, all white space aside."""
    return f"flat {file} {shlex.quote(''.join(content.split()))}"


def exists(*files: str) -> str:
    return " && ".join(f"[ -f {file} ]" for file in files)


def gone(*files: str) -> str:
    return " && ".join(f"[ ! -e {file} ] && [ ! -L {file} ]" for file in files)


def both(*checks: str) -> str:
    return " && ".join(checks)


def prints(command: str, output: str) -> str:
    """A check: a command (bounded in time) prints exactly this on standard output."""
    return f'[ "$(run {command})" = {shlex.quote(output)} ]'
