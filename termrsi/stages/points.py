"""Restart points: what a failed rollout leaves for a recovery (x, h_f, s_f) = (instruction, failed history, failure state)."""

from termrsi.errors import StageError
from termrsi.harness.group import RECOVERY_PROMPT
from termrsi.records import RecoveryPoint, ScoredRollout, TaskSpec
from termrsi.reward import steps
from termrsi.stages.base import Context


def is_start(scored: ScoredRollout) -> bool:
    """A failure whose state was kept and whose history is one run of tokens; of a task of several steps, its last one's."""
    rollout = scored.rollout
    return not scored.verdict.strict and rollout.snapshot is not None and len(rollout.chunks) == rollout.step_chunk + 1


def reserve(ctx: Context, point: RecoveryPoint, prompt: str = RECOVERY_PROMPT) -> int:
    """Tokens that one turn after the failed history needs: the recovery message, and a whole reply."""
    return len(ctx.chat.encode(prompt.format(instruction=point.task.instruction))) + ctx.config.sampling.max_tokens + 16


def point_of(scored: ScoredRollout, task: TaskSpec, step: int) -> RecoveryPoint:
    """Raises StageError if the rollout is no restart point."""
    rollout = scored.rollout
    if rollout.snapshot is None or not is_start(scored):
        raise StageError("a success, or without a snapshot", rollout.id)
    return RecoveryPoint(
        id=f"point:{rollout.id}",
        task=steps.only(task, rollout.step) if rollout.step else task,
        snapshot=rollout.snapshot,
        history_ids=rollout.chunks[-1].ids,
        num_turns=len(rollout.turns),
        born_step=step,
        commands=tuple(t.command for t in rollout.turns if t.command),
        group_id=rollout.group_id,
    )
