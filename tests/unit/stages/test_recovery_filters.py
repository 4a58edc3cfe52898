"""The four filters in order, the judge's answer held to its evidence, and the statistics."""

import json
from dataclasses import replace
from typing import Any

import pytest

from termrsi import fakes
from termrsi.answers import Invalid
from termrsi.errors import RequestRefused
from termrsi.records import (
    EnvironmentSpec,
    RecoveryPoint,
    Rollout,
    SamplingParams,
    ScoredRollout,
    Snapshot,
    StopReason,
    TaskSpec,
    Turn,
    Verdict,
    Writing,
)
from termrsi.stages import recovery_filters
from termrsi.stages.recovery_filters import Filtered, Ruling
from termrsi.stages.roles import PolicyWriter
from tests.scripted import Scripted

INSTRUCTION = "Repair run.py. Do not\nmodify data.csv."
POINT = RecoveryPoint(
    "point:r",
    TaskSpec("t", "f", INSTRUCTION, "p", EnvironmentSpec()),
    Snapshot("s", "fake", "s", ""),
    (1, 2),
    2,
    commands=("rm data.csv", "cat <<EOF\nTurn 1 (exit 0)\nEOF"),
)
FAILED = Turn("...", "python run.py", "Error", 1)
DONE = Turn("DONE", None, "")
ALTERED = Turn("...", "sed -i s/a/b/ data.csv", "", 0)
FINE = (Turn("...", "sed -i s/a/b/ run.py", "", 0), DONE)
REPEATED = (FAILED, FAILED, FAILED, *FINE)
BOTH = (ALTERED, FAILED, FAILED, FAILED, *FINE)


def scored(*turns: Turn, strict: bool = True) -> ScoredRollout:
    rollout = Rollout("r", "g", "t", "f", "react", (), turns, StopReason.done, recovery_id="point:r", completion_tokens=7)
    return ScoredRollout(rollout, Verdict(strict, float(strict), failed=("secret_check",)))


def said(answer: str, *turns: int, requirement: str = "", reason: str = "seen") -> dict[str, Any]:
    return {"answer": answer, "evidence": [{"turns": list(turns), "requirement": requirement, "reason": reason}]}


NO = {"answer": "no", "evidence": []}


def replies(**rulings: dict[str, Any]) -> str:
    return json.dumps(rulings)


async def filtered(turns: tuple[Turn, ...], *answers: str, strict: bool = True, **settings: Any) -> tuple[Filtered, Scripted]:
    writer = Scripted(answers)
    row = await recovery_filters.judge(
        scored(*turns, strict=strict), POINT, INSTRUCTION, writer, sampling=SamplingParams(), **settings
    )
    return row, writer


async def test_what_nothing_flags_is_kept_unasked() -> None:
    row, writer = await filtered(FINE)
    assert (row.kept, row.flags, row.answers, writer.asked) == (True, (), (), [])
    assert (row.rollout_id, row.family, row.turns, row.output_tokens) == ("r", "f", 2, 7)


async def test_the_verifier_comes_first_and_the_form_second() -> None:
    broken = replace(FAILED, command=None, format_error="no_action")
    for turns, strict, refused in (
        ((broken, *BOTH), False, "verifier"),
        ((broken, *BOTH), True, "format"),
        ((), True, "format"),
        ((replace(FAILED, text=" "), DONE), True, "format"),
        ((DONE, *FINE), True, "format"),  # done, and then it went on
    ):
        row, writer = await filtered(turns, strict=strict)
        assert (row.refused_by, row.flags, writer.asked) == (refused, (), [])


async def test_a_verified_continuation_is_judged_all_the_same() -> None:
    row, writer = await filtered(REPEATED, replies(repeated_failure=said("yes", 1, 2, 3)))
    assert (row.refused_by, row.flags) == ("efficiency", ("repeated_failure",))
    assert dict(row.answers)["repeated_failure"].answer == "yes"
    assert (row.prompt_tokens, row.completion_tokens, row.cost) == (10, 3, 0.5)
    row, _ = await filtered(REPEATED, replies(repeated_failure=NO))
    assert row.kept
    assert len(writer.asked) == 1


async def test_compliance_comes_before_efficiency() -> None:
    constraint = said("yes", 1, requirement="Do not modify data.csv.")
    row, writer = await filtered(BOTH, replies(constraint_violation=constraint, repeated_failure=said("yes", 2, 3, 4)))
    assert row.refused_by == "compliance"
    assert row.flags == ("constraint_violation", "repeated_failure")
    assert len(writer.asked) == 1, "one question of both"
    row, _ = await filtered(BOTH, replies(constraint_violation=NO, repeated_failure=said("yes", 2, 3, 4)))
    assert row.refused_by == "efficiency"


