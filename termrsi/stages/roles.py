"""The policy as the model of a role: `ports.Writer` over the generator."""

from collections.abc import Sequence
from dataclasses import replace

from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator
from termrsi.records import Message, SamplingParams, Writing


class PolicyWriter:
    """Writes with the weights that the generator serves now."""

    def __init__(self, generator: Generator, chat: ChatFormat) -> None:
        self._generator = generator
        self._chat = chat

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        prompt = [*self._chat.prompt(messages), *self._chat.encode(begun)]
        completion = await self._generator.generate(prompt, replace(sampling, stop_ids=self._chat.stop_ids), key)
        text = self._chat.decode(completion.ids)
        return Writing(text, len(prompt), len(completion.ids), cut=completion.finish == "length")
