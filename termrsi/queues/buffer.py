"""Groups of rollouts between sampler and learner, as a state machine of slots: stale data cannot arise. No clock, no Ray.

A slot belongs to one group from the moment its first rollout may start until the learner has trained on it. The weights
version is the number of batches trained, so the number of slots bounds what can be trained before a group.

Invariants: a group holds exactly one slot; it comes out of `take` exactly once, or of `drop`; nothing else frees a slot, but that
a group of no use lends its own to the next. The learner waits for what would be too old a batch later: nothing is thrown away.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from termrsi.records import Flow

G = TypeVar("G")  # what a group is: the buffer never looks inside


@dataclass(frozen=True, slots=True)
class Ready(Generic[G]):
    """A finished group: the weights version when it was admitted, and how many versions the learner has moved since."""

    group_id: str
    group: G
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Taken(Generic[G]):
    """A batch: groups in the order of admission, ids of those of no use among them, and how many of these were not replaced."""

    groups: tuple[Ready[G], ...]
    refused: tuple[str, ...]
    missing: int


@dataclass(slots=True)
class _Slot(Generic[G]):
    version: int  # at admission
    group: tuple[G, ...] = ()  # the finished group in a 1-tuple
    refused: bool = False

    @property
    def known(self) -> bool:
        return self.refused or bool(self.group)


@dataclass(slots=True)
class GroupBuffer(Generic[G]):
    """Slots for `flow.batch_groups` groups and `flow.extra` more: n (1 + S) at most, S = `max_staleness`.

    Why that many: let one batch be n groups. Groups are trained in the order they were admitted. A group admitted at version v
    finds at most n (1 + S) - 1 others in slots, so it is among the first n (1 + S) groups trained from then on: at the latest in
    the batch that takes version v + S to v + S + 1, and it is S versions old then. With S = 0 the next batch is admitted when the
    last is `trained`: no overlap. n = 8, S = 1: 16 slots, 8 being trained while 8 are sampled. With fewer `extra` fewer groups are
    old: n = 8, S = 1, 2 extra: 10 slots, and of each batch 2 groups are one version old.

    A group of no use (`refuse`) takes no place in its batch: the next one in the line moves up, and its slot is free. A batch
    looks past `flow.replace` of them at most; the others keep place and slot, and the batch is that much smaller. So a batch is
    always n places of the line, and the count of slots above holds with places for groups.

    `flow.first`: the first to finish make the batch, in so far as what stays behind can still be trained in time: of the groups
    that must be trained within j batches from now (admitted at `version` + j - S or before) no more than n j may stay. With all
    n S `extra` that is the order of admission again, but for the first batches.

    `drop` takes out a group whose rollouts were all lost; its place is free for another.
    """

    flow: Flow
    version: int = 0
    _line: dict[str, _Slot[G]] = field(default_factory=dict, init=False)  # not taken, in the order of admission
    _finished: list[str] = field(default_factory=list, init=False)  # of them, in that order
    _passed: list[str] = field(default_factory=list, init=False)  # with `first`: of no use, replaced in the batch to come
    _training: bool = field(default=False, init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    @property
    def capacity(self) -> int:
        return self.flow.capacity

    @property
    def free(self) -> int:
        """How many groups may start now; none that would be of no batch."""
        n, slots = self.flow.batch_groups, self.capacity
        if self.flow.batches:
            slots = min(slots, n * (self.flow.batches - self.version))
        return slots - self._places() - n * self._training

    @property
    def sampling(self) -> tuple[str, ...]:
        """Ids of admitted groups that are not finished, oldest first."""
        return tuple(group_id for group_id, slot in self._line.items() if not slot.known)

    def admit(self, group_id: str) -> bool:
        """A slot for a new group; False if none is free: `trained`, `refuse` or `drop` ends the wait.

        Raises ValueError if a group of this id was admitted before: its prompt would be trained twice.
        """
        if group_id in self._seen:
            raise ValueError(f"group {group_id} was admitted before")
        if self.free <= 0:
            return False
        self._seen.add(group_id)
        self._line[group_id] = _Slot(self.version)
        return True

    def readmit(self, group_id: str, version: int, refused: bool = False) -> None:
        """The slot that a group was given at `version`, in a buffer that goes on; in the order in which they were admitted.

        Raises ValueError if none is free, if it was admitted before, or if it would be too old when it is trained.
        """
        trained_at = self.version + self._places() // self.flow.batch_groups
        if trained_at - version > self.flow.max_staleness:
            raise ValueError(f"group {group_id} of version {version} would be trained at {trained_at}")
        if not self.admit(group_id):
            raise ValueError(f"group {group_id} does not fit into {self.capacity} slots")
        self._line[group_id].version = version
        if refused:
            self.refuse(group_id)

    def put(self, group_id: str, group: G) -> None:
        """The group's rollouts are all there. Raises KeyError for one that holds no slot, ValueError if it came before."""
        self._end(group_id).group = (group,)

    def refuse(self, group_id: str) -> None:
        """The group is finished, and of no use to the learner. Raises as `put`."""
        self._end(group_id).refused = True
        if self.flow.first and len(self._passed) < self.flow.replace:
            self._passed.append(group_id)
            self._finished.remove(group_id)
            del self._line[group_id]

    def drop(self, group_id: str) -> None:
        """Free the slot of a group that will not come. Raises KeyError if it holds none, ValueError if it is finished."""
        if self._line[group_id].known:
            raise ValueError(f"group {group_id} is finished")
        del self._line[group_id]

    def take(self) -> Taken[G] | None:
        """The next batch, if its groups are finished; None: wait, the next `put`, `refuse` or `drop` may end it.

        They keep their slots until `trained`. Raises ValueError if the batch before was not reported as trained.
        """
        if self._training:
            raise ValueError("the batch before is still being trained")
        chosen = self._first_to_finish() if self.flow.first else self._oldest()
        if chosen is None:
            return None
        slots = {group_id: self._line.pop(group_id) for group_id in chosen}
        self._finished = [group_id for group_id in self._finished if group_id not in slots]
        refused, self._passed = [*self._passed, *(group_id for group_id, slot in slots.items() if slot.refused)], []
        groups = tuple(
            Ready(group_id, slot.group[0], slot.version, self.version - slot.version)
            for group_id, slot in slots.items()
            if not slot.refused
        )
        self._training = True
        return Taken(groups, tuple(refused), self.flow.batch_groups - len(groups))

    def trained(self) -> None:
        """The learner is done with the batch of the last `take`: its slots are free, and the version is one higher.

        Raises ValueError if none is being trained.
        """
        if not self._training:
            raise ValueError("no batch is being trained")
        self._training = False
        self.version += 1

    def _end(self, group_id: str) -> _Slot[G]:
        slot = self._line[group_id]
        if slot.known:
            raise ValueError(f"group {group_id} came twice")
        self._finished.append(group_id)
        return slot

    def _places(self) -> int:
        """Of the line, in the batches to come. What is still sampled may turn out to be of use, and then takes one."""
        places = passed = 0
        for slot in self._line.values():
            if slot.refused and passed < self._passes:
                passed += 1
                continue
            places += 1
            if places % self.flow.batch_groups == 0:
                passed = 0
        return places

    @property
    def _passes(self) -> int:
        """Groups of no use that a batch leaves in the line without a place; with `first` they have left it at once."""
        return 0 if self.flow.first else self.flow.replace

    def _oldest(self) -> list[str] | None:
        """The batch that begins the line."""
        chosen, places, passed = [], 0, 0
        for group_id, slot in self._line.items():
            if not slot.known:
                return None
            chosen.append(group_id)
            if slot.refused and passed < self._passes:
                passed += 1
                continue
            places += 1
            if places == self.flow.batch_groups:
                return chosen
        return None

    def _first_to_finish(self) -> list[str] | None:
        """Those first that leave none behind that would be too old: `younger` counts the chosen ones that came after a version."""
        n, most = self.flow.batch_groups, self.flow.max_staleness
        room: dict[int, int] = {}  # of a version at admission: how many of the batch may be younger
        for count, slot in enumerate(self._line.values(), 1):
            room[slot.version] = n - max(0, count - n * (slot.version + most - self.version))
        younger = dict.fromkeys(room, 0)
        chosen: set[str] = set()
        for group_id in self._finished:
            older = [version for version in room if version < self._line[group_id].version]
            if len(chosen) < n and all(younger[version] < room[version] for version in older):
                chosen.add(group_id)
                for version in older:
                    younger[version] += 1
        return [group_id for group_id in self._line if group_id in chosen] if len(chosen) == n else None
