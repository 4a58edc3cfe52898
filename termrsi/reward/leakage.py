"""Does a text give away a task's verifier or solution? Deterministic, no model; it returns categories and never text.

A scanner may read the secrets because only a category leaves it: a planner that is told more would learn them from the
feedback. Ours, after the screening step of RSR. What says the same in other words only a critic can find, which is a model that has
no access to the secrets: that is labelled as its finding (`critic_leak`), and no scan claims it.
"""

import base64
import binascii
import codecs
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from termrsi.records import TaskSpec

NGRAM = 8
MIN_DIGITS = 4
MIN_STRING = 12
MIN_SPLIT = 6  # letters and digits that a string cut in pieces must have
MAX_FILE_BYTES = 1_000_000

_TOKEN = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d_,]*(?:\.\d+)?(?![\w])")
_HASH = re.compile(r"(?<![\w])[0-9a-fA-F]{8,}(?![\w])")
_QUOTED = re.compile(r"\"([^\"\n]{12,})\"|'([^'\n]{12,})'")
_MIXED = re.compile(r"[^\s\"'`()\[\]{}<>;,|&]{12,}")
_PATH = re.compile(r"(?<![\w.\-/])(?:/[\w.@+\-]+)+")
_NAMES = re.compile(r"\bdef (test_\w+)|\bclass (Test\w+)|^\s*(?:function )?(check_\w+|test_\w+) *\(\)", re.MULTILINE)
_LETTERS = re.compile(r"[a-z0-9]+")
_FILE_NAME = re.compile(r"[\w.\-/]+\.\w{1,5}|/[\w.\-/]+")
_SYSTEM = ("/dev/", "/bin/", "/usr/bin/", "/usr/local/bin/", "/etc/passwd", "/proc/")


# What a comparison of the verifier holds in quotes and says nothing of the result.
_COMMON = frozenset({"utf-8", "utf8", "ascii", "latin-1", "PASS", "FAIL", "PASSED", "FAILED", "__main__", "shell=True"})
_COMPARES = re.compile(r"==|!=|\bassert|\bin\b|\bgrep\b|\bdiff\b|\bcmp\b|\[ |\btest -|Equal|startswith|endswith")
_SHORT_QUOTED = re.compile(r"\"([^\"\n]{5,})\"|'([^'\n]{5,})'")
_BASE64 = re.compile(r"(?<![\w+/])[A-Za-z0-9+/]{8,}={0,2}(?![\w+/])")
_HEX = re.compile(r"(?<!\w)(?:[0-9a-fA-F]{2}){6,}(?!\w)")
_READS = re.compile(
    r"(?<![\w.\-])(?:/tests|/solution|/oracle|/logs/verifier)\b|\b(?:run-tests|test|solve|solution)\.sh\b|\bsolution\.yaml\b"
)


@dataclass(frozen=True, slots=True)
class _Secrets:
    """What a task's verifier and solution hold, and what the task says itself."""

    public: str
    workdir: str
    tests: dict[str, str]  # by path
    solution: str

    @property
    def verifier(self) -> str:
        return "\n".join(self.tests.values())

    @property
    def both(self) -> str:
        return f"{self.verifier}\n{self.solution}"


def scan(task: TaskSpec, text: str) -> tuple[str, ...]:
    """Categories of leakage in `text`, sorted; empty if there is none.

    Against the files of `tests/` and `solution/` (`steps/` too), minus what the instruction says itself:
    ngram: 8 tokens in a row of verifier text; literal: a number of 4 and more digits, or a string of 12 and more characters of
    verifier or solution; hash: one of theirs; path: an absolute path of the tests; test_name: a test file's or function's name;
    expected_output: a shorter string with a digit in it that a line of the verifier compares with; encoded: any of these in base64,
    hexadecimal or rot13; reversed: written backwards; split: cut by spaces, line ends, quotes or signs; reads_tests: where tests or
    solution lie, as a command would name it.
    """
    secrets = _secrets(task)
    found = _plain(text, secrets)
    if any(_plain(other, secrets) - {"ngram"} - found for other in _decoded(text)):
        found.add("encoded")
    if _hidden(text[::-1], text, secrets):
        found.add("reversed")
    if not found & {"literal", "hash", "expected_output", "test_name"} and _is_split(text, secrets):
        found.add("split")
    if any(match.group() not in secrets.public for match in _READS.finditer(text)):
        found.add("reads_tests")
    return tuple(sorted(found))


