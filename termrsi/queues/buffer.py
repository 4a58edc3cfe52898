"""Groups of rollouts between sampler and learner, as a state machine of slots: stale data cannot arise. No clock, no Ray.

A slot belongs to one group from the moment its first rollout may start until the learner has trained on it. The weights
version is the number of batches trained, so the number of slots bounds what can be trained before a group.

Invariants: a group holds exactly one slot; it comes out of `take` exactly once, or of `drop`; nothing else frees a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

G = TypeVar("G")  # what a group is: the buffer never looks inside


@dataclass(frozen=True, slots=True)
class Ready(Generic[G]):
    """A finished group: the weights version when it was admitted, and how many versions the learner has moved since."""

    group_id: str
    group: G
    version: int
    staleness: int


@dataclass(slots=True)
class GroupBuffer(Generic[G]):
    """Slots for `batch_groups` x (1 + `max_staleness`) groups.

    Why that many: let one batch be n groups and S = `max_staleness`. Groups are trained in the order they were admitted.
    A group admitted at version v finds at most n (1 + S) - 1 others in slots, so it is among the first n (1 + S) groups
    trained from then on: at the latest in the batch that takes version v + S to v + S + 1, and it is S versions old then.
    With S = 0 the next batch is admitted when the last is `trained`: no overlap. n = 8, S = 1: 16 slots, 8 being trained
    while 8 are sampled.

    The learner waits for the oldest group (were it overtaken, long episodes would be the stale ones). `drop` takes out a
    group whose rollouts were all lost; its place is free for another.
    Raises ValueError unless `batch_groups` >= 1 and `max_staleness` >= 0.
    """

    batch_groups: int
    max_staleness: int
    version: int = 0
    # In the order of admission: id -> (version at admission, the finished group in a 1-tuple, or () while it is sampled).
    _slots: dict[str, tuple[int, tuple[G, ...]]] = field(default_factory=dict, init=False)
    _training: tuple[str, ...] = field(default=(), init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or self.max_staleness < 0:
            raise ValueError(f"batch_groups={self.batch_groups} must be >= 1, max_staleness={self.max_staleness} >= 0")

    @property
    def capacity(self) -> int:
        return self.batch_groups * (1 + self.max_staleness)

    @property
    def free(self) -> int:
        """How many groups may start now."""
        return self.capacity - len(self._slots)

    @property
    def sampling(self) -> tuple[str, ...]:
        """Ids of admitted groups that are not finished, oldest first."""
        return tuple(group_id for group_id, (_, group) in self._slots.items() if not group)

    def admit(self, group_id: str) -> bool:
        """A slot for a new group; False if none is free: `trained` or `drop` ends the wait.

        Raises ValueError if a group of this id was admitted before: its prompt would be trained twice.
        """
        if group_id in self._seen:
            raise ValueError(f"group {group_id} was admitted before")
        if self.free == 0:
            return False
        self._seen.add(group_id)
        self._slots[group_id] = (self.version, ())
        return True

    def readmit(self, group_id: str, version: int) -> None:
        """The slot that a group was given at `version`, in a buffer that goes on; in the order in which they were admitted.

        Raises ValueError if none is free, if it was admitted before, or if it would be too old when it is trained.
        """
        trained_at = self.version + len(self._slots) // self.batch_groups
        if trained_at - version > self.max_staleness:
            raise ValueError(f"group {group_id} of version {version} would be trained at {trained_at}")
        if not self.admit(group_id):
            raise ValueError(f"group {group_id} does not fit into {self.capacity} slots")
        self._slots[group_id] = (version, ())

    def put(self, group_id: str, group: G) -> None:
        """The group's rollouts are all there. Raises KeyError for one that holds no slot, ValueError if it came before."""
        version, held = self._slots[group_id]
        if held:
            raise ValueError(f"group {group_id} came twice")
        self._slots[group_id] = (version, (group,))

    def drop(self, group_id: str) -> None:
        """Free the slot of a group that will not come. Raises KeyError if it holds none, ValueError if it is being trained."""
        if group_id in self._training:
            raise ValueError(f"group {group_id} is being trained")
        del self._slots[group_id]

    def take(self) -> list[Ready[G]] | None:
        """The `batch_groups` oldest groups, if all are finished; None: wait, the next `put` or `drop` may end it.

        They keep their slots until `trained`. Raises ValueError if the batch before was not reported as trained.
        """
        if self._training:
            raise ValueError("the batch before is still being trained")
        oldest = list(self._slots.items())[: self.batch_groups]
        if len(oldest) < self.batch_groups or not all(group for _, (_, group) in oldest):
            return None
        return self._hand_out(oldest)

    def take_rest(self) -> list[Ready[G]] | None:
        """At the end of a run: up to `batch_groups` of what is left, once nothing is sampled; None: wait. [] if it is empty."""
        if self._training:
            raise ValueError("the batch before is still being trained")
        return None if self.sampling else self._hand_out(list(self._slots.items())[: self.batch_groups])

    def trained(self) -> None:
        """The learner is done with the batch of the last `take`: its slots are free, and the version is one higher.

        Raises ValueError if none is being trained.
        """
        if not self._training:
            raise ValueError("no batch is being trained")
        for group_id in self._training:
            del self._slots[group_id]
        self._training = ()
        self.version += 1

    def to_list(self) -> list[tuple[str, int, G]]:
        """Finished groups that were not trained, oldest first, with their versions: with `version` all that a resume needs.

        Groups still being sampled are not in it: their ids are free to be admitted again after the resume.
        """
        return [(group_id, version, group[0]) for group_id, (version, group) in self._slots.items() if group]

    @classmethod
    def from_list(
        cls, groups: Sequence[tuple[str, int, G]], *, batch_groups: int, max_staleness: int, version: int
    ) -> "GroupBuffer[G]":
        """The buffer of `to_list` at `version`. Raises ValueError if the groups do not fit, or are too old to be trained."""
        buffer = cls(batch_groups, max_staleness, version)
        if len(groups) > buffer.capacity:
            raise ValueError(f"{len(groups)} groups do not fit into {buffer.capacity} slots")
        for place, (group_id, born, group) in enumerate(groups):
            if version + place // batch_groups - born > max_staleness:
                raise ValueError(f"group {group_id} of version {born} would be trained at {version + place // batch_groups}")
            buffer._seen.add(group_id)
            buffer._slots[group_id] = (born, (group,))
        return buffer

    def _hand_out(self, slots: Sequence[tuple[str, tuple[int, tuple[G, ...]]]]) -> list[Ready[G]]:
        self._training = tuple(group_id for group_id, _ in slots)
        return [Ready(group_id, group[0], version, self.version - version) for group_id, (version, group) in slots]
