"""Gates of an audit on evidence that is written down: what each lets through, flags, rejects, and leaves to the machine."""

import pytest

from termrsi.records import Outcome, Verdict
from termrsi.reward import gates
from termrsi.reward.gates import Run, Timed, Tried

GOOD = Run(Verdict(True, 1.0, ("a", "b")))
BAD = Run(Verdict(False, 0.5, ("a",), ("b",)), said="expected 3\n")
LOST = Run(fault="the sandbox was lost")
LATE = Run(refused="its own solution ran out of time")
OFFLINE = Run(Verdict(False, 0.0), said="curl: (6) Could not resolve host: example.org\n")


@pytest.mark.parametrize(
    ("runs", "online", "declared", "outcome"),
    [
        ([GOOD, GOOD], None, False, Outcome.passed),
        ([BAD, BAD], None, False, Outcome.passed),  # for another reason: the next gate's
        ([BAD, BAD], BAD, False, Outcome.passed),
        ([OFFLINE, OFFLINE], BAD, False, Outcome.passed),
        ([BAD, BAD], GOOD, False, Outcome.reject),
        ([BAD, BAD], GOOD, True, Outcome.flag),
        ([OFFLINE, OFFLINE], None, False, Outcome.reject),
        ([OFFLINE, OFFLINE], None, True, Outcome.unmeasured),
        ([Run(GOOD.verdict, said=OFFLINE.said)], None, False, Outcome.flag),
        ([Run(fault="never ran its tests", said="E: Unable to locate package jq")], None, False, Outcome.reject),
    ],
)
def test_network(runs: list[Run], online: Run | None, declared: bool, outcome: Outcome) -> None:
    assert gates.network(runs, online, declared=declared).outcome is outcome


def test_the_line_that_asks_for_a_host_is_the_evidence() -> None:
    found = gates.network([OFFLINE], None, declared=False)
    assert found.evidence[1:] == ("curl: (6) Could not resolve host: example.org",)
    assert gates.wanted("all is well\nno such file") == ()


def test_the_oracle_passes_each_time_or_the_checks_are_named() -> None:
    assert gates.oracle([GOOD, GOOD]).outcome is Outcome.passed
    found = gates.oracle([GOOD, BAD])
    assert found.outcome is Outcome.reject
    assert found.evidence == ("its solution passes 1 of 2 times, with rewards 0.5", "fails: b", "said: expected 3")


@pytest.mark.parametrize("gate", [gates.oracle, gates.empty])
def test_a_machine_fault_is_no_verdict_on_the_task(gate) -> None:
    assert gate([GOOD, LOST]).outcome is Outcome.unmeasured
    assert "the sandbox was lost" in gate([LOST]).evidence[0]
    assert gate([LATE, LOST]).outcome is Outcome.reject, "what the task does is the task's"


def test_an_empty_submission_never_passes() -> None:
    assert gates.empty([BAD, BAD]).outcome is Outcome.passed
    assert gates.empty([BAD, GOOD]).evidence == ("an empty submission passes 1 of 2 times",)


def test_replay() -> None:
    first = Verdict(True, 1.0, ("a",))
    assert gates.replay(Run(first, first)).outcome is Outcome.passed
    assert gates.replay(BAD).outcome is Outcome.reject
    assert gates.replay(Run(first, Verdict(False, 0.0, (), ("a",)))).evidence[1] == "differs: a"
    assert gates.replay(Run(first, None, fault="no reward file")).outcome is Outcome.flag
    assert gates.replay(LOST).outcome is Outcome.unmeasured


@pytest.mark.parametrize(
    ("noticed", "missed", "outcome"),
    [(4, 0, Outcome.passed), (4, 1, Outcome.passed), (3, 1, Outcome.flag), (1, 1, Outcome.flag), (3, 4, Outcome.reject)],
)
def test_the_share_of_mutants_noticed_decides(noticed: int, missed: int, outcome: Outcome) -> None:
    tried = [Tried(f"n{i}", noticed=True) for i in range(noticed)] + [Tried(f"m{i}", noticed=False) for i in range(missed)]
    found = gates.mutation([*tried, Tried("same state", equal=True), Tried("no result")])
    assert found.outcome is outcome
    assert found.evidence[0].startswith(f"{noticed} of {noticed + missed} broken solutions noticed")
    assert found.evidence[0].endswith("1 changed nothing, 1 had no result")
    assert found.evidence[1:] == tuple(f"not noticed: m{i}" for i in range(missed))


def test_without_a_mutant_that_counts_the_verifier_is_not_called_strong() -> None:
    assert gates.mutation([Tried("same state", equal=True)]).outcome is Outcome.flag
    assert gates.mutation([]).outcome is Outcome.flag


def test_flaky_checks_are_named_with_where_they_differ() -> None:
    other = Run(Verdict(True, 1.0, ("a",), (), ("b",)))
    renamed = Run(Verdict(False, 0.0, ("a", "c")))
    quiet = Run(Verdict(True, 1.0), Verdict(True, 1.0))
    assert gates.flaky([GOOD, GOOD], [BAD, BAD], quiet).outcome is Outcome.passed
    assert gates.flaky([GOOD, other], [BAD, BAD], quiet).evidence == ("b differs between two runs of the solution",)
    assert gates.flaky([GOOD, GOOD], [renamed, Run(Verdict(False, 0.0, ("a",)))], quiet).evidence == (
        "c differs between two runs of an empty submission",
    )
    twice = Run(GOOD.verdict, BAD.verdict)
    assert gates.flaky([GOOD, GOOD], [BAD, LOST], twice).evidence == ("b differs between two verifications of one state",)


def test_the_slowest_run_counts_against_its_own_limit() -> None:
    runs = [Run(GOOD.verdict, times=(Timed("its solution", s, 10.0), Timed("its verifier", 1.0, 60.0))) for s in (2.0, 5.5, 3.0)]
    assert gates.in_time(runs).evidence == ("its solution takes 5.5 s of 10 s",)
    assert gates.in_time(runs[:1]).outcome is Outcome.passed
