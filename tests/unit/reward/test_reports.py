"""Each report source against text as the tools write it, and the order in which they are trusted."""

import json
from pathlib import Path

import pytest

from termrsi.reward import reports
from termrsi.reward.reports import LARGEST_BYTES, Report, parse

SUMMARY = """\
============================= test session starts ==============================
collected 5 items

../tests/test_outputs.py::test_a PASSED                                  [ 20%]

=========================== short test summary info ============================
PASSED ../tests/test_outputs.py::test_a
PASSED ../tests/test_outputs.py::test_p[x - y z]
FAILED ../tests/test_outputs.py::test_p[a - b] - AssertionError: 1 - 2 is not 3
ERROR ../tests/test_outputs.py::test_e - OSError: gone - for good
SKIPPED [1] ../tests/test_outputs.py:12: no network
XFAIL ../tests/test_outputs.py::test_x - known
XPASS ../tests/test_outputs.py::test_y
================= 1 failed, 2 passed, 1 skipped, 1 error in 0.10s ==============
PASSED not::in_the_summary
"""


def ctrf(*tests: tuple[str, str]) -> str:
    return json.dumps({"results": {"tool": {"name": "pytest"}, "tests": [{"name": n, "status": s} for n, s in tests]}})


def put(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("__", "-").replace("_dot_", ".")).write_text(content)
    return folder


def test_nothing_there(tmp_path: Path) -> None:
    assert parse(tmp_path) == Report((), (), (), "none")
    assert parse(tmp_path / "missing").source == "none"


def test_ctrf_comes_first(tmp_path: Path) -> None:
    put(
        tmp_path,
        ctrf_dot_json=ctrf(("a", "passed"), ("b", "failed"), ("c", "skipped"), ("d", "pending")),
        test__stdout_dot_txt=SUMMARY,
    )
    assert parse(tmp_path) == Report(("a",), ("b",), ("c", "d"), "ctrf")


def test_ctrf_other_status_is_told_by_the_raw_one(tmp_path: Path) -> None:
    tests = [{"name": "x", "status": "other", "raw_status": "call_xfailed"}, {"name": "e", "status": "other"}]
    put(tmp_path, ctrf_dot_json=json.dumps({"results": {"tests": tests}}))
    assert parse(tmp_path) == Report(("x",), ("e",), (), "ctrf")


def test_ctrf_placeholder_gives_way(tmp_path: Path) -> None:
    put(tmp_path, ctrf_dot_json='{"tests":[]}', test__stdout_dot_txt=SUMMARY)
    assert parse(tmp_path).source == "pytest-summary"


def test_second_ctrf_file_is_used_when_the_first_is_empty(tmp_path: Path) -> None:
    (tmp_path / "ctrf.json").write_text('{"results": {"tests": []}}')
    (tmp_path / "original-repo-ctrf.json").write_text(ctrf(("z", "passed")))
    assert parse(tmp_path).passed == ("z",)


def test_a_check_reported_twice_counts_once_and_failed_if_it_failed_once(tmp_path: Path) -> None:
    put(
        tmp_path,
        ctrf_dot_json=ctrf(("a", "passed"), ("a", "failed"), ("b", "skipped"), ("b", "passed"), ("c", "passed"), ("c", "passed")),
    )
    assert parse(tmp_path) == Report(("b", "c"), ("a",), (), "ctrf")


def test_summary_lines(tmp_path: Path) -> None:
    report = parse(put(tmp_path, test__stdout_dot_txt=SUMMARY))
    assert report.source == "pytest-summary"
    assert report.passed == ("test_outputs.py::test_a", "test_outputs.py::test_p[x - y z]", "test_outputs.py::test_x")
    assert report.failed == ("test_outputs.py::test_p[a - b]", "test_outputs.py::test_e", "test_outputs.py::test_y")
    assert report.skipped == ("test_outputs.py:12",)


def test_colours_and_windows_line_ends(tmp_path: Path) -> None:
    text = "=== short test summary info ===\r\n\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_a\x1b[0m\r\n=== 1 passed in 0.1s ===\r\n"
    (tmp_path / "test-stdout.txt").write_bytes(text.encode())
    assert parse(tmp_path).passed == ("t.py::test_a",)


def test_several_runs_in_one_log(tmp_path: Path) -> None:
    one = "=== short test summary info ===\nPASSED a.py::test_a\n=== 1 passed ===\n"
    two = "=== short test summary info ===\nFAILED b.py::test_b - x\n=== 1 failed ===\n"
    report = parse(put(tmp_path, test__stdout_dot_txt=one + "noise\n" + two))
    assert (report.passed, report.failed) == (("a.py::test_a",), ("b.py::test_b",))


