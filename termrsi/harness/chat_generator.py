"""`ports.Generator` over a model that reads and writes text: one of another family, that plays episodes in the policy's stead.

Its replies are encoded once, with the policy's tokenizer, as they come in. They are no tokens that the policy sampled, and nobody
knows their log-probabilities: such a rollout is for cross-entropy (SFT), and `stages.credit` refuses it.
"""

from collections.abc import Sequence

from termrsi.errors import ConfigError, TaskError, WeightsError
from termrsi.harness.actions import THINK, THINK_END
from termrsi.harness.render import ChatFormat
from termrsi.ports import Writer
from termrsi.records import Completion, SamplingParams, WeightsVersion


class ChatGenerator:
    """`writer` answers what `chat` reads back from the prompt's ids."""

    def __init__(self, writer: Writer, chat: ChatFormat) -> None:
        self._writer = writer
        self._chat = chat

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        """Raises EngineError once the model cannot be had; TaskError if the prompt cannot be read back, RequestRefused if the model
        does not take it: either drops the episode.

        `params.max_tokens` bounds the reply in the model's own tokens and again in the policy's: one that is longer there is cut.
        """
        try:
            messages = self._chat.messages_of(prompt_ids)
        except ConfigError as error:
            raise TaskError(f"its conversation cannot be read back: {error}", "chat generator") from error
        said = await self._writer.write(messages, params, prefix_key)
        ids = self._chat.plain(self._reply(said.text))
        cut = said.cut or len(ids) >= params.max_tokens
        ids = ids[: params.max_tokens] if cut else [*ids, self._chat.end_of_turn]
        return Completion(tuple(ids), (), "length" if cut else "stop", model=said.model, cost=said.cost)

    def _reply(self, text: str) -> str:
        """What follows the prompt: no reasoning, as the template has that in a history; or what the endpoint shows of it.

        Where the template has opened the reasoning, it is closed.
        """
        opener, lead = self._chat.reply(""), self._chat.reader.lead
        if THINK_END in text:
            return text.lstrip().removeprefix(THINK) if opener else text
        if lead.startswith(opener):
            return lead[len(opener) :] + text
        return f"\n{THINK_END}\n\n{text}"

    async def pull(self, weights: WeightsVersion) -> None:
        """Raises WeightsError: the weights of such a model are not ours to change."""
        raise WeightsError("a model behind an endpoint cannot be updated", "chat generator")
