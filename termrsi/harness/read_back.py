"""Ids back to messages: the inverse of `ChatFormat.prompt` and `bridge`, learnt by probing the template with marks (ours).

The template's special tokens are told from the same words in a message, which are other ids: each becomes a lone surrogate, which
no text holds. What stands between two messages is then a string to search for, leftmost first, and of several the longest.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from termrsi.errors import ConfigError
from termrsi.records import Message

_PROBES = (
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "user"),
    ("user", "user", "assistant", "assistant", "user"),
    ("user", "assistant", "tool", "user"),
    ("system", "assistant"),
)
_LIKELY = ("user", "assistant", "tool", "system")  # of roles that a template writes alike, the first
_SIGNS = 0xD800  # to 0xDFFF
_BYTE = re.compile(r"<0x[0-9A-F]{2}>$")  # a letter's byte where the letter has no token: text, even if listed as special


@dataclass(frozen=True, slots=True)
class Said:
    """A message, and the range of ids that holds it, its end of turn included. Of other messages it holds context at most."""

    message: Message
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Next:
    """What may follow a message of one role: `pattern` has a group for each of `roles`; "": the assistant is about to speak."""

    pattern: re.Pattern[str]
    roles: tuple[str, ...]
    bare: tuple[str, ...]  # what opens an assistant's turn by text alone
    ends: tuple[str, ...]  # of a conversation that ends with the message, longest first


class Reader:
    """Of one tokenizer and template. `lead`: what the template writes between the opening of a turn and a reply in a history."""

    def __init__(self, tokenizer: Any, end_of_turn: int) -> None:  # Any: see ChatFormat
        self._tokenizer = tokenizer
        probes = {(roles, begins): text for roles, begins in _cases() if (text := _rendered(tokenizer, roles, begins)) is not None}
        ids = {case: list(tokenizer.encode(text, add_special_tokens=False)) for case, text in probes.items()}
        special = {token for text, token in tokenizer.get_added_vocab().items() if not _BYTE.match(text)}
        written = special & set().union(*ids.values())
        signed = sorted({*written, end_of_turn})
        self._signs = {token: chr(_SIGNS + i) for i, token in enumerate(signed)}
        self._words = {sign: tokenizer.convert_ids_to_tokens(token) for token, sign in self._signs.items()}
        self._anchor = end_of_turn
        self._end = self._signs[end_of_turn]
        pieces = {case: found for case, one in ids.items() if (found := _pieces(self._shown(one)[0], len(case[0]))) is not None}
        self._openings = _unlike((found[0], roles[0]) for (roles, _), found in pieces.items())
        self._next = {role: self._after(role, pieces) for role in _LIKELY}
        self.lead = self._lead(pieces)

    def read(self, ids: Sequence[int]) -> list[Said]:
        """Raises ConfigError if the template could not have written these ids, or if they can be read in two ways."""
        text, starts = self._shown(ids)
        opening = next((one for one in self._openings if text.startswith(one[0])), None)
        if opening is None:
            raise _unreadable("they do not begin as a conversation does")
        at, role = len(opening[0]), opening[1]
        said: list[Said] = []
        bare: tuple[str, ...] = ()  # what could have opened the present turn, and stands in a message perhaps
        while True:
            follows = self._next[role]
            found = follows.pattern.search(text, at)
            body = text[at : found.start()] if found else self._last(role, text[at:])
            if self._end in body:
                raise _unreadable(f"after an end of turn, in message {len(said) + 1}, no message begins")
            if role == "assistant" and any(words in body for words in bare):
                raise _unreadable(f"the template's own words stand in message {len(said)} or {len(said) + 1}, and are plain text")
            said.append(self._said(role, body, at, starts, len(ids)))
            then = follows.roles[(found.lastindex or 1) - 1] if found else ""
            if found is None or (found.end() == len(text) and then in ("", "assistant")):
                return said
            role, at, bare = then or "assistant", found.end(), follows.bare

    def _said(self, role: str, body: str, at: int, starts: list[tuple[int, int]], count: int) -> Said:
        """Runs of ids are the grain: a reply shares its own with what opens it."""
        text = re.sub("[\ud800-\udfff]", lambda sign: self._words[sign[0]], body)
        first = bisect_right(starts, (at, count)) - 1
        last = bisect_right(starts, (at + len(body), count)) - 1
        end = starts[last + 1][1] if last + 1 < len(starts) else count
        return Said(Message(role, text), starts[first][1], end)

    def _last(self, role: str, rest: str) -> str:
        """The message that nothing follows. A reply may have been cut off; other messages end as the template has it."""
        for end in self._next[role].ends:
            if end and rest.endswith(end):
                return rest[: -len(end)]
        if role != "assistant":
            raise _unreadable(f"they end inside a message of the {role}")
        return rest

    def _after(self, role: str, pieces: "_Pieces") -> _Next:
        between = _unlike(
            (found[i + 1], roles[i + 1])
            for (roles, _), found in pieces.items()
            for i in range(len(roles) - 1)
            if roles[i] == role and found[i + 1]
        )
        last = [(begins, found[-1]) for (roles, begins), found in pieces.items() if roles[-1] == role]
        opens = sorted({text for begins, text in last if begins and text}, key=len, reverse=True)
        ends = {text for begins, text in last if not begins} | ({self._end} if role == "assistant" else set())
        parts = [(f"{re.escape(text)}\\Z", "") for text in opens]  # before what a history has there, which may be shorter
        parts += [(re.escape(text), then) for text, then in between] + [(re.escape(text), "") for text in opens]
        pattern = re.compile("|".join(f"({part})" for part, _ in parts) or "(?!)")
        speaks = {*opens, *(text for text, then in between if then == "assistant")}
        bare = tuple(text for text in speaks if not re.search("[\ud800-\udfff]", text))
        return _Next(pattern, tuple(then for _, then in parts), bare, tuple(sorted(ends, key=len, reverse=True)))

    def _lead(self, pieces: "_Pieces") -> str:
        begun, history = pieces.get((("user",), True)), pieces.get((("user", "assistant", "user"), False))
        if begun is None or history is None or not history[1].startswith(begun[-1]):
            return ""
        return re.sub("[\ud800-\udfff]", lambda sign: self._words[sign[0]], history[1][len(begun[-1]) :])

    def _shown(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """Text with a sign for each special token, and where its runs begin: (place in the text, place in the ids)."""
        starts: list[tuple[int, int]] = [(0, 0)]
        parts: list[str] = []
        length = first = 0
        for place in [*(i for i, token in enumerate(ids) if token in self._signs), len(ids)]:
            if place > first:
                starts.append((length, first))
                parts.append(self._decoded(ids[first:place]))
                length += len(parts[-1])
            if place < len(ids):
                starts.append((length, place))
                parts.append(self._signs[ids[place]])
                length += 1
            first = place + 1
        return "".join(parts), starts

    def _decoded(self, run: Sequence[int]) -> str:
        """As after a special token: what begins a text loses its first space in some tokenizers."""
        options = {"clean_up_tokenization_spaces": False} if hasattr(self._tokenizer, "clean_up_tokenization_spaces") else {}
        before = self._tokenizer.decode([self._anchor], **options)
        text = self._tokenizer.decode([self._anchor, *run], **options)
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode(list(run), **options)


_Pieces = dict[tuple[tuple[str, ...], bool], list[str]]


def _cases() -> list[tuple[tuple[str, ...], bool]]:
    """Each beginning of a probe, with the opening of the assistant's next turn and without it."""
    begun = dict.fromkeys(probe[:n] for probe in _PROBES for n in range(1, len(probe) + 1))
    return [(roles, begins) for roles in begun for begins in (False, True) if not (begins and roles[-1] == "assistant")]