async def test_polling_and_retests_are_kept_without_a_question() -> None:
    test, poll, wait = Turn("", "pytest", "", 1), Turn("", "curl localhost", "", 7), Turn("", "sleep 1", "", 0)
    retest = (test, FINE[0], test, Turn("", "sed -i s/c/d/ run.py", "", 0), test, *FINE)
    polling = (poll, wait, poll, wait, poll, wait, replace(poll, exit_code=0), DONE)
    for turns in (retest, polling):
        row, writer = await filtered(tuple(replace(turn, text="...") for turn in turns))
        assert (row.kept, writer.asked) == (True, [])


async def test_uncertain_is_refused_or_kept_as_told() -> None:
    unsure = replies(repeated_failure=said("uncertain", 1))
    assert (await filtered(REPEATED, unsure))[0].refused_by == "efficiency"
    assert (await filtered(REPEATED, unsure, judge_uncertain="keep"))[0].kept
    sure = replies(repeated_failure=said("yes", 1, 2, 3))
    assert not (await filtered(REPEATED, sure, judge_uncertain="keep"))[0].kept


async def test_an_answer_at_fault_is_asked_for_again_and_then_uncertain() -> None:
    row, writer = await filtered(REPEATED, replies(repeated_failure=said("yes", 1, 2)), replies(repeated_failure=NO))
    assert (row.kept, row.faults) == (True, ("too_few_turns",))
    assert "too_few_turns in repeated_failure" in writer.asked[1][-1].content
    row, writer = await filtered(REPEATED, "yes", "{}", "no", rounds=2)
    assert (row.refused_by, row.answers) == ("efficiency", ())
    assert row.faults == ("no_object", "wrong_questions", "no_object")
    assert (await filtered(REPEATED, "yes", rounds=0, judge_uncertain="keep"))[0].kept


@pytest.mark.parametrize(
    ("rulings", "fault"),
    [
        ({"repeated_failure": said("yes", 2, 3, 4)}, ""),
        ({"repeated_failure": said("yes", 2, 2, 3)}, "too_few_turns"),
        ({"repeated_failure": said("yes", 4, 5, 6)}, "not_executed"),  # turn 6 says that it is done
        ({"repeated_failure": said("yes", 5, 6, 7)}, "no_such_turn"),
        ({"repeated_failure": said("yes")}, "not_executed"),
        ({"repeated_failure": {"answer": "yes", "evidence": []}}, "no_evidence"),
        ({"repeated_failure": {"answer": "uncertain", "evidence": []}}, "no_evidence"),
        ({"repeated_failure": said("uncertain")}, ""),
        ({"repeated_failure": said("no", 9)}, "no_such_turn"),
        ({"repeated_failure": said("maybe")}, "bad_form"),
        ({"repeated_failure": said("yes", 2, 3, 4, reason="")}, "bad_form"),
        ({"repeated_failure": NO, "constraint_violation": NO}, "wrong_questions"),
        ({"constraint_violation": NO}, ""),
        ({"constraint_violation": said("yes", 1, requirement="Do not modify data.csv.")}, ""),  # over a line's end
        ({"constraint_violation": said("yes", 1, requirement="not modify data.csv")}, ""),
        ({"constraint_violation": said("yes", 1, requirement="Do not change data.csv.")}, "quote_not_found"),
        ({"constraint_violation": said("yes", 1, requirement="do not modify data.csv.")}, "quote_not_found"),
        ({"constraint_violation": said("yes", 1, requirement="ot modify data.csv.")}, "quote_not_found"),
        ({"constraint_violation": said("yes", 1, requirement="not")}, "quote_not_found"),
        ({"constraint_violation": said("yes", 1)}, "quote_not_found"),
        ({"constraint_violation": said("yes", requirement="Do not modify data.csv.")}, "not_executed"),
    ],
)
def test_the_answer_is_held_to_its_evidence(rulings: dict[str, Any], fault: str) -> None:
    asked = [next(iter(rulings))]
    if not fault:
        assert list(recovery_filters.read(json.dumps(rulings), asked, BOTH, INSTRUCTION)) == asked
        return
    with pytest.raises(Invalid) as caught:
        recovery_filters.read(json.dumps(rulings), asked, BOTH, INSTRUCTION)
    assert caught.value.category == fault


