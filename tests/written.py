"""An agent whose replies are written down, so that a test says exactly what it did; the engine has tests of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from termrsi.fakes import FakeTokenizer
from termrsi.harness.render import ChatFormat
from termrsi.records import (
    Chunk,
    Completion,
    EnvironmentSpec,
    EpisodeSpec,
    Limits,
    Rollout,
    SamplingParams,
    ScoredRollout,
    StepSpec,
    StopReason,
    TaskSpec,
    Turn,
    Verdict,
    WeightsVersion,
)

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


def two_steps(path: str) -> tuple[EpisodeSpec, ScoredRollout]:
    """An episode of a task of two steps, one call in the first and two in the second, and its result."""
    steps = (StepSpec("one", "Do it."), StepSpec("two", "Do more."))
    task = TaskSpec("org/steps", "f", "Do it.\n\nDo more.", path, EnvironmentSpec(), steps=steps)
    chunks = (
        Chunk((1, 2, 3), (0, 0, 1), (0, 0, 0), (-0.1,)),
        Chunk((1, 4, 5, 9, 6), (0, 1, 1, 0, 1), (1, 1, 1, 1, 2), (-0.1, -0.2, -0.3)),
    )
    turns = tuple(Turn(text, None, "") for text in ("a", "b", "DONE"))
    parts = (Verdict(True, 1.0, ("c",), log="fine\n"), Verdict(False, 0.25, (), ("d",)))
    verdict = Verdict(False, 0.625, ("one: c",), ("two: d",), parts=parts)
    rollout = Rollout(
        "e",
        "g",
        task.id,
        "f",
        "react",
        chunks,
        turns,
        StopReason.done,
        prompt_tokens=7,
        completion_tokens=4,
        step="two",
        step_starts=(0, 1),
    )
    return EpisodeSpec("e", "g", task, "react", SamplingParams(), Limits()), ScoredRollout(rollout, verdict)
