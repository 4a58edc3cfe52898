"""Curves as they are read: raw, and as a causal mean (Terminal-RSI, arXiv 2610.22192, Figs. 7 and 8: up to five observations)."""

import math
from collections import deque
from collections.abc import Mapping

WINDOW = 5  # observations


class CausalMeans:
    """The last observations of each figure of each stage, for one run as long as it is not stopped.

    What an earlier start of the run observed is not in it: a stopped stage begins again, and so do its curves.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], deque[float]] = {}

    def observe(self, stage: str, figures: Mapping[str, float]) -> dict[str, float]:
        """`<name>/mean5` of each figure: the mean of this observation and of up to four before it.

        Figures without a `step` are no point of a curve and give nothing. An observation is a figure that is there and finite:
        of another nothing is written, and the next mean goes over those that were.
        """
        if "step" not in figures:
            return {}
        means = {}
        for name, value in figures.items():
            if name == "step" or not math.isfinite(value):
                continue
            last = self._last.setdefault((stage, name), deque(maxlen=WINDOW))
            last.append(value)
            means[f"{name}/mean{WINDOW}"] = math.fsum(last) / len(last)
        return means
