"""Models in roles that read and write text: `ports.Writer` over the policy's own generator."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator
from termrsi.records import Message, SamplingParams, Writing


class Ask(Protocol):
    """What the model in a role writes, its costs counted: `stages.base.Context.ask`."""

    async def __call__(
        self, role: str, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = ""
    ) -> Writing: ...


class PolicyWriter:
    """The policy itself. A reply that a length limit ended is handed over as it is, and says so."""

    def __init__(self, generator: Generator, chat: ChatFormat) -> None:
        self._generator = generator
        self._chat = chat

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        """With the opening of a thought that the chat template wrote.

        Raises EngineError once the engine is dead, RequestRefused for what is too long for it.
        """
        prompt = [*self._chat.prompt(messages), *self._chat.encode(begun)]
        params = replace(sampling, stop_ids=self._chat.stop_ids)
        completion = await self._generator.generate(prompt, params, key)
        said = self._chat.decode(completion.ids)
        text = said if begun else self._chat.reply(said)
        return Writing(text, len(prompt), len(completion.ids), cut=completion.finish == "length")
