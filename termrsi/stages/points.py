"""Restart points: what a failed rollout leaves for a recovery (x, h_f, s_f) = (instruction, failed history, failure state)."""

from termrsi.errors import StageError
from termrsi.records import RecoveryPoint, ScoredRollout, TaskSpec


def is_start(scored: ScoredRollout) -> bool:
    """A failure whose state was kept and whose history is one run of tokens."""
    return not scored.verdict.strict and scored.rollout.snapshot is not None and len(scored.rollout.chunks) == 1


def point_of(scored: ScoredRollout, task: TaskSpec, step: int) -> RecoveryPoint:
    """Raises StageError if the rollout is no restart point."""
    rollout = scored.rollout
    if rollout.snapshot is None or not is_start(scored):
        raise StageError("a success, or without a snapshot", rollout.id)
    return RecoveryPoint(
        id=f"point:{rollout.id}",
        task=task,
        snapshot=rollout.snapshot,
        history_ids=rollout.chunks[0].ids,
        num_turns=len(rollout.turns),
        born_step=step,
        commands=tuple(t.command for t in rollout.turns if t.command),
    )
