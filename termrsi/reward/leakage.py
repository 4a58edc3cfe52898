"""Does a text give away a task's verifier or solution? Deterministic, no model; it returns categories and never text.

A scanner may read the secrets because only a category leaves it: a planner that is told more would learn them from the
feedback. Ours, after the screening step of RSR. What says the same in other words only a critic can find, which is a model that has
no access to the secrets: that is labelled as its finding (`critic_leak`), and no scan claims it. So is a plain short word that the
verifier does not compare with in quotes on one line, or one of the words that every runbook uses (`common_words`).

Of the solution, literals and hashes are secret, and its commands are not: commands are what a runbook is for, and a solver's may be
the same. So runs of words and paths are compared with the verifier (and the author's truth) alone, and of the solution's strings
those that are program text (`sed 's/a/b/'`) are left out.
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
from termrsi.reward.common_words import WORDS
from termrsi.reward.secret_files import SOLUTION, TRUTH, VERIFIER, texts

NGRAM = 8
MIN_DIGITS = 4
MIN_STRING = 12
MIN_SPLIT = 6  # letters and digits that a string cut in pieces must have
LONGEST_LINE = 1000  # of code; a longer one is data

_TOKEN = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d_,]*(?:\.\d+)?(?![\w])")
_HASH = re.compile(r"(?<![\w])[0-9a-fA-F]{8,}(?![\w])")
_QUOTED = re.compile(r"\"([^\"\n]{12,})\"|'([^'\n]{12,})'")
_MIXED = re.compile(r"[^\s\"'`()\[\]{}<>;,|&]{12,}")
_PATH = re.compile(r"(?<![\w.\-/])(?>(?:/[\w.@+\-]+)+)(?!/[,;!])")  # what ends so is an address of sed's: /from/,/to/
_NAMES = re.compile(r"\bdef (test_\w+)|\bclass (Test\w+)|^\s*(?:function )?(check_\w+|test_\w+) *\(\)", re.MULTILINE)
_LETTERS = re.compile(r"[a-z0-9]+")
_FILE_NAME = re.compile(r"[\w.\-/]+\.\w{1,5}|/[\w.\-/]+")
_SYSTEM = ("/dev/", "/bin/", "/usr/bin/", "/usr/local/bin/", "/etc/passwd", "/proc/")

# Program text: what lies between two quoted strings of a pipe, a variable or a command in one, sed's substitution, awk's block.
_PROGRAM = re.compile(r"^[|&;]|\$[\w({]|(?:^|[;,\s/\d])[sy]([/|#,]).*\1|^\{.*\}$|[\s;]\{|\\\(")
_PHRASE = re.compile(r"[a-z]+(?: [a-z]+){2,}")

# What a comparison of the verifier holds in quotes and says nothing of the result.
_COMMON = frozenset({"utf-8", "utf8", "ascii", "latin-1", "PASS", "FAIL", "PASSED", "FAILED", "__main__", "shell=True"})
_COMPARES = re.compile(r"==|!=|\bassert|\bin\b|\bgrep\b|\bdiff\b|\bcmp\b|\[ |\btest -|Equal|startswith|endswith")
_SHORT_QUOTED = re.compile(r"\"([^\"\n]{5,})\"|'([^'\n]{5,})'")
# A quoted string that something must be equal to: Python's signs and assertions, the shell's brackets, grep for a whole line.
_EQUALS = re.compile(
    r"(?:==|!=|(?:\[|\btest ).*\s=|\bgrep(?: -\w+)* -\w*x\w*(?: -\w+)*|\bassertEquals?\(.*,)"
    r" *(?P<q>[\"'])(?P<after>[^\"'\n]{5,})(?P=q)"
    r"|(?P<p>[\"'])(?P<before>[^\"'\n]{5,})(?P=p) *(?:==|!=)"
    r"|\bassertEquals?\( *(?P<o>[\"'])(?P<inner>[^\"'\n]{5,})(?P=o) *,"
)
_BASE64 = re.compile(r"(?<![\w+/])[A-Za-z0-9+/]{8,}={0,2}(?![\w+/])")
_HEX = re.compile(r"(?<!\w)(?:[0-9a-fA-F]{2}){6,}(?!\w)")
_READS = re.compile(
    r"(?<![\w.\-])(?:/(?:tests|solution|oracle|logs/verifier)\b|tests/|solution/(?=[*$\s\"'`]|[\w*]+\.\w|$))"
    r"|\b(?:run-tests|test|solve|solution)\.sh\b|\bsolution\.yaml\b|\btruth\.md\b"
)
_FINDS = re.compile(
    r"\bfind\b[^\n;]*?\s-i?(?:name|path|wholename|regex)\s+[\"']?"
    r"([^\s\"']*(?<![A-Za-z])(?:(?:conf)?tests?|solution|solve|oracle)(?![A-Za-z])[^\s\"']*)"
    r"|\b(?:locate|fd|fdfind|grep|rg|ls)\b[^\n;]*?(?<!\w)(test_\w*)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Secrets:
    """What may not be told of a task, less what it says itself. `strings` and `expected` are folded."""

    public: str
    said: str  # the same, folded
    ngrams: set[tuple[str, ...]]
    numbers: set[str]
    strings: set[str]
    hashes: set[str]
    paths: set[str]
    names: set[str]
    expected: set[str]


def scan(task: TaskSpec, text: str) -> tuple[str, ...]:
    """Categories of leakage in `text`, sorted; empty if there is none.

    Against the files of `secret_files`, minus what the instruction says itself. Strings are compared without regard to letter case
    and to the kind and amount of white space.
    ngram: 8 tokens in a row of verifier text; literal: a number of 4 and more digits, or a string of 12 and more characters of
    verifier or solution; hash: one of theirs; path: an absolute path of the tests; test_name: a test file's or function's name;
    expected_output: a shorter string that a line of the verifier compares with, if there is a digit in it, or if it is what
    something must be equal to and no common word; encoded: any of these, or reads_tests, in base64, hexadecimal or rot13; reversed:
    written backwards; split: cut by spaces, line ends, quotes or signs; reads_tests: where tests or solution lie, as a command
    would name it or look for it.
    """
    secrets = _secrets(task)
    found = _plain(text, secrets)
    if any(_plain(other, secrets) - {"ngram"} - found or _reads(other, secrets) for other in _decoded(text)):
        found.add("encoded")
    if _hidden(text, secrets) or _reads(text[::-1], secrets):
        found.add("reversed")
    if not found & {"literal", "hash", "expected_output", "test_name"} and _is_split(text, secrets):
        found.add("split")
    if _reads(text, secrets):
        found.add("reads_tests")
    return tuple(sorted(found))


def _secrets(task: TaskSpec) -> _Secrets:
    root, public = Path(task.path), task.instruction
    tests = dict(texts(root, VERIFIER + TRUTH))
    verifier, solution = "\n".join(tests.values()), "\n".join(text for _, text in texts(root, SOLUTION))
    said = _folded(public)
    strings = _strings(verifier) | {string for string in _strings(solution) if _is_news(string, said)}
    return _Secrets(
        public=public,
        said=said,
        ngrams=_ngrams(verifier) - _ngrams(public),
        numbers=(_numbers(verifier) | _numbers(solution)) - _numbers(public),
        strings={_folded(string) for string in strings if _folded(string) not in said},
        hashes={digest for digest in _hashes(verifier) | _hashes(solution) if digest not in public.lower()},
        paths=_own_paths(verifier, public, task.environment.workdir or "/app"),
        names={name for name in _test_names(tests) if not _mentions(public, name)},
        expected={string for string in map(_folded, _expected(verifier)) if string not in said},
    )


def _plain(text: str, secrets: _Secrets) -> set[str]:
    """Of a text as it stands."""
    folded = _folded(text)
    found = {
        "ngram": not secrets.ngrams.isdisjoint(_ngrams(text)),
        "literal": not secrets.numbers.isdisjoint(_numbers(text)) or any(string in folded for string in secrets.strings),
        "hash": not secrets.hashes.isdisjoint(map(str.lower, _HASH.findall(text))),
        "path": not secrets.paths.isdisjoint(_paths(text)),
        "test_name": any(_mentions(text, name) for name in secrets.names),
        "expected_output": any(_stands_in(folded, string) for string in secrets.expected),
    }
    return {category for category, is_found in found.items() if is_found}


def _reads(text: str, secrets: _Secrets) -> bool:
    """Whether it names a place of tests or solution, or looks for their files by name; what the task names, too, does not count."""
    if any(match.group() not in secrets.public for match in _READS.finditer(text)):
        return True
    return any((found or searched).strip("*?.").lower() not in secrets.said for found, searched in _FINDS.findall(text))


def _decoded(text: str) -> Iterator[str]:
    """What parts of a text say in base64 or hexadecimal, if that is text, and the whole in rot13."""
    for match in _BASE64.findall(text):
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            yield base64.b64decode(match + "=" * (-len(match) % 4), validate=True).decode()
    for match in _HEX.findall(text):
        with contextlib.suppress(UnicodeDecodeError):
            yield bytes.fromhex(match).decode()
    yield codecs.encode(text, "rot13")


def _hidden(text: str, secrets: _Secrets) -> bool:
    """Whether a text that is turned round holds a secret which the text itself and the task do not."""
    known = {_digits(number) for number in _numbers(text) | _numbers(secrets.public)}
    numbers = {_digits(number)[::-1] for number in _numbers(text)} & {_digits(number) for number in secrets.numbers}
    if any(len(number) > MIN_DIGITS for number in numbers - known):
        return True
    folded, turned = _folded(text), _folded(text[::-1])
    strings = secrets.strings | secrets.hashes | secrets.expected | {name.lower() for name in secrets.names}
    return any(s in turned and s not in folded and s not in secrets.said and s != s[::-1] for s in strings if len(s) > MIN_DIGITS)


def _is_split(text: str, secrets: _Secrets) -> bool:
    squeezed, public = _squeezed(text), _squeezed(secrets.public)
    # Whole words in their order are ordinary speech about the same files and programs: what is looked for is cut within one, or
    # a phrase of plain words.
    spoken, said = (" ".join(_LETTERS.findall(whole.lower())) for whole in (text, secrets.public))
    if any(_stands_in(spoken, s) and s not in said for s in secrets.strings if _PHRASE.fullmatch(s)):
        return True
    secret = (" ".join(_LETTERS.findall(s)) for s in secrets.strings | secrets.hashes)
    strings = {_squeezed(words) for words in secret if words not in spoken}
    numbers = {_digits(number) for number in secrets.numbers}
    return any(len(s) >= MIN_SPLIT and s in squeezed and s not in public for s in strings) or any(
        len(n) >= MIN_SPLIT and n in _digits(text) and n not in _digits(secrets.public) for n in numbers
    )


def _digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def _folded(text: str) -> str:
    """Small letters, with one space where there is white space."""
    return " ".join(text.lower().split())


def _squeezed(text: str) -> str:
    """Letters and digits alone."""
    return "".join(_LETTERS.findall(text.lower()))


def _hashes(secret: str) -> set[str]:
    return {match.lower() for match in _HASH.findall(secret) if re.search(r"\d", match)}


def _expected(verifier: str) -> set[str]:
    """Short quoted strings of lines that compare, unless they are plain words, names of files or common arguments.

    Plain words too where they are what something must be equal to, if one of them at least is not common.
    """
    lines = [line for line in verifier.splitlines() if _COMPARES.search(line)]
    quoted = {(a or b).strip() for line in lines for a, b in _SHORT_QUOTED.findall(line)}
    exact = {
        (m["after"] or m["before"] or m["inner"]).strip()
        for line in lines
        if len(line) <= LONGEST_LINE
        for m in _EQUALS.finditer(line)
    }
    told = {string for string in quoted if re.search(r"\d", string)} | {string for string in exact if _is_telling(string)}
    return {string for string in told if len(string) < MIN_STRING and string not in _COMMON and not _FILE_NAME.fullmatch(string)}


def _is_telling(string: str) -> bool:
    """Whether there is a word of 5 letters and more in it that is not common, and no program text."""
    return not _PROGRAM.search(string) and any(word not in WORDS for word in re.findall(r"[a-z]{5,}", string.lower()))


def _is_news(string: str, said: str) -> bool:
    """Whether a string of the solution is neither program text nor made of the task's own words, short and common ones aside."""
    if _PROGRAM.search(string):
        return False
    own = WORDS.union(re.findall(r"[a-z]+", said))
    return re.search(r"\d", string) is not None or any(word not in own for word in re.findall(r"[a-z]{4,}", string.lower()))


