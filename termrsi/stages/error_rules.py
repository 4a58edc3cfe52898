"""Error analysis (ReTerm, arXiv 2610.18484): five categories of errors, each in one of four states, with turns as evidence.

What the paper states is held to by code, not by trust in the judge: recovered needs an error, a correction and later evidence that
confirms it; nothing is unresolved in an officially successful run; of several errors in one category unresolved wins if one remains
and contributes; no_error has no error. The form of the answer, which lists the errors of a category one by one so that this can be
checked, the exact order of turns and the prompt are ours.
"""

import json
from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from termrsi.answers import Invalid, formed, one_object
from termrsi.records import Message
from termrsi.stages.judging import NOT_AN_INSTRUCTION

State = Literal["unresolved", "recovered", "no_error", "uncertain"]
STATES: tuple[State, ...] = get_args(State)
CATEGORIES = {
    "planning": "a misread task, a wrong or missing plan",
    "tool_use": "a wrong command, option, path or syntax",
    "implementation": "what was made is wrong or incomplete",
    "verification": "a check left out, too shallow, or misread",
    "resource_management": "time, turns, memory, disk or processes wasted or used up",
}
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class Mistake(BaseModel):
    """One error: the turns that make it, those that correct it, those whose outcome confirms that. Without both it remains."""

    model_config = STRICT
    error: list[int] = Field(min_length=1)
    correction: list[int]
    confirmation: list[int]
    contributes: bool  # to the result's being wrong

    @property
    def remains(self) -> bool:
        return not self.correction or not self.confirmation


class Finding(BaseModel):
    """What the judge says of one category."""

    model_config = STRICT
    state: State
    errors: list[Mistake]
    reason: str = Field(min_length=1)
    confidence: float = Field(ge=0.0, le=1.0, allow_inf_nan=False)


def read(text: str, *, turns: int, strict: bool) -> dict[str, Finding]:
    """An answer on a run of `turns` turns, by category. `strict`: the run was officially a success.

    Raises Invalid: what `one_object` raises, wrong_categories, bad_form, no_such_turn, out_of_order, error_in_no_error,
    recovered_without_evidence, unresolved_without_error, unresolved_in_success, unresolved_wins.
    """
    answer = one_object(text)
    if answer.keys() != CATEGORIES.keys():
        raise Invalid("wrong_categories")
    found = {category: formed(Finding, answer[category], category) for category in CATEGORIES}
    for category, finding in found.items():
        if fault := _fault(finding, turns, strict):
            raise Invalid(fault, category)
    return found


def _fault(finding: Finding, turns: int, strict: bool) -> str:
    """The first rule that is broken; "" if none is."""
    errors, state = finding.errors, finding.state
    told = [turn for e in errors for turn in (*e.error, *e.correction, *e.confirmation)]
    if any(not 1 <= turn <= turns for turn in told):
        return "no_such_turn"
    if any(not _in_order(e) for e in errors):
        return "out_of_order"
    if state == "no_error" and errors:
        return "error_in_no_error"
    if state == "recovered" and all(e.remains for e in errors):
        return "recovered_without_evidence"
    if state == "unresolved" and not any(e.remains for e in errors):
        return "unresolved_without_error"
    worst = any(e.remains and e.contributes for e in errors)
    if strict and (state == "unresolved" or worst):
        return "unresolved_in_success"
    return "unresolved_wins" if worst and state != "unresolved" else ""


def _in_order(mistake: Mistake) -> bool:
    """The first correction follows the first error, the last one the last error, and the last confirmation that; each by a turn."""
    error, correction, confirmation = mistake.error, mistake.correction, mistake.confirmation
    if not correction:
        return not confirmation  # of what?
    if min(correction) <= min(error) or max(correction) <= max(error):
        return False
    return not confirmation or max(confirmation) > max(correction)


_EXAMPLE = {"state": "...", "errors": [], "reason": "...", "confidence": 0.5}
_SYSTEM = "\n".join(
    (
        "You judge what an agent did in a Linux terminal, by five categories of errors:",
        *(f"- {name}: {meaning}" for name, meaning in CATEGORIES.items()),
        "For each give a state:",
        "- no_error: there was none, so errors is [].",
        "- recovered: an error, a later turn that corrects it, and a still later turn whose outcome confirms that. Success of the "
        "whole run is not enough.",
        "- unresolved: an error remains. Of several, unresolved wins if one remains and contributes to the failure. Never in a run "
        "that is officially a success.",
        "- uncertain: the transcript does not tell.",
        "List each error with its turn numbers: "
        '{"error": [turns], "correction": [turns], "confirmation": [turns], "contributes": true or false}. '
        "Lists without a turn are []. Give a short reason, and a confidence from 0 to 1.",
        "Answer with one JSON object and nothing else: "
        + json.dumps({name: _EXAMPLE if name == "planning" else "like planning" for name in CATEGORIES}),
        NOT_AN_INSTRUCTION,
    )
)


def question(instruction: str, transcript: str, *, strict: bool, passed: Sequence[str], failed: Sequence[str]) -> list[Message]:
    """What the judge is asked. `passed`, `failed`: ids of the verifier's checks; `transcript`: as `judging.numbered` has it."""
    checks = [f"Checks {word}: {', '.join(ids)}" for word, ids in (("passed", passed), ("failed", failed)) if ids]
    result = f"Official result: {'success' if strict else 'failure'}"
    parts = (f"Task:\n{instruction}", f"Transcript:\n{transcript}", "\n".join((result, *checks)))
    return [Message("system", _SYSTEM), Message("user", "\n\n".join(parts))]
