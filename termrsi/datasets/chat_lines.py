"""Rows as lines of chat messages (JSONL), which programs for fine-tuning read and write; and back.

A line is {"messages": [{"role", "content"} ...], "termrsi": {...}}: others ignore the last, and a file of theirs lacks it. An
assistant message that is context only has "weight": 0. Where encoding the text would give other tokens than were sampled, "tokens"
keeps those; they count as long as they still read as the messages do, so that an edited line is encoded anew.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jinja2 import TemplateError

from termrsi.datasets.schema import Row, lineage_of
from termrsi.errors import ConfigError
from termrsi.harness.render import ChatFormat
from termrsi.records import Message, Sample

ROLES = ("system", "user", "assistant", "tool")
_OWN = {"rollout_id": str, "task": str, "family": str, "reward": float, "strict": bool, "tokens": dict}
_LINEAGE = {"kind": str, "run": str, "experiment": str, "stage": str, "harness": str, "runbook": int, "seed": int}
_LINEAGE |= {"checkpoint": str, "parent": str}
_KNOWN = _OWN | _LINEAGE
_HALF = re.compile("[\ud800-\udfff]")  # half of a character that JSON writes in two: no text has it alone
_LISTS = {"ids": int, "mask": int, "turn_ids": int, "sampler_logp": float}


@dataclass(frozen=True, slots=True)
class Spoken:
    """A message, and whether it is trained on."""

    message: Message
    trained: bool = False


def spoken(chat: ChatFormat, sample: Sample) -> list[Spoken]:
    """Messages of a sample; the assistant's are trained if a token of theirs is. Raises ConfigError if the tokens do not parse."""
    said = chat.reader.read(sample.ids)
    return [Spoken(s.message, s.message.role == "assistant" and any(sample.mask[s.first : s.end])) for s in said]


def encode(chat: ChatFormat, said: Sequence[Spoken], tools: Sequence[dict[str, Any]] = ()) -> Sample:  # Any: parsed JSON
    """Ids as if each reply had been sampled after what comes before it, end of turn included; the mask is 1 on trained replies.

    Turns are numbered as by `records.Chunk`: trained replies are the calls. Raises ValueError if no reply is trained or the
    conversation begins with one, and TemplateError if the template has no place for a message.
    """
    ids: list[int] = []
    mask: list[int] = []
    turn_ids: list[int] = []
    waiting: list[Message] = []
    turn = 0

    def append(tokens: Sequence[int], trained: bool) -> None:
        nonlocal ids, mask, turn_ids
        ids += tokens
        mask += [int(trained)] * len(tokens)
        turn_ids += [turn if trained else max(turn - 1, 0)] * len(tokens)

    for one in said:
        if one.message.role != "assistant":
            waiting.append(one.message)
            continue
        if not ids and not waiting:
            raise ValueError("the conversation begins with the assistant")
        begun = chat.bridge(waiting, ended=True) if ids else chat.prompt(waiting, tools)
        context, reply = chat.answer(begun, one.message.content)
        append(context, False)
        append([*reply, chat.end_of_turn], one.trained)
        waiting = []
        turn += one.trained
    if not turn:
        raise ValueError("no assistant message to train on")
    append(chat.bridge(waiting, ended=True) if waiting else [], False)
    return Sample(tuple(ids), tuple(mask), tuple(turn_ids))


def to_line(chat: ChatFormat, row: Row) -> str:
    """One line without its end. Raises ConfigError if the tokens do not parse as a conversation of this tokenizer."""
    sample, said = row.sample, spoken(chat, row.sample)
    messages = [
        {"role": s.message.role, "content": s.message.content}
        | ({"weight": 0} if s.message.role == "assistant" and not s.trained else {})
        for s in said
    ]
    own: dict[str, object] = {"rollout_id": sample.rollout_id, "task": sample.group_id, "family": row.family}
    own |= {"reward": row.reward, "strict": row.strict, **asdict(row.lineage)}
    own = {key: value for key, value in own.items() if value not in ("", None)}
    if _tokens(sample) != _tokens(_encoded(chat, said)):
        own["tokens"] = {key: value for key, value in _tokens(sample).items() if value != ()}
    return json.dumps({"messages": messages, "termrsi": own}, ensure_ascii=False)


