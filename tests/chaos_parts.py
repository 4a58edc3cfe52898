"""Scripted parts behind the real actors of a run: an engine, a model with an optimizer, a tokenizer.

All of them are functions of what they are given: a run that is killed and goes on must come to the same numbers, to the bit.
"""

import asyncio
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ray

from termrsi import weights
from termrsi.actors.busy import Busy
from termrsi.errors import CheckpointError, WeightsError
from termrsi.fakes import FakeTokenizer
from termrsi.records import Completion, Sample, SamplingParams, UpdateMetrics

SIZE = 8
FILE = "weights.json"
END = FakeTokenizer().encode("<|im_end|>")[0]


def without_transformers() -> None:
    """In this process the tokenizer of any model is the fake one."""
    stub = ModuleType("transformers")
    stub.AutoTokenizer = type("AutoTokenizer", (), {"from_pretrained": staticmethod(lambda path: FakeTokenizer())})  # pyright: ignore
    sys.modules["transformers"] = stub


class Engine:
    """In place of vLLM: a reply depends on its prompt, its seed and the weights, and on nothing else.

    Where the prompt shows no command yet, the one that solves the task, or one that does not; then DONE.
    """

    def __init__(self, model: str, options: Any) -> None:  # Any: EngineOptions
        self._tokens, self._weights = FakeTokenizer(), ""
        self.version, self.dead, self.busy = 0, False, Busy()
        self.stats = {"requests": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0, "completion_tokens": 0.0}
        self._gate = asyncio.Event()
        self._gate.set()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        await self._gate.wait()
        text = self._tokens.decode(prompt_ids)
        drawn = hashlib.sha256(repr((tuple(prompt_ids), params.seed, self._weights)).encode()).digest()
        word = (re.findall(r"Write the word (\w+) ", text) or ["none"])[-1]
        said = "DONE"
        if "echo" not in text.rpartition("Write the word")[2]:
            said = f"```bash\necho {word if drawn[0] % 2 else 'nothing'} > /app/out\n```"
        ids = (*self._tokens.encode(said), END)
        for name, amount in (("requests", 1), ("prompt_tokens", len(prompt_ids)), ("completion_tokens", len(ids))):
            self.stats[name] += amount
        logprobs = tuple(-0.5 - drawn[1 + i % 30] / 512 for i in range(len(ids)))
        return Completion(ids, logprobs, "stop", self.version, self.version)

    async def load(self, facts: weights.Facts, fetch: Callable[..., Any], version: int) -> dict[str, float]:  # Any: as `Fetcher`
        self._weights, self.version = digest(numbers_in(await fetch(list(facts)))), version
        self._gate.set()
        return {}

    def hold(self) -> None:
        self._gate.clear()

    async def go_on(self) -> None:
        self._gate.set()

    def close(self) -> None: ...


class Host:
    """In place of a policy's or a critic's process: `SIZE` numbers, one of them each token's, and an optimizer's moments."""

    def __init__(self, model: str, config: Any, seat: Any) -> None:  # Any: as of model_host
        self._numbers, self._moments, self._version = start()

    def ready(self) -> bool:
        return True

    def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [[-0.6 + 0.1 * math.tanh(self._numbers[i % SIZE]) for i in sample.ids] for sample in samples]

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [[0.5 + 0.1 * math.tanh(self._numbers[i % SIZE]) for i in sample.ids] for sample in samples]

    def update(self, samples: Sequence[Sample], *rest: Any) -> UpdateMetrics:
        """`rest`: the loss and the step size, or the step size and a clip."""
        gradient = [0.0] * SIZE
        for sample in samples:
            towards = sample.advantages or sample.returns or (1.0,) * len(sample.ids)
            for token, mask, weight in zip(sample.ids, sample.mask, towards, strict=True):
                gradient[token % SIZE] += mask * weight
        self._moments = [0.9 * moment + one for moment, one in zip(self._moments, gradient, strict=True)]
        self._numbers = [number + 1e-2 * moment for number, moment in zip(self._numbers, self._moments, strict=True)]
        return UpdateMetrics(math.fsum(gradient), math.hypot(*gradient), sum(sum(sample.mask) for sample in samples), 0.0)

    def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        return self.update(samples, lr)

    def refit(self, scale: float, shift: float) -> None:
        self._numbers = [scale * number + shift for number in self._numbers]

    def save(self, directory: str) -> str:
        return self._write(directory, {"numbers": self._numbers})

    def load(self, directory: str) -> str:
        """A directory that `save` left, or a model's: then as at the start. Fresh moments."""
        self._numbers, self._moments, _ = start()
        if (Path(directory) / FILE).is_file():
            self._numbers = read(directory)["numbers"]
        return self.checksum()

    def save_training(self, directory: str) -> str:
        return self._write(directory, {"numbers": self._numbers, "moments": self._moments})

    def load_training(self, directory: str, version: int) -> str:
        found = read(directory)
        self._numbers, self._moments, self._version = found["numbers"], found["moments"], version
        return self.checksum()

    def checksum(self) -> str:
        return digest(self._numbers)

    def export(self, base: int, bucket_bytes: int) -> Iterator[Any]:  # Any: an object of the store, then `Handed`
        from termrsi.actors.model_host import Handed

        self._version += 1
        state = packed(self._numbers)
        yield state
        yield Handed(self._version, weights.facts_of(state), (tuple(state),))

    def pull(self, stored: weights.Stored, expected: str) -> None:
        self._numbers, self._moments = numbers_in(ray.get(stored.parts[0].reference)), [0.0] * SIZE
        if self.checksum() != expected:
            raise WeightsError(f"checksum {self.checksum()} after a pull of {expected}", "critic")

    def _write(self, directory: str, state: dict[str, list[float]]) -> str:
        """Replaced, not written over: checkpoints are links to the same files."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{FILE}.part"
        draft.write_text(json.dumps(state))
        draft.rename(folder / FILE)
        return self.checksum()


def start() -> tuple[list[float], list[float], int]:
    return [0.1 * number for number in range(SIZE)], [0.0] * SIZE, 0


def read(directory: str) -> dict[str, list[float]]:
    try:
        return json.loads((Path(directory) / FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", directory) from error


def packed(numbers: Sequence[float]) -> weights.PackedState:
    return {"numbers": ("float64", (SIZE,), np.array(numbers).view(np.uint8))}


def numbers_in(state: weights.PackedState) -> list[float]:
    return state["numbers"][2].view(np.float64).tolist()


def digest(numbers: Sequence[float]) -> str:
    """As it is published."""
    return weights.checksum(weights.facts_of(packed(numbers)))
