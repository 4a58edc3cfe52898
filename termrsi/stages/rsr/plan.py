"""RSR 2, plan: from a task and a verified trajectory the model writes runbooks of five blocks. It never sees verifier or oracle.

The blocks are those of the secondary notes on RSR; prompt and example are ours. The example belongs to no task of any suite.
"""

import re
from dataclasses import replace

from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator
from termrsi.records import Message, SamplingParams
from termrsi.stages.runbook import BLOCKS

_SYSTEM = "You write short runbooks for a colleague who works in a Linux terminal. Use exactly these five headings: " + ", ".join(
    BLOCKS
)
_EXAMPLE_TASK = "Task: Store the sorted words of fruit.lst in fruit.sorted.\nCommands that worked: sort fruit.lst > fruit.sorted"
_EXAMPLE_RUNBOOK = """Target end state: fruit.sorted holds the words of fruit.lst in order.
Milestones: run `sort fruit.lst > fruit.sorted` in one command.
Useful checks: cat fruit.sorted
Recovery strategies: if the file is empty, run the command again.
Pitfalls: do not change fruit.lst."""
_FEEDBACK = "Your last runbook was refused ({reasons}). Write it again with all five headings, without answers or test details."


class Planner:
    """Writes and rewrites runbooks with the policy itself."""

    def __init__(self, generator: Generator, chat: ChatFormat, sampling: SamplingParams) -> None:
        self._generator = generator
        self._chat = chat
        self._sampling = sampling

    async def write(
        self, instruction: str, commands: tuple[str, ...], seed: int, refused: str = "", reasons: tuple[str, ...] = ()
    ) -> tuple[str, int]:
        """A runbook, as the model wrote it, and how many tokens it took. `reasons` are categories only: text would leak."""
        request = f"Task: {instruction}\nCommands that worked: {'; '.join(commands)}"
        messages = [
            Message("system", _SYSTEM),
            Message("user", _EXAMPLE_TASK),
            Message("assistant", _EXAMPLE_RUNBOOK),
            Message("user", request),
        ]
        if refused:
            messages += [Message("assistant", refused), Message("user", _FEEDBACK.format(reasons=", ".join(reasons)))]
        completion = await self._generator.generate(self._chat.prompt(messages), replace(self._sampling, seed=seed), "planner")
        return tidy(self._chat.decode(completion.ids)), len(completion.ids)


def tidy(text: str) -> str:
    """Without empty lines and without what follows the last block's line or list."""
    return re.sub(r"\n\s*\n+", "\n", text.strip())
