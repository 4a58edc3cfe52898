"""The funnel: who entered each gate, who left it, and the verdict of each task."""

from itertools import pairwise

import pytest

from termrsi.records import Finding, Outcome, TaskAudit
from termrsi.report import funnel

GATES = ("loads", "oracle", "time")


def audit(*findings: tuple[str, Outcome]) -> TaskAudit:
    return TaskAudit("t", "", tuple(Finding(gate, outcome) for gate, outcome in findings))


PASSED, FLAG, REJECT, LOST = Outcome.passed, Outcome.flag, Outcome.reject, Outcome.unmeasured
AUDITS = [
    audit(("loads", REJECT)),
    audit(("loads", PASSED), ("oracle", LOST)),
    audit(("loads", PASSED), ("oracle", PASSED), ("time", FLAG), ("value", PASSED), ("clarity", FLAG)),
    audit(("loads", PASSED), ("oracle", PASSED), ("time", PASSED), ("value", REJECT), ("clarity", FLAG)),
    audit(("loads", PASSED), ("oracle", PASSED), ("time", PASSED), ("value", PASSED), ("clarity", PASSED)),
]


def test_a_row_for_each_gate_and_one_for_the_judges() -> None:
    rows = funnel.rows(AUDITS, GATES)
    assert [(row.gate, row.entered, row.rejected, row.unmeasured, row.flagged, row.left) for row in rows] == [
        ("loads", 5, 1, 0, 0, 1),
        ("oracle", 4, 0, 1, 0, 1),
        ("time", 3, 0, 0, 1, 0),
        ("judges", 3, 1, 0, 1, 1),
    ]
    assert rows[-1].why == {"clarity": 2, "value": 1}
    assert all(after.entered == before.entered - before.left for before, after in pairwise(rows))


def test_without_judges_there_is_no_row_of_theirs() -> None:
    assert [row.gate for row in funnel.rows(AUDITS[:2], GATES)] == list(GATES)


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ((), "clean"),
        ((PASSED, PASSED), "clean"),
        ((PASSED, FLAG), "flagged"),
        ((FLAG, LOST), "not measured"),
        ((LOST, FLAG, REJECT), "rejected"),
    ],
)
def test_the_worst_finding_is_the_verdict(outcomes: tuple[Outcome, ...], verdict: str) -> None:
    assert audit(*(("g", outcome) for outcome in outcomes)).verdict == verdict


def test_verdicts_are_counted() -> None:
    assert funnel.verdicts(AUDITS) == {"clean": 1, "flagged": 1, "not measured": 1, "rejected": 2}
