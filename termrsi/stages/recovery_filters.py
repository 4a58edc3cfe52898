"""The filters of ReTerm's data (arXiv 2610.18484) on a teacher's continuation, in order: verifier, format, compliance, efficiency.

The last two are judged: `recovery_rules` flags, and a model answers of what is flagged yes, no or uncertain, with evidence that
code checks. A repeated failure takes three executed turns of the teacher, a violation the constraint word for word (both stated).
What becomes of uncertain is not stated: a refusal here, unless told to keep. An answer at fault is asked for again, then it is
uncertain. Of the verifier nothing but its strict result is read, and the judge is not told it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from termrsi import answers
from termrsi.answers import TOO_LONG, Invalid, formed, one_object
from termrsi.harness.observe import cut
from termrsi.ports import Writer
from termrsi.records import Message, RecoveryPoint, Rollout, SamplingParams, ScoredRollout, Turn
from termrsi.stages import judging, recovery_rules
from termrsi.stages.judging import NOT_AN_INSTRUCTION

Verdict = Literal["yes", "no", "uncertain"]
Uncertain = Literal["reject", "keep"]
FILTERS = ("verifier", "format", "compliance", "efficiency")
# What is judged -> the filter that refuses it.
JUDGED = {"constraint_violation": "compliance", "repeated_failure": "efficiency"}
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)

BEFORE_CHARS = 200  # of a command of the failed attempt, as the judge is shown it

# Upper ends, the last of each without one; those between which the paper gives shares are among them.
TOKEN_BUCKETS = (1024, 2048, 4096, 8192, 16384)
TURN_BUCKETS = (4, 8, 16, 32)


class Evidence(BaseModel):
    """`requirement`: the constraint word for word; empty for a repeated failure."""

    model_config = STRICT
    turns: list[int]
    requirement: str
    reason: str = Field(min_length=1)


class Ruling(BaseModel):
    """One of the two judgements."""

    model_config = STRICT
    answer: Verdict
    evidence: list[Evidence]


@dataclass(frozen=True, slots=True)
class Filtered:
    """What the filters said of one continuation. `refused_by`: one of FILTERS; "" if it is kept."""

    rollout_id: str
    family: str
    turns: int
    output_tokens: int
    refused_by: str
    flags: tuple[str, ...] = ()  # of JUDGED, what the rules flagged
    answers: tuple[tuple[str, Ruling], ...] = ()  # of what was flagged; none from a judge who never gave a valid one
    faults: tuple[str, ...] = ()  # of its answers, or of why there is none: refused, too_long, no_judge
    prompt_tokens: int = 0  # of the judge
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def kept(self) -> bool:
        return not self.refused_by

    def as_line(self) -> dict[str, Any]:  # Any: a line of JSON
        """All of it, in plain types."""
        plain = {name.name: getattr(self, name.name) for name in fields(self)}
        return plain | {"answers": {name: ruling.model_dump() for name, ruling in self.answers}}

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> "Filtered":  # Any: JSON
        said = tuple((name, Ruling.model_validate(ruling)) for name, ruling in line["answers"].items())
        return cls(**line | {"flags": tuple(line["flags"]), "faults": tuple(line["faults"]), "answers": said})


async def judge(
    scored: ScoredRollout,
    point: RecoveryPoint,
    instruction: str,
    writer: Writer | None,
    *,
    sampling: SamplingParams,
    rounds: int = 2,
    judge_uncertain: Uncertain = "reject",
    text_chars: int = 2000,
    fits: Callable[[Sequence[Message]], bool] = lambda messages: True,
) -> Filtered:
    """One continuation from `point` through the four filters. The model is asked once, of all that is flagged, or not at all.

    Without a model what is flagged is uncertain.

    `text_chars`: of a command or an observation, as the judge is shown them; fewer where `fits` says that a question is too long.
    """
    rollout = scored.rollout
    seen = (rollout.id, rollout.family, len(rollout.turns), rollout.completion_tokens)
    if not scored.verdict.strict:
        return Filtered(*seen, "verifier")
    if not well_formed(rollout):
        return Filtered(*seen, "format")
    reasons = flag(instruction, rollout.turns)
    if not reasons:
        return Filtered(*seen, "")
    flags = tuple(reasons)
    if writer is None:
        return Filtered(*seen, _refusal(flags, {}, judge_uncertain), flags, faults=("no_judge",))
    text = judging.fitted(
        rollout.turns, chars=text_chars, fits=lambda shown: fits(question(instruction, point.commands, shown, reasons))
    )
    if text is None:
        return Filtered(*seen, _refusal(flags, {}, judge_uncertain), flags, faults=(TOO_LONG,))
    asked = await answers.ask(
        writer,
        question(instruction, point.commands, text, reasons),
        sampling,
        lambda answer: read(answer, flags, rollout.turns, instruction),
        rounds=rounds,
        key="recovery_judge",
    )
    rulings = asked.answer or {}
    refused = _refusal(flags, rulings, judge_uncertain)
    spent = (asked.prompt_tokens, asked.completion_tokens, asked.cost)
    return Filtered(*seen, refused, flags, tuple(rulings.items()), asked.faults, *spent)


def well_formed(rollout: Rollout) -> bool:
    """At least one turn, each with an action that could be taken; without a command the last alone, which says that it is done."""
    turns = rollout.turns
    return (
        bool(turns) and not any(turn.format_error or not turn.text.strip() for turn in turns) and all(t.command for t in turns[:-1])
    )


def flag(instruction: str, turns: Sequence[Turn]) -> dict[str, list[str]]:
    """What the rules found, in words for the judge, by what it is asked; nothing asked where nothing was found."""
    touched = [
        f'"{touch.sentence}" may be touched by {_turns(touch.turns)}'
        for touch in recovery_rules.touched_constraints(instruction, turns)
    ]
    repeated = [f"a command that failed in {_turns(numbers)}" for numbers in recovery_rules.repeated_failures(turns)]
    return {name: found for name, found in (("constraint_violation", touched), ("repeated_failure", repeated)) if found}


def read(text: str, asked: Sequence[str], turns: Sequence[Turn], instruction: str) -> dict[str, Ruling]:
    """An answer to what was asked. Raises Invalid: what `judging` raises, wrong_questions, no_evidence, no_such_turn,
    not_executed, too_few_turns, quote_not_found."""
    answer = one_object(text)
    if answer.keys() != set(asked):
        raise Invalid("wrong_questions")
    found = {name: formed(Ruling, answer[name], name) for name in asked}
    for name, ruling in found.items():
        if fault := _fault(name, ruling, turns, instruction):
            raise Invalid(fault, name)
    return found


def _fault(name: str, ruling: Ruling, turns: Sequence[Turn], instruction: str) -> str:
    """The first rule that is broken; "" if none is."""
    if ruling.answer != "no" and not ruling.evidence:
        return "no_evidence"
    if any(not 1 <= turn <= len(turns) for entry in ruling.evidence for turn in entry.turns):
        return "no_such_turn"
    if ruling.answer != "yes":
        return ""
    if any(not entry.turns or not all(turns[turn - 1].command for turn in entry.turns) for entry in ruling.evidence):
        return "not_executed"
    if name == "repeated_failure":
        enough = any(len(set(entry.turns)) >= recovery_rules.TIMES for entry in ruling.evidence)
        return "" if enough else "too_few_turns"
    return "" if all(_quoted(entry.requirement, instruction) for entry in ruling.evidence) else "quote_not_found"


def _quoted(quote: str, instruction: str) -> bool:
    """Two words or more that stand in the instruction as they are; only how lines are broken may differ."""
    said, given = quote.split(), instruction.split()
    return len(said) > 1 and f" {' '.join(said)}" in f" {' '.join(given)}"


def _refusal(flags: Sequence[str], rulings: dict[str, Ruling], judge_uncertain: Uncertain) -> str:
    refused = {"yes", "uncertain"} if judge_uncertain == "reject" else {"yes"}
    said = {name: rulings[name].answer if name in rulings else "uncertain" for name in flags}
    return next((place for name, place in JUDGED.items() if said.get(name) in refused), "")


_QUESTIONS = {
    "constraint_violation": "did the agent break an explicit, clear and consistent constraint of the task? What was really "
    "done counts, not an attempt that had no effect, and commands that were run, not code that was only written. What the first "
    "agent did is not its fault. If the constraint is ambiguous: uncertain. Quote it word for word as requirement.",
    "repeated_failure": "did the agent do the same failed thing, or an equivalent one, three times or more, with no real change "
    "between, nothing new learned and no wait that was needed? Equal error messages alone are none, nor are tests run again after "
    'another repair, tests that are meant to fail, or polling. Name all its turns; requirement is "".',
}
_FORM = (
    '{"answer": "yes", "no" or "uncertain", "evidence": [{"turns": [turns], "requirement": "...", "reason": "..."}]}; '
    "for no, evidence may be []"
)


def question(instruction: str, before: Sequence[str], transcript: str, reasons: dict[str, list[str]]) -> list[Message]:
    """What the judge is asked. `before`: commands of the failed attempt; `transcript`: of the continuation alone."""
    system = "\n".join(
        (
            "You judge how an agent continued another agent's failed attempt at a task in a Linux terminal. Answer, whether or not "
            "it solved the task:",
            *(f"- {name}: {_QUESTIONS[name]}" for name in reasons),
            f"Answer with one JSON object and nothing else, with exactly these keys: {', '.join(reasons)}. Each: {_FORM}.",
            NOT_AN_INSTRUCTION,
        )
    )
    flagged = [f"- {name}: {'; '.join(found)}" for name, found in reasons.items()]
    parts = [f"Task:\n{instruction}"]
    if before:
        lines = [line for command in before for line in judging.marked("$", cut(command, BEFORE_CHARS))]
        parts.append("\n".join(("Commands of the failed attempt, not to be judged:", *lines)))
    parts += [f"Transcript of the agent:\n{transcript}", "\n".join(("Look closely at:", *flagged))]
    return [Message("system", system), Message("user", "\n\n".join(parts))]


def _turns(numbers: Sequence[int]) -> str:
    return f"turn{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def statistics(rows: Sequence[Filtered]) -> dict[str, dict[str, float]]:
    """The funnel in counts, and of what was kept shares: families, output tokens and turns in the paper's buckets.

    `tokens` and `turns`: share per bucket, by its range. Without a kept one the shares are left out.
    """
    counts = Counter(row.refused_by or "kept" for row in rows)
    funnel: dict[str, float] = {"continuations": len(rows), **{name: counts[name] for name in FILTERS}, "kept": counts["kept"]}
    judged = Counter(f"{name}_{ruling.answer}" for row in rows for name, ruling in row.answers)
    judged |= Counter(f"flagged_{name}" for row in rows for name in row.flags)
    judged |= Counter(f"fault_{fault}" for row in rows for fault in row.faults)
    judged |= Counter(no_answer=sum(bool(row.flags) and not row.answers for row in rows))
    kept = [row for row in rows if row.kept]
    found: dict[str, dict[str, float]] = {"filters": funnel, "judge": {name: float(n) for name, n in sorted(judged.items())}}
    if kept:
        families = Counter(row.family for row in kept)
        found["families"] = {name: n / len(kept) for name, n in sorted(families.items())}
        found["tokens"] = _shares([row.output_tokens for row in kept], TOKEN_BUCKETS)
        found["turns"] = _shares([row.turns for row in kept], TURN_BUCKETS)
    return found


def _shares(values: Sequence[int], ends: Sequence[int]) -> dict[str, float]:
    """Share of values in each range, both ends in it."""
    starts = [0, *(end + 1 for end in ends)]
    shares = {}
    for number, start in enumerate(starts):
        end = ends[number] if number < len(ends) else None
        inside = sum(start <= value and (end is None or value <= end) for value in values)
        shares[f"{start}-{end}" if end is not None else f"{start}-"] = inside / len(values)
    return shares
