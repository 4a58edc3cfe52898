"""Does an instruction share a run of 13 words with a benchmark? (Tmax removes tasks by such overlap; the details are ours.)

Words are runs of letters, digits and underscores, lower-cased. Of the benchmarks 64-bit hashes are kept and no text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from termrsi import tasks
from termrsi.errors import ConfigError, TaskError

N = 13
MAX_GRAMS = 20_000_000  # hashes of 8 bytes, some 100 bytes each in a set

_WORD = re.compile(r"\w+")


def grams(text: str) -> Iterator[int]:
    """A hash of each run of N words."""
    words = _WORD.findall(text.lower())
    for i in range(len(words) - N + 1):
        yield int.from_bytes(hashlib.blake2b(" ".join(words[i : i + N]).encode(), digest_size=8).digest(), "big")


class Benchmarks:
    """An index of the runs of words of benchmarks, built once."""

    def __init__(self, paths: Iterable[Path | str] = (), *, limit: int = MAX_GRAMS) -> None:
        """`paths`: see `texts`. Raises ConfigError for one without a text, and for more than `limit` runs in all."""
        self._known: set[int] = set()
        for path in paths:
            documents = 0
            for text in texts(Path(path)):
                documents += 1
                self._known.update(grams(text))
                if len(self._known) > limit:
                    raise ConfigError(f"more than {limit} runs of {N} words", str(path), "give fewer benchmarks")
            if not documents:
                raise ConfigError("no text to compare with", str(path), "valid: a tree of tasks, .txt or .jsonl files")

    def __len__(self) -> int:
        return len(self._known)

    def shares_a_run(self, text: str) -> bool:
        return any(gram in self._known for gram in grams(text))


def texts(path: Path) -> Iterator[str]:
    """Instructions of a tree of Harbor or Terminal-Bench tasks; of a tree without tasks its .txt and .jsonl files; of a file its
    whole text, or if it is a .jsonl each string in each line.

    Raises ConfigError for a line that is no JSON.
    """
    if path.is_dir():
        try:
            found = tasks.load_dir(path)
        except TaskError:  # no tasks: files
            for file in sorted(path.rglob("*")):
                if file.is_file() and file.suffix in (".txt", ".jsonl"):
                    yield from texts(file)
            return
        yield from (task.instruction for task in found.tasks)
        for refused in found.skipped:  # what cannot be run can be copied
            files = [Path(refused.path) / name for name in ("instruction.md", "task.yaml")]
            yield from (file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield from _strings(json.loads(line))
                    except ValueError as error:
                        raise ConfigError(f"line {number} is no JSON", str(path)) from error
    elif path.is_file():
        yield path.read_text(encoding="utf-8", errors="replace")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
