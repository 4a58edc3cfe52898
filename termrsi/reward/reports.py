"""Test reports to check ids: a verifier's log directory in, a `Report` out. Nothing here decides a reward.

Sources, most trusted first: CTRF, pytest's `-rA` summary, pytest's `-v` lines, JUnit XML, a CTRF file that was cut off, a block of
results as the tests of SWE-bench, MLE-bench and SWE-Perf print it, and the totals line. The first that names a check wins. Symlinks
are never followed: what lies in the directory may have been written by code of the agent.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

STDOUT = "test-stdout.txt"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RULE = re.compile(r"^=+ .* =+$|^=+$")
_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_SUMMARY_LINE = re.compile(rf"^({_WORDS}) +(.+)$")
_VERBOSE_LINE = re.compile(rf"^(\S+?::.+?) +({_WORDS})(?: +\(.*\))?(?: +\[ *\d+%\])?$")
_XDIST_LINE = re.compile(rf"^\[gw\d+\] +\[ *\d+%\] +({_WORDS}) +(\S+?::.+)$")
# The reason after ` - ` is cut off, but not inside a parameter's brackets, which may hold any text.
_NODE = re.compile(r"^(?P<id>\S+?::[^\[\s]+(?:\[.*?\](?= - |$))?|\S+)(?: - .*)?$")
LARGEST_BYTES = 32 << 20
_END = re.compile(r"^=*\s*(?:\d+ [a-z]+(?: [a-z]+)?, )*\d+ [a-z]+(?: [a-z]+)? in \d[\d.]*s(?: \([\d:]+\))?\s*=*$")
_TOTALS = re.compile(r"\b(\d{1,9}) (passed|failed|skipped|errors?|xfailed|xpassed)\b")

# As terminal-bench's parser has it, except that a skipped check is not a passed one.
_OUTCOME = {
    "passed": "passed",
    "xfail": "passed",
    "xfailed": "passed",
    "skipped": "skipped",
    "pending": "skipped",
    "failed": "failed",
    "error": "failed",
    "errors": "failed",
    "xpass": "failed",
    "xpassed": "failed",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Ids of checks, each once and in one of the three, in the order of the report. `source` is "none" without a report."""

    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    source: str = "none"


def parse(directory: Path | str) -> Report:
    """The report in a verifier's log directory. A missing, empty or unreadable directory gives an empty report."""
    root = Path(directory)
    lines = _lines("\n".join(end_of(path) for path in _text_files(root)))
    return _first(
        ("ctrf", _ctrf(root)),
        ("pytest-summary", _summary(lines)),
        ("pytest-verbose", _verbose(lines)),
        ("junit", _junit(root)),
        ("ctrf", _cut_ctrf(root)),
        ("block", _blocks("\n".join(lines))),
        ("totals", _totals(lines)),
    )


def parse_text(text: str, *, whole: bool = True) -> Report:
    """The report in what pytest printed, if it came to its end: the line of totals.

    A check that the totals count as failed and no line names is "unnamed". Without that line the report is empty: what ended pytest
    in the middle may have been the agent's. `whole=False`: of what only prints as pytest does, and need not have that line.
    """
    lines = _lines(text)
    ended = [line for line in lines if _END.match(line)]
    if not ended and whole:
        return Report()
    report = _first(("pytest-summary", _summary(lines)), ("pytest-verbose", _verbose(lines)), ("totals", _totals(lines)))
    totals = _TOTALS.findall(ended[-1]) if ended else []
    broken = sum(int(count) for count, word in totals if _OUTCOME[word] == "failed")
    return replace(report, failed=("unnamed",)) if broken and not report.failed else report


def parse_block(text: str, word: str = "PASSED") -> Report:
    """The one check "tests" of a block between two lines of marks, as SWE-bench's and its like print: passed if it says `word`."""
    found = _block(text)
    if found is None:
        return Report()
    return Report(("tests",), (), (), "block") if found == word else Report((), ("tests",), (), "block")


def _block(text: str) -> str | None:
    """What stands between the lines of marks. By looking for them: a pattern would take for ever on what an agent may print."""
    begin = text.find("results starts here")
    end = text.find("results ends here", begin)
    if begin < 0 or end < 0:
        return None
    first, last = text.find("\n", begin), text.rfind("\n", begin, end)
    return text[first + 1 : last].strip() if 0 <= first < last else ""


def _lines(text: str) -> list[str]:
    return [_ANSI.sub("", line).rstrip() for line in text.splitlines()]


def _first(*sources: tuple[str, Iterator[tuple[str, str]]]) -> Report:
    return next((report for source, outcomes in sources if (report := _report(outcomes, source)).source != "none"), Report())


def _report(outcomes: Iterable[tuple[str, str]], source: str) -> Report:
    """A check that is reported twice has failed if it failed once (a test may pass and its teardown fail)."""
    rank = {"failed": 2, "passed": 1, "skipped": 0}
    worst: dict[str, str] = {}
    for check, outcome in outcomes:
        if check not in worst or rank[outcome] > rank[worst[check]]:
            worst[check] = outcome
    if not worst:
        return Report()
    groups = {kind: tuple(check for check, outcome in worst.items() if outcome == kind) for kind in rank}
    return Report(groups["passed"], groups["failed"], groups["skipped"], source)


