"""Which engine an episode goes to: the one that holds its prefix, unless that has far more to do than another (the rule is ours).

What shares a prefix has a key in common: the rollouts of a group. The recoveries of a failure have a group of their own, and the
failed rollout's as their `home`, whose whole history they begin with.
"""

from collections import OrderedDict

REMEMBERED = 65_536  # keys; what an engine's cache held of older ones is gone


class PrefixRouter:
    """A plain state machine. `slack`: how many more episodes than the least loaded engine one may have and still be preferred."""

    def __init__(self, engines: int, slack: int) -> None:
        """Raises ValueError without an engine."""
        if engines < 1:
            raise ValueError("no engine to route to")
        self.loads = [0] * engines  # episodes begun and not ended
        self._slack = slack
        self._begun = [0] * engines
        self._places: OrderedDict[str, int] = OrderedDict()

    def begin(self, key: str, home: str = "") -> int:
        """The index of the engine for one more episode; to be given back to `end`.

        First the engine of `key`, then that of `home`, of them one that is not over the slack; else the least loaded, and of equals
        the one that was given fewest so far. `key` is at home there from now on.
        """
        least = min(self.loads)
        near = (self._places[known] for known in (key, home) if known in self._places)
        engine = next((place for place in near if self.loads[place] <= least + self._slack), None)
        if engine is None:
            engine = min(range(len(self.loads)), key=lambda i: (self.loads[i], self._begun[i]))
        self._places[key] = engine
        self._places.move_to_end(key)
        if len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        self.loads[engine] += 1
        self._begun[engine] += 1
        return engine

    def end(self, engine: int) -> None:
        self.loads[engine] -= 1
