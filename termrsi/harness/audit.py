"""Proof that what is trained is what was sampled: recorded calls against a transcript's chunks (T1, arXiv 2609.11042; the check
itself is ours).

Two places can drift. In the loss region it must be zero: the masked-in ids and log-probabilities are the sampler's, in order, each
once. In the context it may not be: where a harness sends a history that was encoded anew or edited, later turns were sampled after
other ids than those they are trained after; those turns are named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from termrsi.records import Chunk


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the sampler: the whole prompt it was sent, and what it returned."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Audit:
    tokens: int  # sampled
    loss_drift: int  # positions of the loss region whose id or log-probability is not the sampler's, missing and surplus ones too
    context_drift: tuple[int, ...]  # calls (from 0) that were sampled after other ids than those before them in their chunk

    @property
    def exact(self) -> bool:
        return self.loss_drift == 0 and not self.context_drift


def audit(chunks: Sequence[Chunk], calls: Sequence[Call]) -> Audit:
    """Compares them position by position. Linear in the tokens of the loss region, and in the prompts."""
    sampled = [(i, p) for call in calls for i, p in zip(call.ids, call.logprobs, strict=True)]
    trained: list[tuple[int, float]] = []
    starts: list[tuple[Chunk, int]] = []  # of each masked-in run of one turn
    for chunk in chunks:
        logprobs = iter(chunk.logprobs)
        before: tuple[int, int] = (0, -1)
        for at, (token, bit, turn) in enumerate(zip(chunk.ids, chunk.mask, chunk.turn_ids, strict=True)):
            if bit:
                trained.append((token, next(logprobs)))
                if before != (1, turn):
                    starts.append((chunk, at))
            before = (bit, turn)
    wrong = sum(a != b for a, b in zip(sampled, trained, strict=False)) + abs(len(sampled) - len(trained))
    spoken = [number for number, call in enumerate(calls) if len(call.ids)]
    context = [
        number
        for number, (chunk, at) in zip(spoken, starts, strict=False)
        if tuple(calls[number].prompt_ids) != tuple(chunk.ids[:at])
    ]
    return Audit(len(sampled), wrong, tuple(context))
