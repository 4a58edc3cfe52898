"""Each rule of error analysis, with an answer that keeps it and one that breaks it."""

import json
from typing import Any

import pytest

from termrsi import answers, fakes
from termrsi.answers import Invalid
from termrsi.records import SamplingParams, Turn
from termrsi.stages import error_rules, judging
from termrsi.stages.error_rules import CATEGORIES
from termrsi.stages.roles import PolicyWriter

NONE = {"state": "no_error", "errors": [], "reason": "fine", "confidence": 1}


def mistake(
    error: list[int], correction: list[int] | None = None, confirmation: list[int] | None = None, contributes: bool = False
) -> dict[str, Any]:
    return {"error": error, "correction": correction or [], "confirmation": confirmation or [], "contributes": contributes}


def finding(state: str, *errors: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"state": state, "errors": list(errors), "reason": "seen", "confidence": 0.5} | other


def answer(**found: dict[str, Any]) -> str:
    return json.dumps({**dict.fromkeys(CATEGORIES, NONE), **found})


def fault(text: str, *, turns: int = 6, strict: bool = False) -> str:
    """The category and where; "" if the answer is taken."""
    try:
        error_rules.read(text, turns=turns, strict=strict)
    except Invalid as invalid:
        return str(invalid)
    return ""


@pytest.mark.parametrize(
    "kept",
    [
        NONE,
        finding("recovered", mistake([1], [2], [3])),
        finding("recovered", mistake([1, 3], [2, 4], [5])),
        finding("recovered", mistake([1], [2], [3]), mistake([4])),  # the second remains, and does not contribute
        finding("unresolved", mistake([1], contributes=True)),
        finding("unresolved", mistake([1], [2], contributes=True)),  # corrected, and nothing confirms it
        finding("unresolved", mistake([1], [2], [3]), mistake([4], contributes=True)),
        finding("unresolved", mistake([1])),
        finding("uncertain"),
        finding("uncertain", mistake([2])),
        finding("uncertain", confidence=0.0),
        finding("uncertain", confidence=1.0),
    ],
)
def test_a_valid_answer_is_taken(kept: dict[str, Any]) -> None:
    found = error_rules.read(answer(tool_use=kept), turns=6, strict=False)
    assert list(found) == list(CATEGORIES)
    assert found["tool_use"].state == kept["state"]


@pytest.mark.parametrize(
    ("broken", "category"),
    [
        (finding("recovered"), "recovered_without_evidence"),
        (finding("recovered", mistake([1])), "recovered_without_evidence"),
        (finding("recovered", mistake([1], [2])), "recovered_without_evidence"),
        (finding("recovered", mistake([2], [1], [3])), "out_of_order"),
        (finding("recovered", mistake([2], [2], [3])), "out_of_order"),
        (finding("recovered", mistake([1], [2], [2])), "out_of_order"),  # not later
        (finding("recovered", mistake([1], [3], [2])), "out_of_order"),
        (finding("recovered", mistake([1], [2, 4], [3])), "out_of_order"),  # of the last correction nothing is confirmed
        (finding("recovered", mistake([1, 4], [2], [5])), "out_of_order"),  # made again afterwards
        (finding("uncertain", mistake([1], [], [3])), "out_of_order"),  # confirms no correction
        (finding("recovered", mistake([0], [2], [3])), "no_such_turn"),
        (finding("recovered", mistake([1], [2], [7])), "no_such_turn"),
        (finding("uncertain", mistake([-1])), "no_such_turn"),
        (finding("recovered", mistake([1], [2], [3]), mistake([4], contributes=True)), "unresolved_wins"),
        (finding("uncertain", mistake([4], contributes=True)), "unresolved_wins"),
        (finding("unresolved"), "unresolved_without_error"),
        (finding("unresolved", mistake([1], [2], [3])), "unresolved_without_error"),
        (finding("no_error", mistake([1])), "error_in_no_error"),
    ],
)
def test_a_rule_that_is_broken_is_named(broken: dict[str, Any], category: str) -> None:
    assert fault(answer(tool_use=broken)) == f"{category} in tool_use"


