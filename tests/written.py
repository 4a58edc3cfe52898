"""An agent whose replies are written down, so that a test says exactly what it did; the engine has tests of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from termrsi.fakes import FakeTokenizer
from termrsi.harness.render import ChatFormat
from termrsi.records import Completion, SamplingParams, WeightsVersion

CHAT = ChatFormat(FakeTokenizer())


@dataclass
class Written:
    """`ports.Generator` of replies in order: the first command that the prompt does not show yet, then DONE."""

    replies: Sequence[str]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        shown = CHAT.decode(prompt_ids)
        ids = (*CHAT.encode(next((r for r in self.replies if r not in shown), "DONE")), CHAT.end_of_turn)
        return Completion(ids, (0.0,) * len(ids), "stop", 0, 0, 0)

    async def pull(self, weights: WeightsVersion) -> None: ...


@dataclass
class Answering(Written):
    """For each conversation its own replies: those behind the word that its prompt holds."""

    replies: Sequence[str] = ()
    by_word: dict[str, Sequence[str]] | None = None

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        shown = CHAT.decode(prompt_ids)
        replies = next((replies for word, replies in (self.by_word or {}).items() if word in shown), ())
        return await Written(replies).generate(prompt_ids, params, prefix_key)


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"