def _ctrf_files(root: Path) -> list[Path]:
    """`ctrf.json` first; a task may write more than one such file."""
    return sorted(_plain(root.glob("*ctrf*.json")), key=lambda path: (path.name != "ctrf.json", path.name))


def _ctrf(root: Path) -> Iterator[tuple[str, str]]:
    for path in _ctrf_files(root):
        try:
            data = json.loads(end_of(path))
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, lists in lists
            continue
        results = data.get("results", data) if isinstance(data, dict) else None
        tests = results.get("tests") if isinstance(results, dict) else None
        found = [item for test in (tests if isinstance(tests, list) else []) for item in _ctrf_test(test)]
        if found:
            yield from found
            return


def _cut_ctrf(root: Path) -> Iterator[tuple[str, str]]:
    """The complete test objects of CTRF files that end too early."""
    decoder = json.JSONDecoder()
    for path in _ctrf_files(root):
        text = end_of(path)
        start = re.search(r'"tests"\s*:\s*\[', text)
        at = start.end() if start else len(text)
        while (begin := text.find("{", at)) >= 0:
            try:
                test, at = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):
                break
            yield from _ctrf_test(test)


def _ctrf_test(test: object) -> Iterator[tuple[str, str]]:
    if not isinstance(test, dict) or not isinstance(test.get("name"), str):
        return
    status = str(test.get("status", "other")).lower()
    if status == "other":  # the writer's own word says more: an expected failure is "other" in CTRF
        status = "xfailed" if "xfail" in str(test.get("raw_status", "")).lower() else "failed"
    yield test["name"], _OUTCOME.get(status, "failed")


def _summary(lines: list[str]) -> Iterator[tuple[str, str]]:
    """`-rA` lines below each "short test summary info" rule; without any rule (head cut off), lines that name a node."""
    has_header = any("short test summary info" in line for line in lines)
    inside = not has_header
    for line in lines:
        if _RULE.match(line):
            inside = "short test summary info" in line or (inside and not has_header)
            continue
        match = _SUMMARY_LINE.match(line) if inside else None
        if match and (has_header or "::" in match[2]):
            yield _node(match[2], match[1]), _OUTCOME[match[1].lower()]


def _verbose(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if match := _VERBOSE_LINE.match(line):
            yield _node(match[1]), _OUTCOME[match[2].lower()]
        elif match := _XDIST_LINE.match(line):
            yield _node(match[2]), _OUTCOME[match[1].lower()]


def _node(text: str, word: str = "PASSED") -> str:
    """A node id as CTRF has it. Text shows paths from the working directory; CTRF from pytest's root, which is /tests."""
    if word == "SKIPPED":
        text = re.sub(r"^\[\d+\] +", "", text)  # `SKIPPED [1] file.py:12: reason` names no node
        text = text.split(": ", 1)[0]
    elif word != "PASSED" and (match := _NODE.match(text)):
        text = match["id"]
    elif word != "PASSED":
        text = text.split(" - ", 1)[0]
    return re.sub(r"^(?:(?:\.\./)+|/)tests/", "", text.strip())


def _junit(root: Path) -> Iterator[tuple[str, str]]:
    """Test cases of every XML file, up to where it breaks off."""
    for path in sorted(_plain(root.glob("*.xml"))):
        parser = ElementTree.XMLPullParser(("end",))
        try:
            parser.feed(end_of(path))
            parser.close()
        except ElementTree.ParseError:
            pass  # what was complete before the break is in the queue
        try:
            for event in parser.read_events():
                element = event[-1]
                if not isinstance(element, ElementTree.Element) or element.tag.rsplit("}", 1)[-1] != "testcase":
                    continue
                children = {child.tag.rsplit("}", 1)[-1] for child in element}
                outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
                name, place = element.get("name", ""), element.get("classname", "")
                yield (f"{place}::{name}" if place else name), outcome
        except ElementTree.ParseError:
            continue  # the pull parser repeats the error after the last complete event


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    if (found := _block(text)) is not None:
        yield "tests", "passed" if found in ("PASSED", "ALL TESTS PASSED") else "failed"


def _totals(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Numbered ids, passed ones first, from the last line of totals: the counts are right, the names are not the tests'."""
    for line in reversed(lines):
        found = _TOTALS.findall(line)
        if not found:
            continue
        order = sorted(
            ((_OUTCOME[word], int(n)) for n, word in found), key=lambda item: ("passed", "failed", "skipped").index(item[0])
        )
        outcomes = [outcome for outcome, n in order for _ in range(min(n, 100_000))]
        yield from ((f"check-{i + 1}", outcome) for i, outcome in enumerate(outcomes))
        return


def _text_files(root: Path) -> list[Path]:
    if (root / STDOUT).is_file():
        return list(_plain([root / STDOUT]))
    return sorted(path for path in _plain([*root.glob("*.txt"), *root.glob("*.log")]) if path.name != "reward.txt")


def _plain(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_file() and not path.is_symlink())


def end_of(path: Path) -> str:
    """Its last `LARGEST_BYTES`: what an agent's program prints in a test may have no end, and summaries come last."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - LARGEST_BYTES, 0))
        return file.read(LARGEST_BYTES).decode("utf-8-sig", "replace")