def test_nothing_is_unresolved_in_an_official_success() -> None:
    unresolved = finding("unresolved", mistake([1], contributes=True))
    assert fault(answer(planning=unresolved)) == ""
    assert fault(answer(planning=unresolved), strict=True) == "unresolved_in_success in planning"
    claimed = finding("uncertain", mistake([1], contributes=True))
    assert fault(answer(planning=claimed), strict=True) == "unresolved_in_success in planning"
    assert fault(answer(planning=finding("uncertain", mistake([1]))), strict=True) == ""
    assert fault(answer(planning=finding("recovered", mistake([1], [2], [3]))), strict=True) == ""


def test_success_alone_is_no_recovery() -> None:
    assert fault(answer(planning=finding("recovered", mistake([1]))), strict=True) == "recovered_without_evidence in planning"


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (finding("uncertain", confidence=1.01), "confidence"),
        (finding("uncertain", confidence=-0.01), "confidence"),
        (finding("uncertain", confidence="0.5"), "confidence"),
        (finding("uncertain", confidence=True), "confidence"),
        (finding("uncertain", reason=""), "reason"),
        (finding("solved"), "state"),
        (finding("uncertain", more=1), "more"),
        (finding("uncertain", mistake([])), "errors.0.error"),
        (finding("uncertain", {"error": [1.5], "correction": [], "confirmation": [], "contributes": False}), "errors.0.error.0"),
        (finding("uncertain", {"error": [1]}), "errors.0.correction"),
        ({"state": "no_error"}, "errors"),
    ],
)
def test_the_form_is_kept(broken: dict[str, Any], where: str) -> None:
    assert fault(answer(verification=broken)) == f"bad_form in verification.{where}"


def test_exactly_the_five_categories() -> None:
    assert fault(answer()) == ""
    assert fault(answer(luck=NONE)) == "wrong_categories"
    assert fault(json.dumps(dict.fromkeys(list(CATEGORIES)[1:], NONE))) == "wrong_categories"
    assert fault(f"{answer()}{answer()}") == "several_objects"


def test_the_question_has_all_that_the_judge_goes_by() -> None:
    system, user = error_rules.question("Make it.", "Turn 1 (exit 0)", strict=False, passed=("a",), failed=("b", "c"))
    assert all(f"- {name}: " in system.content for name in (*CATEGORIES, *error_rules.STATES))
    assert user.content == (
        "Task:\nMake it.\n\nTranscript:\nTurn 1 (exit 0)\n\nOfficial result: failure\nChecks passed: a\nChecks failed: b, c"
    )
    assert error_rules.question("", "", strict=True, passed=(), failed=())[1].content.endswith("Official result: success")


@pytest.mark.parametrize(
    ("turns", "strict", "states"),
    [
        (["solve"], True, {}),
        (["half"], False, {"implementation": "unresolved"}),
        (["false"], False, {"tool_use": "unresolved"}),
        (["false", "solve", "ls"], True, {"tool_use": "recovered"}),
        (["false", "solve"], True, {"tool_use": "uncertain"}),
    ],
)
async def test_the_shipped_judge_keeps_the_rules(turns: list[str], strict: bool, states: dict[str, str]) -> None:
    made = fakes.dry_parts()
    done = [Turn("", command, "", int(command == "false")) for command in turns] + [Turn("DONE", None, "")]
    messages = error_rules.question("x", judging.numbered(done, chars=100), strict=strict, passed=(), failed=())
    writer = PolicyWriter(made.generator, made.chat)
    for seed in range(8):  # some first answers lack a category
        asked = await answers.ask(
            writer,
            messages,
            SamplingParams(max_tokens=512, seed=seed),
            lambda text: error_rules.read(text, turns=len(done), strict=strict),
            rounds=1,
        )
        assert asked.answer is not None
        assert {name: f.state for name, f in asked.answer.items() if f.state != "no_error"} == states
        assert set(asked.faults) <= {"wrong_categories"}
