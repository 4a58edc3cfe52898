"""RSR 6, collect: strip the runbook, drop near-duplicates, balance per task.

The sampled tokens stay as they were sampled; only the prompt before them becomes the plain one of the general harness.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from termrsi.furnish import workdir_of
from termrsi.harness import variants
from termrsi.harness.render import ChatFormat, restate
from termrsi.records import Chunk, Sample, ScoredRollout, TaskSpec

NEAR = 0.9  # Jaccard similarity of command sets above which two executions of one task are the same
REASONS = ("verified", "near_duplicates", "over_balance", "split_history", "cut_replies", "kept")

Origin = TypeVar("Origin", bound=Hashable)


def collect(
    chat: ChatFormat, task: TaskSpec, results: Sequence[tuple[Origin, ScoredRollout]], keep_per_task: int
) -> tuple[list[tuple[Origin, Sample]], dict[str, int]]:
    """Samples of the verified among one task's trajectories with their origins, and counts of why the rest was not kept.

    An origin is what wrote or led a trajectory (a runbook, a harness): where there are too many, each origin's shortest come first.
    """
    counts = {"executions": len(results)} | dict.fromkeys(REASONS, 0)
    verified = [(origin, result) for origin, result in results if result.verdict.strict]
    counts["verified"] = len(verified)
    before: list[set[str]] = []
    kept = []
    for origin, result in _in_turns(verified):
        commands = {turn.command for turn in result.rollout.turns if turn.command}
        if any(_jaccard(commands, other) > NEAR for other in before):
            counts["near_duplicates"] += 1
        elif len(result.rollout.chunks) != 1:
            counts["split_history"] += 1
        elif has_cut_reply(result.rollout.chunks[0], chat.end_of_turn):
            counts["cut_replies"] += 1
        elif len(kept) >= keep_per_task:
            counts["over_balance"] += 1
        else:
            before.append(commands)
            kept.append((origin, strip(chat, task, result)))
            counts["kept"] += 1
    return kept, counts


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counts of all tasks; those of REASONS are there without any."""
    whole = Counter({"executions": 0} | dict.fromkeys(REASONS, 0))
    for one in counts:
        whole.update(one)
    return dict(whole)


def _in_turns(results: list[tuple[Origin, ScoredRollout]]) -> list[tuple[Origin, ScoredRollout]]:
    """The shortest of each origin, then the second of each, and so on."""
    of: dict[Origin, list[ScoredRollout]] = defaultdict(list)
    for origin, result in results:
        of[origin].append(result)
    ranked = [
        (rank, str(origin), origin, result)
        for origin, own in of.items()
        for rank, result in enumerate(sorted(own, key=lambda r: (len(r.rollout.turns), r.rollout.id)))
    ]
    return [(origin, result) for _, _, origin, result in sorted(ranked, key=lambda r: (r[0], r[1], len(r[3].rollout.turns)))]


def has_cut_reply(chunk: Chunk, end_of_turn: int) -> bool:
    """Whether a length limit ended a sampled reply: trained on, it would teach to ramble."""
    last = {turn: token for token, mask, turn in zip(chunk.ids, chunk.mask, chunk.turn_ids, strict=True) if mask}
    return any(token != end_of_turn for token in last.values())


def strip(chat: ChatFormat, task: TaskSpec, result: ScoredRollout) -> Sample:
    """The executor's own tokens after the plain prompt: no runbook, no worked examples, no critique."""
    prompt = chat.prompt(variants.get("react").messages(task.instruction, workdir=workdir_of(task.environment) or variants.WORKDIR))
    chunk = restate(result.rollout.chunks[0], prompt)
    return Sample(chunk.ids, chunk.mask, chunk.turn_ids, rollout_id=result.rollout.id, group_id=task.id)


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0
