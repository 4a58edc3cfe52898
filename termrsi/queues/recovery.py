"""Failures to start from again, newest first (ReTerm, arXiv:2610.18484; capacity and the rest ours). No Ray, no torch.

A point is in one place at a time: in the queue (where a stage may look at it), taken, or evicted. Whoever gets it last frees its
snapshot.
"""

from collections import deque
from collections.abc import Sequence

from termrsi.records import RecoveryPoint


class RecoveryQueue:
    """A bounded stack: `push` in front, `take` or `peek` from the front; when it overflows the oldest points are evicted.

    Raises ValueError if `capacity` is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self._points: deque[RecoveryPoint] = deque()  # newest at the left
        self._evicted: list[RecoveryPoint] = []

    def __len__(self) -> int:
        return len(self._points)

    def push(self, point: RecoveryPoint) -> None:
        """Put `point` in front. Raises ValueError if a point of this id is in the queue already."""
        if any(held.id == point.id for held in self._points):
            raise ValueError(f"recovery point {point.id} is in the queue already")
        self._points.appendleft(point)
        if len(self._points) > self.capacity:
            self._evicted.append(self._points.pop())

    def take(self, n: int) -> list[RecoveryPoint]:
        """Up to `n` points, newest first, no longer in the queue; fewer if it holds fewer. Raises ValueError if n < 0."""
        if n < 0:
            raise ValueError(f"cannot take {n} points")
        return [self._points.popleft() for _ in range(min(n, len(self._points)))]

    def peek(self, n: int) -> list[RecoveryPoint]:
        """Up to `n` points, newest first, which stay where they are. Raises ValueError if n < 0."""
        if n < 0:
            raise ValueError(f"cannot take {n} points")
        return list(self._points)[:n]

    @property
    def evicted(self) -> tuple[RecoveryPoint, ...]:
        """Points pushed out so far and not cleared, oldest first. Their snapshots wait to be freed."""
        return tuple(self._evicted)

    def clear_evicted(self) -> list[RecoveryPoint]:
        """`evicted`, and forget them: the caller frees their snapshots."""
        gone, self._evicted = self._evicted, []
        return gone

    def to_list(self) -> list[RecoveryPoint]:
        """What it holds, newest first, for a resume. Evicted points are not in it: clear them first."""
        return list(self._points)

    @classmethod
    def from_list(cls, points: Sequence[RecoveryPoint], capacity: int) -> "RecoveryQueue":
        """The queue of `to_list`. With a smaller capacity the oldest are evicted."""
        queue = cls(capacity)
        for point in reversed(points):
            queue.push(point)
        return queue
