"""Two judges of a task, who know nothing of each other, on eight facets; the worse reading counts (River's filter, T1's facets:
arXiv 2608.22631, and the audit of T1; questions, words and the form of an answer are ours).

A judge is a model that reads the whole task, its verifier and its solution too: what it writes must reach no agent and no planner.
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from termrsi import answers
from termrsi.answers import TOO_LONG, Asked, Invalid, formed, one_object
from termrsi.ports import Writer
from termrsi.records import Finding, Message, Outcome, SamplingParams, TaskSpec, Writing
from termrsi.reward.audit_log import AuditLog
from termrsi.reward.dossier import Document, dossier

JUDGES = 2
ASKED = 3  # times, until an answer is valid
MAX_TOKENS, TEMPERATURE = 4096, 0.6

FACETS = {  # what is to be judged -> the question
    "alignment": "Does the verifier check what the instruction asks for: all of it, and nothing else?",
    "leakage": "Can the answer, or what the verifier compares with, be found in the instruction or in the environment?",
    "shortcut": "Does the solution take a way that no honest worker could: an answer that is written down instead of worked out, "
    "or knowledge that neither instruction nor environment gives?",
    "hidden_requirement": "Does the verifier ask for something (a name, a place, a format, a value) that neither the instruction "
    "nor the environment tells?",
    "weak_verifier": "Would the verifier accept work that does not do what the instruction asks for?",
    "clarity": "Is the instruction unambiguous, so that two careful workers would agree on what is to be done?",
    "fixtures": "Do instruction, environment, solution and verifier agree with each other on names, paths, formats and values?",
    "value": "Is it a task worth learning from: realistic, and more than a triviality or a puzzle about the verifier?",
}
HARD = ("leakage", "shortcut", "hidden_requirement", "weak_verifier")  # rejected here, a task is rejected; elsewhere it is flagged

_SYSTEM = """You audit tasks for agents that work in a Linux terminal. An agent sees the instruction and the environment only; the \
verifier decides afterwards whether it succeeded, and the solution is the author's own. Judge the task, not its style.
Answer with one JSON object and nothing else. It has one key for each facet, and for each of them an object with exactly these keys:
"verdict": "accept", "flag" (a doubt, or a small fault) or "reject" (a fault that makes the task unfit to learn from);
"reason": one or two sentences;
"evidence": a list of quotations, copied exactly, character by character, from the text below. "flag" and "reject" need one."""


class Reading(BaseModel):
    """What one judge says of one facet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verdict: Literal["accept", "flag", "reject"]
    reason: str
    evidence: list[str] = []


class Answer(BaseModel):
    """One for each of FACETS."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alignment: Reading
    leakage: Reading
    shortcut: Reading
    hidden_requirement: Reading
    weak_verifier: Reading
    clarity: Reading
    fixtures: Reading
    value: Reading


def unbounded(messages: Sequence[Message]) -> bool:
    """Of a model whose context is not known: its server refuses what is too long."""
    return True


async def judged(
    task: TaskSpec,
    writer: Writer,
    name: str,
    key: str,
    log: AuditLog,
    *,
    max_tokens: int = MAX_TOKENS,
    fits: Callable[[Sequence[Message]], bool] = unbounded,
) -> tuple[tuple[Finding, ...], Writing]:
    """One finding for each facet, and what it took (without text). What a judge said of this content before is not asked again.

    A judge without a valid answer (at fault each time, refused, or not asked for want of room) leaves every facet unjudged, if the
    other does not reject it. Raises EngineError if the model cannot be had.
    """
    given: list[Answer | None] = []
    faults: list[str] = []
    spent: list[Asked[Answer]] = []
    for number in range(1, JUDGES + 1):
        part = f"judge {number} {name}"
        known = log.found(key, part)
        if known is None:
            asked = await ask(task, writer, number, max_tokens=max_tokens, fits=fits)
            spent.append(asked)
            answer, fault = asked.answer, ", ".join(asked.faults)
            faults += [f"judge {number}: {fault}"] if answer is None else []
            log.add(key, part, task.id, fault if answer is None else answer.model_dump(), finished=answer is not None)
        else:
            answer = Answer.model_validate(known)
        given.append(answer)
    used = Writing(
        "", sum(one.prompt_tokens for one in spent), sum(one.completion_tokens for one in spent), sum(one.cost for one in spent)
    )
    return tuple(_worse(facet, given, faults) for facet in FACETS), used


async def ask(
    task: TaskSpec, writer: Writer, number: int, *, max_tokens: int, fits: Callable[[Sequence[Message]], bool]
) -> Asked[Answer]:
    """The answer of one judge, or why there is none. Each has an order of facets and of documents, and seeds, of its own."""
    documents = dossier(task)
    messages = prompt(documents, number)
    if not fits(messages):
        return Asked(None, (TOO_LONG,), 0, 0, 0.0)
    sampling = SamplingParams(TEMPERATURE, max_tokens=max_tokens, seed=number * ASKED)
    shown = "\n".join(document.text for document in documents)
    return await answers.ask(
        writer, messages, sampling, lambda text: parsed(text, shown), rounds=ASKED - 1, key=f"audit/{task.id}/{number}"
    )


def prompt(documents: tuple[Document, ...], number: int) -> list[Message]:
    """Judge 1 has everything in the order given here; the others in one of their own."""
    facets, parts = list(FACETS.items()), list(documents)
    if number > 1:
        draw = random.Random(number)
        draw.shuffle(facets)
        draw.shuffle(parts)
    questions = "\n".join(f"{facet}: {question}" for facet, question in facets)
    texts = "\n\n".join(f"===== {document.part}\n{document.text}" for document in parts)
    return [Message("system", _SYSTEM), Message("user", f"The facets:\n{questions}\n\nThe task:\n\n{texts}")]


def parsed(text: str, shown: str) -> Answer:
    """An answer. Raises Invalid: what `answers` raises, no_evidence, quote_not_found (it does not occur in what was shown)."""
    answer = formed(Answer, one_object(text))
    for facet in FACETS:
        reading: Reading = getattr(answer, facet)
        if reading.verdict != "accept" and not any(quote.strip() for quote in reading.evidence):
            raise Invalid("no_evidence", facet)
        if any(quote not in shown for quote in reading.evidence):
            raise Invalid("quote_not_found", facet)
    return answer


def _worse(facet: str, given: list[Answer | None], faults: list[str]) -> Finding:
    readings = [(number, getattr(answer, facet)) for number, answer in enumerate(given, start=1) if answer is not None]
    ranks = ("accept", "flag", "reject")
    worst = max((ranks.index(reading.verdict) for _, reading in readings), default=0)
    told = tuple(_told(number, reading) for number, reading in readings if reading.verdict != "accept")
    if ranks[worst] == "reject" and facet in HARD:
        return Finding(facet, Outcome.reject, told)
    if len(readings) < len(given):
        return Finding(facet, Outcome.unmeasured, (*told, "unjudged", *faults))
    return Finding(facet, Outcome.flag if worst else Outcome.passed, told)


def _told(number: int, reading: Reading) -> str:
    return f"judge {number}, {reading.verdict}: {reading.reason} {' | '.join(map(repr, reading.evidence))}"
