"""Tasks to train, validation and heldout: by what a task says of itself, else by a hash of its id."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from termrsi.errors import ConfigError, TaskError
from termrsi.records import TaskSpec

SPLITS = ("train", "validation", "heldout")


@dataclass(frozen=True, slots=True)
class Split:
    """Disjoint by id and by instruction; each task's `split` field says where it is."""

    train: tuple[TaskSpec, ...]
    validation: tuple[TaskSpec, ...]
    heldout: tuple[TaskSpec, ...]


def split(tasks: Sequence[TaskSpec], *, seed: int = 0, validation: float = 0.1, heldout: float = 0.2) -> Split:
    """A task with a `split` keeps it; the others are drawn by a hash of seed and instruction, so that adding a task moves none.

    Tasks with the same instruction fall together. `validation` and `heldout` are shares in expectation.

    Raises ConfigError for shares out of range, TaskError for an unknown split name, an id that comes twice, or an
    instruction that two splits share.
    """
    if not (0.0 <= validation <= 1.0 and 0.0 <= heldout <= 1.0 and validation + heldout <= 1.0):
        raise ConfigError(f"shares validation {validation} and heldout {heldout}", "tasks", "each in [0, 1], sum at most 1")
    parts: dict[str, list[TaskSpec]] = {name: [] for name in SPLITS}
    ids: set[str] = set()
    owners: dict[str, TaskSpec] = {}
    for task in tasks:
        if task.split and task.split not in SPLITS:
            raise TaskError(f"unknown split {task.split!r}", task.id, f"valid: {', '.join(SPLITS)}")
        if task.id in ids:
            raise TaskError("two tasks with the same id", task.id)
        ids.add(task.id)
        placed = task if task.split else replace(task, split=_draw(task, seed, validation, heldout))
        key = _normal(task)
        owner = owners.setdefault(key, placed)
        if owner.split != placed.split:
            raise TaskError(f"same instruction as {owner.id!r}, but {placed.split} and not {owner.split}", task.id)
        parts[placed.split].append(placed)
    return Split(tuple(parts["train"]), tuple(parts["validation"]), tuple(parts["heldout"]))


def _normal(task: TaskSpec) -> str:
    """The instruction without differences of white space; a task without one stands for itself."""
    return " ".join(task.instruction.split()) or f"id {task.id}"


def _draw(task: TaskSpec, seed: int, validation: float, heldout: float) -> str:
    digest = hashlib.sha256(f"{seed}\0{_normal(task)}".encode()).digest()
    at = int.from_bytes(digest[:8], "big") / 2**64
    return "heldout" if at < heldout else "validation" if at < heldout + validation else "train"
