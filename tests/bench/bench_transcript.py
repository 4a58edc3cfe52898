"""What a turn of a long episode costs: `python -m tests.bench.bench_transcript [TURNS]`.

A whole episode on the embedded model's tokenizer, with replies and outputs that are written before, against what a harness does
that keeps text: render the whole conversation by the chat template, and encode it, for each turn. Milliseconds of the turns
around the 10th and the last, and the characters that were encoded.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from termrsi.harness.episode import Episode
from termrsi.harness.render import ChatFormat
from termrsi.model.checkpoint import embedded_model
from termrsi.places import cache_dir
from termrsi.records import Completion, EnvironmentSpec, EpisodeSpec, Limits, SamplingParams, TaskSpec, WeightsVersion
from tests.unit.harness.test_drift import Counting, Saying

REPLY = "```bash\nls -l /tmp/file.txt && cat file.txt | grep -c error > count.out\n```"
AROUND = 5  # turns on each side, whose median is taken


class Agent:
    """Says the same each time; notes when it was asked, and how much was encoded since."""

    def __init__(self, chat: ChatFormat, counting: Counting) -> None:
        self._ids = (*chat.encode(REPLY), chat.end_of_turn)
        self._counting = counting
        self.asked: list[tuple[float, int]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        self.asked.append((time.perf_counter(), self._counting.encoded))
        return Completion(self._ids, (-0.1,) * len(self._ids), "stop")

    async def pull(self, weights: WeightsVersion) -> None: ...


def middle(values: Sequence[float], turn: int) -> float:
    return statistics.median(values[max(turn - AROUND, 1) : turn + AROUND])


async def ours(tokenizer: Any, turns: int) -> tuple[list[float], list[float]]:  # Any: transformers' own
    """Milliseconds and characters of each turn, from one call of the sampler to the next."""
    counting = Counting(tokenizer)
    chat = ChatFormat(counting)
    agent = Agent(chat, counting)
    limits = Limits(max_turns=turns, max_context_tokens=10**9, wall_s=600.0)
    spec = EpisodeSpec("e", "g", TaskSpec("t", "f", "Do it.", "", EnvironmentSpec()), "react", SamplingParams(), limits)
    await Episode(spec, agent, Saying(), chat).run()
    pairs = list(zip(agent.asked, agent.asked[1:], strict=False))
    return [(after[0] - before[0]) * 1000 for before, after in pairs], [float(after[1] - before[1]) for before, after in pairs]


def by_text(tokenizer: Any, turns: int) -> list[float]:  # Any: transformers' own
    """Milliseconds of each turn of a harness that keeps messages."""
    messages = [{"role": "user", "content": "Do it."}]
    found = []
    for _ in range(turns - 1):
        start = time.perf_counter()
        messages += [{"role": "assistant", "content": REPLY}, {"role": "user", "content": "[exit 0]\na"}]
        tokenizer.encode(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False
        )
        found.append((time.perf_counter() - start) * 1000)
    return found


def measure(turns: int = 300) -> dict[str, float]:
    """Figures by name; both in one run."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model(cache_dir() / "models"))
    times, encoded = asyncio.run(ours(tokenizer, turns))
    text = by_text(tokenizer, turns)
    figures = {
        f"{name}_{turn}": middle(values, turn) for name, values in (("ms", times), ("text_ms", text)) for turn in (10, turns)
    }
    return figures | {f"encoded_{turn}": middle(encoded, turn) for turn in (10, turns)}


if __name__ == "__main__":
    last = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    found = measure(last)
    sys.stdout.write("  ".join(f"{name} {value:.2f}" for name, value in found.items()) + "\n")
    grown, text_grown = found[f"ms_{last}"] / found["ms_10"], found[f"text_ms_{last}"] / found["text_ms_10"]
    sys.stdout.write(f"turn {last} against turn 10: {grown:.2f} times; by text {text_grown:.1f} times\n")