def test_verbose_lines_when_the_end_is_missing(tmp_path: Path) -> None:
    text = "test session starts\ntests/t.py::test_a PASSED [ 33%]\ntests/t.py::test_b[1 2] FAILED   [ 66%]\ntests/t.py::test_c SKIP"
    report = parse(put(tmp_path, test__stdout_dot_txt=text))
    assert report == Report(("tests/t.py::test_a",), ("tests/t.py::test_b[1 2]",), (), "pytest-verbose")


def test_verbose_lines_of_parallel_workers(tmp_path: Path) -> None:
    report = parse(put(tmp_path, test__stdout_dot_txt="[gw1] [ 50%] PASSED t.py::test_a\n[gw0] [100%] FAILED t.py::test_b\n"))
    assert (report.passed, report.failed) == (("t.py::test_a",), ("t.py::test_b",))


def test_junit_up_to_where_it_breaks(tmp_path: Path) -> None:
    whole = (
        '<testsuites><testsuite><testcase classname="m" name="a"/><testcase classname="m" name="b"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    expected = Report(("m::a",), ("m::b",), ("c",), "junit")
    assert parse(put(tmp_path, junit_dot_xml=whole)) == expected
    assert parse(put(tmp_path, junit_dot_xml=whole.replace("</testsuite></testsuites>", '<testcase name="d'))) == expected


def test_cut_ctrf_is_read_when_nothing_else_is_there(tmp_path: Path) -> None:
    text = ctrf(("a", "passed"), ("b", "failed"), ("c", "passed"))
    put(tmp_path, ctrf_dot_json=text[: text.index('"c"')])
    assert parse(tmp_path) == Report(("a",), ("b",), (), "ctrf")


def test_totals_are_the_last_resort(tmp_path: Path) -> None:
    report = parse(put(tmp_path, test__stdout_dot_txt="1 passed in 1s\nmore\n2 failed, 3 passed, 1 skipped in 0.5s\nbye\n"))
    assert report == Report(("check-1", "check-2", "check-3"), ("check-4", "check-5"), ("check-6",), "totals")


def test_every_cut_of_a_report_parses(tmp_path: Path) -> None:
    text = ctrf(("a", "passed"), ("b", "failed"))
    for end in range(len(text)):
        report = parse(put(tmp_path, ctrf_dot_json=text[:end], test__stdout_dot_txt=SUMMARY[:end]))
        assert set(report.passed).isdisjoint(report.failed)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(ctrf(("a", "passed")))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "ctrf.json").symlink_to(tmp_path / "secret")
    assert parse(logs).source == "none"


def test_what_no_writer_of_reports_writes_is_none(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "9" * 10_000, '{"results": {"tests": ' + "[" * 5000):
        (tmp_path / "ctrf.json").write_text(text)
        assert parse(tmp_path) == Report()
    (tmp_path / "test-stdout.txt").write_text("9" * 10_000 + " passed in 1 s\n")
    assert parse(tmp_path) == Report()


def test_a_log_without_end_is_read_from_its_end(tmp_path: Path) -> None:
    with (tmp_path / "test-stdout.txt").open("wb") as file:
        file.truncate(LARGEST_BYTES * 3)
        file.seek(0, 2)
        file.write(b"\n2 passed, 1 failed in 1 s\n")
    found = parse(tmp_path)
    assert (len(found.passed), len(found.failed)) == (2, 1)


@pytest.mark.parametrize(
    ("text", "passed", "failed"),
    [
        ("x\nSWEBench results starts here\nPASSED\nSWEBench results ends here\n", ("tests",), ()),
        ("MLEBench results starts here\nALL TESTS PASSED\nMLEBench results ends here\n", ("tests",), ()),
        ("SWEPerf results starts here\nFAILED\nSWEPerf results ends here\n", (), ("tests",)),
        ("SWEBench results starts here\nPASSED\n", (), ()),
        ("results starts here results ends here\n", (), ("tests",)),
    ],
)
def test_blocks_of_results(tmp_path: Path, text: str, passed: tuple[str, ...], failed: tuple[str, ...]) -> None:
    (tmp_path / reports.STDOUT).write_text(text)
    report = reports.parse(tmp_path)
    assert (report.passed, report.failed) == (passed, failed)
    assert report.source == ("block" if passed or failed else "none")


def test_marks_without_end_take_no_time(tmp_path: Path) -> None:
    """The test's own time-out would end a search that begins anew at each of them."""
    (tmp_path / reports.STDOUT).write_text("results starts here\n" * 1_000_000)
    assert reports.parse(tmp_path).source == "none"
