"""Episodes by the group: every rollout of one task or restart point, with seeds that do not depend on order."""

import hashlib
from dataclasses import replace

from termrsi.records import EpisodeSpec, Limits, RecoveryPoint, SamplingParams, TaskSpec

RECOVERY_PROMPT = (
    "Your earlier attempt at this task failed. The machine was not reset: what you did before is still there and may be wrong. "
    "Repair what is wrong, keep what is useful, and finish the task.\nTask: {instruction}"
)


def seed_of(*parts: object) -> int:
    """A 31-bit seed from what identifies the draw; the same on every machine."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def task_group(
    task: TaskSpec,
    size: int,
    *,
    label: str,
    harness: str,
    sampling: SamplingParams,
    limits: Limits,
    seed: int,
    guidance: str = "",
    keep_snapshot: bool = False,
    model: str = "",
) -> list[EpisodeSpec]:
    """`size` rollouts of one task from its initial state. `label` makes the ids unique in the run. `model`: see EpisodeSpec."""
    group_id = f"{label}/{task.id}"
    return [
        EpisodeSpec(
            id=f"{group_id}/{i}",
            group_id=group_id,
            task=task,
            harness=harness,
            sampling=replace(sampling, seed=seed_of(seed, group_id, i)),
            limits=limits,
            guidance=guidance,
            keep_snapshot=keep_snapshot,
            model=model,
        )
        for i in range(size)
    ]


def recovery_group(
    point: RecoveryPoint,
    size: int,
    *,
    label: str,
    harness: str,
    sampling: SamplingParams,
    limits: Limits,
    seed: int,
    prompt: str = RECOVERY_PROMPT,
    keep_snapshot: bool = False,
    model: str = "",
) -> list[EpisodeSpec]:
    """`size` rollouts from one failure state; the turn budget is fresh, the context must hold the failed history too."""
    group_id = f"{label}/{point.id}"
    text = prompt.format(instruction=point.task.instruction)
    return [
        EpisodeSpec(
            id=f"{group_id}/{i}",
            group_id=group_id,
            task=point.task,
            harness=harness,
            sampling=replace(sampling, seed=seed_of(seed, group_id, i)),
            limits=limits,
            recovery=point,
            recovery_prompt=text,
            keep_snapshot=keep_snapshot,
            model=model,
        )
        for i in range(size)
    ]


def fits(point: RecoveryPoint, limits: Limits, *, reserve_tokens: int) -> bool:
    """Whether a recovery episode can make a turn at all after the failed history (dropped at insertion otherwise)."""
    return len(point.history_ids) + reserve_tokens <= limits.max_context_tokens