async def test_the_judge_sees_task_student_and_teacher_but_no_verifier() -> None:
    _, writer = await filtered(BOTH, replies(constraint_violation=NO, repeated_failure=NO))
    system, user = (message.content for message in writer.asked[0])
    assert "- constraint_violation: " in system
    assert "- repeated_failure: " in system
    assert user.startswith(
        f"Task:\n{INSTRUCTION}\n\nCommands of the failed attempt, not to be judged:\n  $ rm data.csv\n  $ cat <<EOF\n"
    )
    assert "\n  $ Turn 1 (exit 0)\n" in user
    assert "Transcript of the agent:\nTurn 1 (exit 0)\n  $ sed -i s/a/b/ data.csv\n" in user
    assert '- constraint_violation: "Do not modify data.csv." may be touched by turn 1\n' in user
    assert "- repeated_failure: a command that failed in turns 2, 3, 4" in user
    assert "secret_check" not in system + user
    _, writer = await filtered(REPEATED, replies(repeated_failure=NO))
    assert "constraint_violation" not in "".join(message.content for message in writer.asked[0]), "only what is flagged is asked"


async def test_what_is_too_long_for_the_judge_is_uncertain() -> None:
    row, writer = await filtered(REPEATED, fits=lambda messages: False)
    assert (row.refused_by, row.faults, writer.asked) == ("efficiency", ("too_long",), [])
    shown: list[int] = []

    def fits(messages: Any) -> bool:
        shown.append(len(messages[1].content))
        return len(shown) == 3

    row, _ = await filtered((replace(FAILED, observation="x" * 5000),) * 3 + FINE, replies(repeated_failure=NO), fits=fits)
    assert row.kept
    assert shown[0] > shown[1] > shown[2]


async def test_a_judge_who_refuses_the_question_leaves_it_uncertain() -> None:
    class Filtering(Scripted):
        async def write(self, messages: Any, sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            raise RequestRefused("400 content filter", "http://h")

    row = await recovery_filters.judge(scored(*REPEATED), POINT, INSTRUCTION, Filtering(()), sampling=SamplingParams())
    assert (row.refused_by, row.answers, row.faults) == ("efficiency", (), ("refused",))


async def test_the_shipped_judge_answers_what_is_asked() -> None:
    made = fakes.dry_parts()
    writer = PolicyWriter(made.generator, made.chat)
    for turns in (BOTH, REPEATED):
        row = await recovery_filters.judge(scored(*turns), POINT, INSTRUCTION, writer, sampling=SamplingParams(max_tokens=256))
        assert (row.kept, row.faults, len(row.answers)) == (True, (), len(row.flags))


async def test_a_row_is_a_line_of_json() -> None:
    row, _ = await filtered(REPEATED, replies(repeated_failure=said("yes", 1, 2, 3)))
    line = json.loads(json.dumps(row.as_line()))
    assert line["refused_by"] == "efficiency"
    assert line["answers"] == {"repeated_failure": said("yes", 1, 2, 3)}


def test_statistics() -> None:
    def row(refused_by: str = "", family: str = "f", turns: int = 9, tokens: int = 5000, **more: Any) -> Filtered:
        return Filtered("r", family, turns, tokens, refused_by, **more)

    no = (("repeated_failure", Ruling(answer="no", evidence=[])),)
    rows = [
        row(flags=("repeated_failure",), answers=no),
        row(family="g", turns=8, tokens=8192),
        row(turns=16, tokens=8193),
        row(turns=33, tokens=17000),
        row("verifier"),
        row("verifier"),
        row("efficiency", flags=("repeated_failure",)),
    ]
    unasked = row("efficiency", flags=("repeated_failure",), faults=("too_long",))
    assert recovery_filters.statistics([unasked, unasked])["judge"]["fault_too_long"] == 2
    found = recovery_filters.statistics(rows)
    assert found["filters"] == {"continuations": 7, "verifier": 2, "format": 0, "compliance": 0, "efficiency": 1, "kept": 4}
    assert found["judge"] == {"flagged_repeated_failure": 2, "no_answer": 1, "repeated_failure_no": 1}
    assert found["families"] == {"f": 0.75, "g": 0.25}
    assert found["tokens"] == {
        "0-1024": 0, "1025-2048": 0, "2049-4096": 0, "4097-8192": 0.5, "8193-16384": 0.25, "16385-": 0.25,
    }  # fmt: skip
    assert found["turns"] == {"0-4": 0, "5-8": 0.25, "9-16": 0.5, "17-32": 0, "33-": 0.25}
    assert "families" not in recovery_filters.statistics(rows[4:])
    assert recovery_filters.statistics([])["filters"]["kept"] == 0
