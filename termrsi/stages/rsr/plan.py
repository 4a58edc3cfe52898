"""RSR 2, plan: from a task and a verified trajectory the model writes a runbook of five blocks. It never sees verifier or oracle.

The headings are given and the model fills one after the other, each in one line: a small model forgets headings. A large one, or
one behind an endpoint, writes the whole in one reply. Commands and a refused draft that are too long for it are cut: it sees their
two ends, with a note between them. The blocks are those of the secondary notes on RSR; prompt and examples are ours, from no suite.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from termrsi.harness.observe import cut
from termrsi.records import Message, SamplingParams
from termrsi.stages.roles import Ask
from termrsi.stages.runbook import BLOCKS

_SYSTEM = f"You write short runbooks for a colleague who works in a Linux terminal. Use these five headings: {', '.join(BLOCKS)}."
_EXAMPLES = (
    (
        "Task: Store the sorted words of fruit.lst in fruit.sorted.\nCommands that worked: sort fruit.lst > fruit.sorted",
        (
            "fruit.sorted holds the words of fruit.lst in order.",
            "run `sort fruit.lst > fruit.sorted`",
            "cat fruit.sorted",
            "if fruit.sorted is empty, run the command again.",
            "do not change fruit.lst.",
        ),
    ),
    (
        "Task: Pack the directory photos into photos.zip.\nCommands that worked: zip -r photos.zip photos",
        (
            "photos.zip holds the directory photos.",
            "run `zip -r photos.zip photos`",
            "unzip -l photos.zip",
            "if a file is missing, run the command again.",
            "do not delete photos.",
        ),
    ),
)
LEAST_CHARS = 80  # below this a text cut at both ends tells nothing
_FEEDBACK = "Your last runbook was refused ({reasons}). Write another, without answers or test details."


class Planner:
    """Writes and rewrites runbooks with the model of role `planner`: the policy itself, unless another is configured."""

    def __init__(
        self,
        ask: Ask,
        sampling: SamplingParams,
        *,
        whole: bool = False,
        fits: Callable[[Sequence[Message]], bool] = lambda messages: True,
    ) -> None:
        """`sampling.max_tokens` bounds a whole runbook. `whole`: it is one reply; else each block gets its share of them.

        `fits`: whether the model has room for a question, and a whole runbook behind it.
        """
        self._ask = ask
        self._whole = whole
        self._fits = fits
        share = sampling.max_tokens if whole else max(1, sampling.max_tokens // len(BLOCKS))
        self._sampling = replace(sampling, max_tokens=share)

    async def write(
        self, instruction: str, commands: tuple[str, ...], seed: int, refused: str = "", reasons: tuple[str, ...] = ()
    ) -> str:
        """A runbook. `reasons` are categories only: the text of a refusal would leak. Raises RequestRefused, EngineError."""
        messages = self._fitted(instruction, "; ".join(commands), refused, reasons)
        if self._whole:
            said = await self._ask("planner", messages, replace(self._sampling, seed=seed), "planner")
            return said.text.strip()
        text = ""
        for number, heading in enumerate(BLOCKS):
            text += f"{heading}:"
            said = await self._ask("planner", messages, replace(self._sampling, seed=seed + number), "planner", text)
            text += f" {said.text.strip().partition(chr(10))[0].strip()}\n"
        return text.strip()

    def _fitted(self, instruction: str, commands: str, refused: str, reasons: tuple[str, ...]) -> list[Message]:
        """With texts of half their length, and so on, until it fits; one that does not with LEAST_CHARS is asked all the same."""
        chars = max(len(commands), len(refused))
        while True:
            messages = question(instruction, cut(commands, chars), cut(refused, chars), reasons)
            if chars <= LEAST_CHARS or self._fits(messages):
                return messages
            chars = max(LEAST_CHARS, chars // 2)


def question(instruction: str, commands: str, refused: str = "", reasons: tuple[str, ...] = ()) -> list[Message]:
    messages = [Message("system", _SYSTEM)]
    for request, contents in _EXAMPLES:
        lines = [f"{heading}: {content}" for heading, content in zip(BLOCKS, contents, strict=True)]
        messages += [Message("user", request), Message("assistant", "\n".join(lines))]
    messages.append(Message("user", f"Task: {instruction}\nCommands that worked: {commands}"))
    if refused:
        messages += [Message("assistant", refused), Message("user", _FEEDBACK.format(reasons=", ".join(reasons)))]
    return messages