def _secrets(task: TaskSpec) -> _Secrets:
    root = Path(task.path)
    solution = "\n".join(content for _, content in texts(root, "solution"))
    return _Secrets(task.instruction, task.environment.workdir or "/app", dict(texts(root, "tests")), solution)


def _plain(text: str, secrets: _Secrets) -> set[str]:
    """Of a text as it stands."""
    public = secrets.public
    found: set[str] = set()
    if (_ngrams(text) & _ngrams(secrets.verifier)) - _ngrams(public):
        found.add("ngram")
    if _has_literal(text, secrets.both, public):
        found.add("literal")
    if _has_hash(text, secrets.both, public):
        found.add("hash")
    if _has_path(text, secrets.verifier, public, secrets.workdir):
        found.add("path")
    if any(_mentions(text, name) and not _mentions(public, name) for name in _test_names(secrets.tests)):
        found.add("test_name")
    if any(_stands_in(text, string) and string not in public for string in _expected(secrets.verifier)):
        found.add("expected_output")
    return found


def _decoded(text: str) -> Iterator[str]:
    """What parts of a text say in base64 or hexadecimal, if that is text, and the whole in rot13."""
    for match in _BASE64.findall(text):
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            yield base64.b64decode(match + "=" * (-len(match) % 4), validate=True).decode()
    for match in _HEX.findall(text):
        with contextlib.suppress(UnicodeDecodeError):
            yield bytes.fromhex(match).decode()
    yield codecs.encode(text, "rot13")


def _hidden(turned: str, text: str, secrets: _Secrets) -> bool:
    """Whether a text that was turned round holds a secret which the text itself and the task do not."""
    known = {_digits(number) for number in _numbers(text) | _numbers(secrets.public)}
    numbers = {_digits(number)[::-1] for number in _numbers(text)} & {_digits(number) for number in _numbers(secrets.both)}
    if any(len(number) > MIN_DIGITS for number in numbers - known):
        return True
    strings = _strings(secrets.both) | _hashes(secrets.both) | _expected(secrets.verifier) | _test_names(secrets.tests)
    return any(s in turned and s not in text and s not in secrets.public and s != s[::-1] for s in strings if len(s) > MIN_DIGITS)


def _is_split(text: str, secrets: _Secrets) -> bool:
    squeezed, public = _squeezed(text), _squeezed(secrets.public)
    # Whole words in their order are ordinary speech about the same files and programs: what is looked for is cut within one.
    spoken = " ".join(_LETTERS.findall(text.lower()))
    secret = (" ".join(_LETTERS.findall(s.lower())) for s in _strings(secrets.both) | _hashes(secrets.both))
    strings = {_squeezed(words) for words in secret if words not in spoken}
    numbers = {_digits(number) for number in _numbers(secrets.both)}
    return any(len(s) >= MIN_SPLIT and s in squeezed and s not in public for s in strings) or any(
        len(n) >= MIN_SPLIT and n in _digits(text) and n not in _digits(secrets.public) for n in numbers
    )


def _digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def _squeezed(text: str) -> str:
    """Letters and digits alone."""
    return "".join(_LETTERS.findall(text.lower()))


def _hashes(secret: str) -> set[str]:
    return {match.lower() for match in _HASH.findall(secret) if re.search(r"\d", match)}


def _has_hash(text: str, secret: str, public: str) -> bool:
    return any(match in _hashes(secret) and match not in public.lower() for match in map(str.lower, _HASH.findall(text)))


def _expected(verifier: str) -> set[str]:
    """Short quoted strings of lines that compare, unless they are plain words, names of files or common arguments."""
    found = {(a or b).strip() for line in verifier.splitlines() if _COMPARES.search(line) for a, b in _SHORT_QUOTED.findall(line)}
    return {
        string
        for string in found
        if len(string) < MIN_STRING and string not in _COMMON and re.search(r"\d", string) and not _FILE_NAME.fullmatch(string)
    }


def _stands_in(text: str, string: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(string)}(?!\w)", text) is not None


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
