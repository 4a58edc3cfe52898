"""RSR 6, collect: strip the runbook, drop near-duplicates, balance per task, give the SFT set.

The sampled tokens stay as they were sampled; only the prompt before them becomes the plain one of the general harness.
"""

from termrsi.furnish import workdir_of
from termrsi.harness import variants
from termrsi.harness.render import ChatFormat, restate
from termrsi.records import Chunk, Sample, ScoredRollout, TaskSpec

NEAR = 0.9  # Jaccard similarity of command sets above which two executions of one task are the same


def collect(
    chat: ChatFormat, tasks: dict[str, TaskSpec], results: list[ScoredRollout], keep_per_task: int
) -> tuple[list[Sample], dict[str, int]]:
    """Samples of verified executions, and counts of why the rest was not kept."""
    reasons = ("verified", "near_duplicates", "over_balance", "split_history", "cut_replies", "kept")
    counts = {"executions": len(results)} | dict.fromkeys(reasons, 0)
    kept: dict[str, list[set[str]]] = {}
    samples = []
    for result in sorted(results, key=lambda r: (r.rollout.task_id, len(r.rollout.turns), r.rollout.id)):
        if not result.verdict.strict:
            continue
        counts["verified"] += 1
        commands = {turn.command for turn in result.rollout.turns if turn.command}
        before = kept.setdefault(result.rollout.task_id, [])
        if any(_jaccard(commands, other) > NEAR for other in before):
            counts["near_duplicates"] += 1
        elif len(before) >= keep_per_task:
            counts["over_balance"] += 1
        elif len(result.rollout.chunks) != 1:
            counts["split_history"] += 1
        elif has_cut_reply(result.rollout.chunks[0], chat.end_of_turn):
            counts["cut_replies"] += 1
        else:
            before.append(commands)
            samples.append(strip(chat, tasks[result.rollout.task_id], result))
            counts["kept"] += 1
    return samples, counts


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
