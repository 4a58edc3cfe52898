"""Retention is a pure function of logged scores."""

import pytest

from termrsi.config.schema import RetentionConfig
from termrsi.stages.retain import Candidate, decide

RULE = RetentionConfig(min_gain=0.02, max_drop=0.1)
BEFORE = Candidate(0, {"level-1": 0.5, "level-2": 0.2})


@pytest.mark.parametrize(
    ("suites", "kept", "why"),
    [
        ({"level-1": 0.6, "level-2": 0.2}, True, "mean 0.400 exceeds 0.350"),
        ({"level-1": 0.5, "level-2": 0.2}, False, "does not exceed"),
        ({"level-1": 0.52, "level-2": 0.2}, False, "does not exceed"),  # a gain of 0.01 is below the rule's 0.02
        ({"level-1": 1.0, "level-2": 0.05}, False, "suite level-2 falls by 0.150"),
        ({"level-1": 1.0, "level-2": 0.1}, True, "exceeds"),  # a fall of exactly max_drop is allowed
    ],
)
def test_decide(suites: dict[str, float], kept: bool, why: str) -> None:
    decided, reason = decide(BEFORE, Candidate(4, suites), RULE)
    assert decided is kept
    assert why in reason