def _stands_in(text: str, string: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(string)}(?!\w)", text) is not None


def _ngrams(text: str) -> set[tuple[str, ...]]:
    tokens = _TOKEN.findall(text.lower())
    return {tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)}


def _numbers(text: str) -> set[str]:
    """Numbers with 4 and more significant digits, without separators and leading zeros."""
    plain = (re.sub(r"[_,]", "", match).lstrip("0") for match in _NUMBER.findall(text))
    return {number for number in plain if len(number.replace(".", "").lstrip("0")) >= MIN_DIGITS}


def _strings(secret: str) -> set[str]:
    """Quoted strings, and unquoted words that are no plain words (they hold a digit or a sign between letters)."""
    quoted = {(a or b).strip() for a, b in _QUOTED.findall(secret)}
    words = {word.strip(".:=") for word in _MIXED.findall(secret) if re.search(r"\d", word) and re.search(r"[A-Za-z]", word)}
    return {string for string in quoted | words if len(string) >= MIN_STRING and not string.startswith(_SYSTEM)}


def _own_paths(verifier: str, public: str, workdir: str) -> set[str]:
    """Absolute paths of the verifier; the instruction may name the same file relative to the working directory."""
    own = {path for path in _paths(verifier) if path not in (workdir, "/tmp") and not path.startswith(_SYSTEM)}
    return {path for path in own if path not in public and path.removeprefix(workdir.rstrip("/") + "/") not in public}


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