def _mark(place: int) -> str:
    return f"termrsi-{place}-mark"


def _rendered(tokenizer: Any, roles: Sequence[str], begins: bool) -> str | None:  # Any: see ChatFormat
    """A conversation of marks; None if the template has no place for such roles."""
    from jinja2 import TemplateError

    messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
    except (TemplateError, TypeError):  # the latter: of a field that a message of another kind would have
        return None


def _pieces(text: str, count: int) -> list[str] | None:
    """What stands before, between and after the marks; None if one is not there, or not in its place."""
    places = [text.find(_mark(i)) for i in range(count)]
    if -1 in places or places != sorted(places):
        return None
    return re.split("|".join(_mark(i) for i in range(count)), text)


def _unlike(found: Any) -> list[tuple[str, str]]:  # Any: an iterable of pairs (text, role)
    """Each text once, longest first, with the likeliest of its roles."""
    roles: dict[str, str] = {}
    for text, role in sorted(found, key=lambda pair: _LIKELY.index(pair[1])):
        roles.setdefault(text, role)
    return sorted(roles.items(), key=lambda pair: len(pair[0]), reverse=True)


def _unreadable(why: str) -> ConfigError:
    return ConfigError(f"the chat template did not write these tokens: {why}", "tokenizer", "valid: that of the policy they are of")
