"""A model's answer that is one JSON object: how it is asked for, checked, and asked for again.

An answer at fault is asked for again, and the category of its fault is told; a model that cannot be had is an error, a request that
it refuses is an outcome. The bounds are ours.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from termrsi.errors import RequestRefused
from termrsi.ports import Writer
from termrsi.records import Message, SamplingParams

Answer = TypeVar("Answer")
Form = TypeVar("Form", bound=BaseModel)

AGAIN = "Your last answer was refused ({fault}). Answer again, with one JSON object as asked for."
REFUSED = "refused"  # the category of a request that the model's server does not take
TOO_LONG = "too_long"  # of one that was not made: it does not fit the model


class Invalid(Exception):
    """An answer that cannot be taken: the category of its fault, and where in the answer it is."""

    def __init__(self, category: str, where: str = "") -> None:
        super().__init__(category, where)
        self.category = category
        self.where = where

    def __str__(self) -> str:
        return f"{self.category} in {self.where}" if self.where else self.category


@dataclass(frozen=True, slots=True)
class Asked(Generic[Answer]):
    """What asking came to. `answer`: None without a valid one; `faults`: of the answers that were none, in order, or REFUSED."""

    answer: Answer | None
    faults: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    cost: float


async def ask(
    writer: Writer,
    messages: Sequence[Message],
    sampling: SamplingParams,
    read: Callable[[str], Answer],
    *,
    rounds: int,
    key: str = "",
) -> Asked[Answer]:
    """Asks, and up to `rounds` times again. `read` takes an answer's text apart, or raises Invalid.

    Of earlier answers the model sees the last alone, so that a request is at most the first, one answer, and a sentence. A refused
    request ends the asking, with the fault REFUSED. Raises EngineError if the model cannot be had.
    """
    faults: list[str] = []
    told, prompt_tokens, completion_tokens, cost = list(messages), 0, 0, 0.0
    answer = None
    for number in range(rounds + 1):
        seed = None if sampling.seed is None else sampling.seed + number
        try:
            writing = await writer.write(told, replace(sampling, seed=seed), key)
        except RequestRefused:
            faults.append(REFUSED)
            break
        prompt_tokens += writing.prompt_tokens
        completion_tokens += writing.completion_tokens
        cost += writing.cost
        try:
            answer = read(writing.text)
            break
        except Invalid as fault:
            faults.append("cut" if writing.cut else fault.category)
            said = "it was too long" if writing.cut else str(fault)
            told = [*messages, Message("assistant", writing.text), Message("user", AGAIN.format(fault=said))]
    return Asked(answer, tuple(faults), prompt_tokens, completion_tokens, cost)


def one_object(text: str) -> dict[str, Any]:  # Any: JSON that nobody has checked yet
    """The one JSON object of an answer, in a fence or not, whatever stands around it. What a model thought aloud does not count.

    Raises Invalid: no_object, several_objects, key_twice.
    """
    thought, closed, said = text.partition("</think>")
    text = said if closed and not thought.lstrip().startswith(("{", "```")) else text
    found: list[dict[str, Any]] = []
    broken = False
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
            found.append(value)
        except ValueError:  # a brace in a sentence, or JSON that broke off
            broken, end = True, at + 1
        except RecursionError as error:
            raise Invalid("no_object") from error
        at = text.find("{", end)
    if len(found) == 1:
        return found[0]
    raise Invalid("several_objects" if found and not broken else "no_object")


def formed(form: type[Form], value: object, where: str = "") -> Form:
    """`value` as `form` has it. Raises Invalid: bad_form, with the field."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise Invalid("bad_form", ".".join(filter(None, (where, place)))) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: see one_object
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Invalid("key_twice")
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)