def from_line(chat: ChatFormat, line: str) -> Row:
    """Raises ConfigError that says what is wrong with the line."""
    try:
        raw = json.loads(line, parse_constant=_no_number)
    except ValueError as error:
        raise ConfigError(f"is no JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError("is no JSON that can be read: it is nested too deeply") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        raise ConfigError('has no list "messages"')
    said = [_message(one, number) for number, one in enumerate(raw["messages"])]
    tools = raw.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise ConfigError('"tools" is no list of objects')
    if tools and not chat.knows_tools:
        raise ConfigError("has tools, which this tokenizer's template does not show")
    own = _checked(raw.get("termrsi", {}), _KNOWN, '"termrsi"')
    lineage = lineage_of(own)
    try:
        sample = _kept(chat, own.get("tokens"), said) or encode(chat, said, tools)
    except TemplateError as error:
        raise ConfigError(f"the tokenizer's chat template refuses it: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    sample = replace(sample, rollout_id=own.get("rollout_id", ""), group_id=own.get("task", ""))
    reward = own.get("reward")
    return Row(sample, own.get("family", ""), None if reward is None else float(reward), own.get("strict"), lineage)


def _encoded(chat: ChatFormat, said: Sequence[Spoken]) -> Sample:
    """An empty one where the text alone cannot be encoded: the tokens are kept then."""
    try:
        return encode(chat, said)
    except (TemplateError, ValueError):
        return Sample((), (), ())


def _tokens(sample: Sample) -> dict[str, Any]:  # Any: tuples of numbers, or a number
    return {key: getattr(sample, key) for key in _LISTS} | {"temperature": sample.temperature}


def _kept(chat: ChatFormat, tokens: Any, said: Sequence[Spoken]) -> Sample | None:  # Any: parsed JSON, here and below
    """The sample of the tokens that a line keeps; None if there are none, or they read otherwise than its messages now."""
    if tokens is None:
        return None
    tokens = _checked(tokens, dict.fromkeys(_LISTS, list) | {"temperature": float}, '"tokens"')
    lists: dict[str, tuple] = {}
    for key, kind in _LISTS.items():
        lists[key] = tuple(tokens.get(key, ()))
        if not all(_is(value, kind) for value in lists[key]) or len(lists[key]) not in {len(lists["ids"]), 0}:
            raise ConfigError(f'"tokens": {key} must be {len(lists["ids"])} numbers')
    if not len(lists["ids"]) == len(lists["mask"]) == len(lists["turn_ids"]) or not {0, 1}.issuperset(lists["mask"]):
        raise ConfigError('"tokens": ids, mask and turn_ids must be of one length, and the mask of 0 and 1')
    sample = Sample(
        lists["ids"],
        lists["mask"],
        lists["turn_ids"],
        sampler_logp=tuple(map(float, lists["sampler_logp"])),
        temperature=float(tokens.get("temperature", 1.0)),
    )
    try:
        same = spoken(chat, sample) == list(said)
    except (ValueError, OverflowError, IndexError):  # of another tokenizer, or of none
        return None
    return sample if same else None


def _message(raw: Any, number: int) -> Spoken:
    where = f"messages[{number}]"
    if not isinstance(raw, dict):
        raise ConfigError("is no object", where)
    role, content, weight = raw.get("role"), raw.get("content"), raw.get("weight", 1)
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}", where, f"valid: {', '.join(ROLES)}")
    if raw.get("tool_calls"):
        raise ConfigError("tool_calls are not text", where, "write the call into the content as the model is to say it")
    if not isinstance(content, str) or _HALF.search(content):
        raise ConfigError("content is no string of whole characters", where)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ConfigError(f"weight is {weight!r}", where, "valid: 0 or 1")
    return Spoken(Message(role, content), role == "assistant" and weight == 1)


def _checked(raw: Any, known: dict[str, type], where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError("is no object", where)
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r}", where, f"valid: {', '.join(known)}")
        if not _is(value, known[key]):
            raise ConfigError(f"{key} is {json.dumps(value)[:40]}", where, f"must be of type {known[key].__name__}")
    return raw


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, kind) if kind is float else kind):
        return isinstance(value, bool) and kind is bool
    if isinstance(value, str):
        return not _HALF.search(value)
    return not isinstance(value, int) or abs(value) < 1 << 63


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")
