"""Messages to tokens, and the append-only transcript that the learner trains on.

Text is encoded once, when it enters; sampled ids are kept as sampled and never re-encoded (TITO, T1, arXiv 2609.11042;
the matching rule is ours). `ChatFormat` takes the glue between turns from the tokenizer's own chat template.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from termrsi.harness.actions import THINK
from termrsi.harness.read_back import Reader
from termrsi.records import Chunk, Message, Routing

Case = Literal["strict", "normalized", "retokenized", "split"]
MAX_EDGE_TOKENS = 4
_MARK = "\u2402termrsi\u2402"


class ChatFormat:
    """Prompts and the glue between turns, as token ids, for one tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:  # Any: transformers' tokenizers share no base that is cheap to import
        self.tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        template = template if isinstance(template, str) else ""
        self.knows_tools = bool(re.search(r"\btools\b", template))  # else a harness names them itself
        self._knows_tool_role = bool(re.search(r"""["']tool["']""", template))
        self._special = tuple(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else ()
        self._knows_system = not template or self._renders([Message("system", "-"), Message("user", "-")])
        self.end_of_turn: int = self._end_of_turn() if template else tokenizer.eos_token_id
        self._opener = self._thinking_opener() if template else ""
        # Where that is not the end of the text, an engine must be told to stop there.
        self.stop_ids = () if self.end_of_turn == tokenizer.eos_token_id else (self.end_of_turn,)

    def reply(self, text: str) -> str:
        """What the sampler said, with the opening of the reasoning that the template wrote for it."""
        return f"{self._opener}{text}" if self._opener and not text.lstrip().startswith(THINK) else text

    def unopened(self, prompt_ids: Sequence[int]) -> list[int]:
        """A prompt without that opening: as a history has it in which the reasoning is not shown."""
        opener = self.encode(self._opener) if self._opener else []
        ids = list(prompt_ids)
        return ids[: len(ids) - len(opener)] if opener and ids[-len(opener) :] == opener else ids

    def plain(self, text: str) -> list[int]:
        """Ids of text that may hold the template's special tokens, which are only text there."""
        if any(token in text for token in self._special):
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        return self.encode(text)

    def _thinking_opener(self) -> str:
        """What the template writes of the assistant's next turn from a <think> on, if it ends with that."""
        begun = self._apply([Message("user", "-")], ())
        at = begun.rfind(THINK)
        return begun[at:] if at >= 0 and not begun[at + len(THINK) :].strip() else ""

    def _renders(self, messages: Sequence[Message]) -> bool:
        from jinja2 import TemplateError  # what a template raises of roles that it does not know

        try:
            self._apply(messages, ())
        except TemplateError:
            return False
        return True

    def _end_of_turn(self) -> int:
        """The special token that the template writes right after what the assistant says (Gemma's is not the end of the text)."""
        text = self._apply([Message("user", "-"), Message("assistant", _MARK)], (), begins=False)
        after = text[text.index(_MARK) + len(_MARK) :].lstrip()
        ends = [token for token in self._special if after.startswith(token)]
        return self.tokenizer.convert_tokens_to_ids(max(ends, key=len)) if ends else self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a whole conversation, up to where the assistant begins to speak. `tools`: schemas, if the template shows them."""
        return self._encode_messages(messages, "", tools)

    def bridge(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Ids that follow an assistant turn: the messages, and the opening of the next assistant turn.

        What a tool says is told by the user, in tags, where the template has no such role.

        `ended`: the assistant's last id was the end-of-turn token. If it was cut by a length limit, the token is added here,
        as glue, so that the next turn stands where the template has it.
        """
        before = [Message("system", "-"), Message("user", "-"), Message("assistant", _MARK)]
        if not self._knows_tool_role and all(m.role == "tool" for m in messages):
            text = "\n".join(f"<tool_response>\n{m.content}\n</tool_response>" for m in messages)
            messages = [Message("user", text)]
        ids = self._encode_messages([*before, *messages], _MARK)
        return ids if ended else [self.end_of_turn, *ids]

    @cached_property
    def reader(self) -> Reader:
        """Learnt when it is first needed: some twenty conversations are rendered."""
        return Reader(self.tokenizer, self.end_of_turn)

    def messages_of(self, ids: Sequence[int]) -> list[Message]:
        """What `prompt`, replies and `bridge` were made of; of a prompt alone, without the turn that it opens.

        The template's words are told from the same words in a message by their ids. Roles that a template writes alike are read
        as the user; a last reply may be cut off. Raises ConfigError if the ids do not parse, or do in two ways (where the
        template opens turns by plain text, and a message holds it).
        """
        return [one.message for one in self.reader.read(ids)]

    def answer(self, begun: Sequence[int], text: str) -> tuple[list[int], list[int]]:
        """What stands before a reply, and its own ids without an end of turn: as a sampler would have said `text`.

        `begun`: a prompt, or one and what followed. A reply that shows no reasoning stands where a history has it.
        """
        if self._opener and text.startswith(self._opener):
            return list(begun), self.plain(text[len(self._opener) :])
        return self.unopened(begun), self.plain(self.reader.lead + text)

    def _encode_messages(self, messages: Sequence[Message], after: str, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The template's text after the mark `after` and its end of turn, encoded; what stands inside a message is only text.

        A command can print the template's special tokens: taken as such they would forge turns.
        """
        if not self._knows_system:
            messages = _without_system(messages)
        held = {f"\u2402{i}\u2402": m.content for i, m in enumerate(messages) if any(t in m.content for t in self._special)}
        marks = {content: mark for mark, content in held.items()}
        text = self._apply([Message(m.role, marks.get(m.content, m.content)) for m in messages], tools)
        if after:
            end = self.tokenizer.convert_ids_to_tokens(self.end_of_turn)
            text = text[text.index(after) + len(after) :].removeprefix(end)
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, held)) + ")", text) if held else [text]:
            plain = piece in held
            ids += self.plain(held[piece]) if plain else self.encode(piece)
        return ids

    def _apply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, begins: bool = True) -> str:
        raw = [{"role": m.role, "content": m.content} for m in messages]
        more: dict[str, Any] = {"tools": list(tools)} if tools and self.knows_tools else {}
        return self.tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=begins, **more)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """What a system message says, said by the user, before what that says first."""
    if not messages or messages[0].role != "system":
        return list(messages)
    first, rest = messages[0], list(messages[1:])
    said = f"{first.content}\n\n{rest.pop(0).content}" if rest and rest[0].role == "user" else first.content
    return [Message("user", said), *rest]


class Transcript:
    """Append-only tokens of one trial: `.ids .mask .turn_ids .logprobs` of the current chunk, `.chunks` all of them.

    The mask is 1 exactly on the ids that the sampler returned; `.logprobs` has one entry per 1, or none. `.cases` counts how each
    next prompt matched what was recorded. `.routing`: of the tokens before the last sampled one, where the sampler says it.
    """

    def __init__(self, tokenizer: Any) -> None:  # Any: see ChatFormat
        self._tokenizer = tokenizer
        self._bytes = _TokenBytes(tokenizer)
        self._newlines = set(tokenizer.encode("\n", add_special_tokens=False))
        self._ends = _end_tokens(tokenizer)
        self.cases: Counter[str] = Counter()
        self._closed: list[Chunk] = []
        self._turn = 0
        self._begin()

    def _begin(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.turn_ids: list[int] = []
        self.logprobs: list[float] = []
        self._known: bool | None = None  # whether log-probabilities are; None: nothing was sampled yet
        self.routing: Routing | None = None

    def prompt(self, ids: Sequence[int]) -> None:
        """The first prompt of the trial, whole. Raises ValueError if something was recorded already."""
        if self.ids:
            raise ValueError("prompt() comes first; later prompts go through next_prompt()")
        self._context(ids)

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """What the sampler returned for the present prompt; no log-probability at all where they are not known.

        Raises ValueError if the lengths differ, or if they are known of some calls of a chunk and not of others.
        """
        if logprobs and len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled ids but {len(logprobs)} log-probabilities")
        if ids and self._known not in (None, bool(logprobs)):
            raise ValueError("log-probabilities of some calls of a chunk, but not of all")
        self._known = bool(logprobs) if ids else self._known
        self.ids += ids
        self.mask += [1] * len(ids)
        self.turn_ids += [self._turn] * len(ids)
        self.logprobs += logprobs
        self._turn += 1

    def routed(self, routing: Routing) -> None:
        """By which experts the sampler came to what was just recorded: of every token but the last, which none has seen yet.

        What was told before stays, for it was sampled by that; the last token of the call before, and the observation after it,
        come with this one. Raises ValueError if the lengths differ, or if it was not told of the chunk's first call.
        """
        if routing.tokens != len(self.ids) - 1:
            raise ValueError(f"routing of {routing.tokens} tokens, {len(self.ids) - 1} are needed")
        if self.routing is None and self.turn_ids[self.mask.index(1)] != self._turn - 1:
            raise ValueError("routing of some calls of a chunk, but not of its first")
        known = b"" if self.routing is None else self.routing.data
        self.routing = replace(routing, data=known + routing.data[len(known) :])

    def next_prompt(self, ids: Sequence[int]) -> Case:
        """The whole next prompt: what is new is appended, masked; a changed history begins a new chunk."""
        case, suffix = self._match(list(ids))
        self.cases[case] += 1
        if case == "split":
            self._closed.append(self._chunk())
            self._begin()
        self._context(suffix)
        return case

    def follow(self, ids: Sequence[int]) -> None:
        """Glue that whoever sends ids knows to come next: "strict" by construction, at the cost of these ids alone."""
        self.cases["strict"] += 1
        self._context(ids)

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk that holds a sampled token, in order."""
        return [c for c in (*self._closed, self._chunk()) if any(c.mask)]

    def _chunk(self) -> Chunk:
        return Chunk(tuple(self.ids), tuple(self.mask), tuple(self.turn_ids), tuple(self.logprobs), self.routing)

    def _context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.turn_ids += [max(self._turn - 1, 0)] * len(ids)

    def _match(self, new: list[int]) -> tuple[Case, list[int]]:
        old = self.ids
        if new[: len(old)] == old:
            return "strict", new[len(old) :]
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        edge, rest = old[same:], new[same:]
        other = self._other_edge(edge, rest)
        allowed = self._ends | self._newlines
        if max(len(edge), len(other)) <= MAX_EDGE_TOKENS and allowed.issuperset(edge) and allowed.issuperset(other):
            return "normalized", rest[len(other) :]
        old_bytes, new_bytes = self._bytes.join(old), self._bytes.join(new)
        if new_bytes.startswith(old_bytes) and (suffix := self._suffix_at(new, len(old_bytes), new_bytes)) is not None:
            return "retokenized", suffix
        return "split", new

    def _other_edge(self, edge: list[int], rest: list[int]) -> list[int]:
        """The part of the new prompt that stands for `edge`: through its first end of turn if `edge` has one, else newlines."""
        if self._ends.intersection(edge):
            end = next((i for i, t in enumerate(rest) if t in self._ends), None)
            return rest if end is None else rest[: end + 1]
        stop = next((i for i, t in enumerate(rest) if t not in self._newlines), len(rest))
        return rest[:stop]

    def _suffix_at(self, new: list[int], cut: int, new_bytes: bytes) -> list[int] | None:
        """The new prompt's own ids after byte `cut` if a token begins there, else the bytes encoded again (context only).

        None if they cannot be: the cut lies inside a character.
        """
        position = 0
        for i, token in enumerate(new):
            if position == cut:
                return new[i:]
            position += len(self._bytes.of(token))
        try:
            tail = new_bytes[cut:].decode("utf-8")
        except UnicodeDecodeError:
            return None
        return list(self._tokenizer.encode(tail, add_special_tokens=False)) if tail else []


def restate(chunk: Chunk, prompt_ids: Sequence[int]) -> Chunk:
    """The same sampled tokens and observations under another first prompt: strips a runbook or worked examples (ours).

    Without routing, which belongs to the prompt that the sampler saw. Raises ValueError if the chunk has no sampled token.
    """
    first = chunk.mask.index(1)
    return Chunk(
        ids=(*prompt_ids, *chunk.ids[first:]),
        mask=(*(0,) * len(prompt_ids), *chunk.mask[first:]),
        turn_ids=(*(0,) * len(prompt_ids), *chunk.turn_ids[first:]),
        logprobs=chunk.logprobs,
    )


def _end_tokens(tokenizer: Any) -> set[int]:  # Any: see ChatFormat
    """End of turn, end of text: special tokens that close something."""
    ends = {tokenizer.eos_token_id} if getattr(tokenizer, "eos_token_id", None) is not None else set()
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return ends | {i for text, i in added.items() if "end" in text.lower() or "eot" in text.lower() or text == "</s>"}


class _TokenBytes:
    """The bytes a token stands for: a token edge may lie inside a UTF-8 character, so decoded strings do not compare."""

    def __init__(self, tokenizer: Any) -> None:  # Any: see ChatFormat
        self._tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}
        self._added = set(tokenizer.get_added_vocab().values()) if hasattr(tokenizer, "get_added_vocab") else set()
        self._byte_of = _gpt2_byte_alphabet()

    def of(self, token: int) -> bytes:
        if token not in self._cache:
            self._cache[token] = self._make(token)
        return self._cache[token]

    def join(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.of(t) for t in ids)

    def _make(self, token: int) -> bytes:
        if not hasattr(self._tokenizer, "convert_ids_to_tokens"):
            return self._tokenizer.decode([token]).encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._added:
            return text.encode()
        if all(c in self._byte_of for c in text):
            return bytes(self._byte_of[c] for c in text)
        return self._tokenizer.decode([token]).encode()


def _gpt2_byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    hidden = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}
