"""A model in a role whose answers are written down."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from termrsi.records import Message, SamplingParams, Writing


@dataclass
class Scripted:
    """`ports.Writer` of answers in order; keeps what it was asked. `cut`: numbers of the answers that a length limit ended."""

    answers: Sequence[str]
    cut: frozenset[int] = frozenset()
    asked: list[list[Message]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        number = len(self.asked)
        self.asked.append(list(messages))
        self.seeds.append(sampling.seed)
        return Writing(self.answers[number], 10, 3, 0.5, cut=number in self.cut)
