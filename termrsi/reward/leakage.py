"""Does a text give away a task's verifier or solution? Deterministic, no model; it returns categories and never text.

A scanner may read the secrets because only a category leaves it: a planner that is told more would learn them from the
feedback. Ours, after the screening step of RSR; a critic without access to the secrets handles paraphrase.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from termrsi.records import TaskSpec

NGRAM = 8
MIN_DIGITS = 4
MIN_STRING = 12
MAX_FILE_BYTES = 1_000_000

_TOKEN = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d_,]*(?:\.\d+)?(?![\w])")
_HASH = re.compile(r"(?<![\w])[0-9a-fA-F]{8,}(?![\w])")
_QUOTED = re.compile(r"\"([^\"\n]{12,})\"|'([^'\n]{12,})'")
_MIXED = re.compile(r"[^\s\"'`()\[\]{}<>;,|&]{12,}")
_PATH = re.compile(r"(?<![\w.\-/])(?:/[\w.@+\-]+)+")
_NAMES = re.compile(r"\bdef (test_\w+)|\bclass (Test\w+)|^\s*(?:function )?(check_\w+|test_\w+) *\(\)", re.MULTILINE)
_SYSTEM = ("/dev/", "/bin/", "/usr/bin/", "/usr/local/bin/", "/etc/passwd", "/proc/")


def scan(task: TaskSpec, text: str) -> tuple[str, ...]:
    """Categories of leakage in `text`, sorted: "literal", "ngram", "path", "test_name"; empty if there is none.

    Against the files of `tests/` and `solution/` (`steps/` too), minus what the instruction says itself:
    ngram: 8 tokens in a row of verifier text; literal: a number of 4 and more digits, a hash, or a string of 12 and more
    characters of verifier or solution; path: an absolute path of the tests; test_name: a test file's or function's name.
    """
    root, public = Path(task.path), task.instruction
    tests = dict(texts(root, "tests"))
    verifier = "\n".join(tests.values())
    solution = "\n".join(content for _, content in texts(root, "solution"))
    found: set[str] = set()
    if (_ngrams(text) & _ngrams(verifier)) - _ngrams(public):
        found.add("ngram")
    if _has_literal(text, f"{verifier}\n{solution}", public):
        found.add("literal")
    if _has_path(text, verifier, public, task.environment.workdir or "/app"):
        found.add("path")
    if any(_mentions(text, name) and not _mentions(public, name) for name in _test_names(tests)):
        found.add("test_name")
    return tuple(sorted(found))


def texts(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """Name and content of the text files of a folder of the task, and of its steps."""
    for place in (root / folder, *sorted(root.glob(f"steps/*/{folder}"))):
        for path in sorted(place.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES:
                content = path.read_bytes()
                # A binary file still has a name that must not be told.
                yield str(path.relative_to(root)), "" if b"\0" in content else content.decode("utf-8", "replace")


def _ngrams(text: str) -> set[tuple[str, ...]]:
    tokens = _TOKEN.findall(text.lower())
    return {tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)}


def _has_literal(text: str, secret: str, public: str) -> bool:
    if (_numbers(text) & _numbers(secret)) - _numbers(public):
        return True
    hashes = {match.lower() for match in _HASH.findall(secret)}
    if any(match in hashes and match not in public.lower() for match in map(str.lower, _HASH.findall(text))):
        return True
    return any(string in text and string not in public for string in _strings(secret))


def _numbers(text: str) -> set[str]:
    """Numbers with 4 and more significant digits, without separators and leading zeros."""
    plain = (re.sub(r"[_,]", "", match).lstrip("0") for match in _NUMBER.findall(text))
    return {number for number in plain if len(number.replace(".", "").lstrip("0")) >= MIN_DIGITS}


def _strings(secret: str) -> set[str]:
    """Quoted strings, and unquoted words that are no plain words (they hold a digit or a sign between letters)."""
    quoted = {(a or b).strip() for a, b in _QUOTED.findall(secret)}
    words = {word.strip(".:=") for word in _MIXED.findall(secret) if re.search(r"\d", word) and re.search(r"[A-Za-z]", word)}
    return {string for string in quoted | words if len(string) >= MIN_STRING and not string.startswith(_SYSTEM)}


def _has_path(text: str, verifier: str, public: str, workdir: str) -> bool:
    known = set(_paths(verifier))
    for path in _paths(text):
        if path not in known or path == workdir or path == "/tmp" or path.startswith(_SYSTEM):
            continue
        # The instruction may name the same file relative to the working directory.
        if path not in public and path.removeprefix(workdir.rstrip("/") + "/") not in public:
            return True
    return False


def _paths(text: str) -> list[str]:
    """Absolute paths, without the full stop of a sentence that ends with one."""
    return [path.rstrip(".") for path in _PATH.findall(text)]


def _test_names(tests: dict[str, str]) -> set[str]:
    files = {Path(name).name for name in tests}
    functions = {name for content in tests.values() for match in _NAMES.findall(content) for name in match if name}
    # The id of a check, as reports show it; a name of one plain word would match ordinary prose.
    bare = {name.removeprefix("check_") for name in functions if name.startswith("check_")}
    return files | functions | {name for name in bare if "_" in name}


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None
