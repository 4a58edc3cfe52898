"""Retention is a pure function of logged scores."""

import pytest

from termrsi.config.stages import RetentionConfig
from termrsi.stages.retain import Candidate, decide, paired

RULE = RetentionConfig(min_gain=0.02, max_drop=0.1)
BEFORE = Candidate(0, {"level-1": 0.5, "level-2": 0.2})


def candidate(step: int, *rates: list[int]) -> Candidate:
    passes = {f"t{i}": attempts for i, attempts in enumerate(rates)}
    return Candidate(step, {"level-1": sum(sum(a) / len(a) for a in rates) / len(rates)}, passes)


def test_a_gain_is_told_with_what_speaks_for_it() -> None:
    """Eight tasks rise from nothing: 2 x 0.5^8."""
    found = paired(candidate(0, *[[0, 0]] * 10), candidate(2, *[[1, 1]] * 8, *[[0, 0]] * 2))
    assert found["gain"] == pytest.approx(0.8)
    assert 0.0 < found["gain_low"] < 0.8 < found["gain_high"] <= 1.0
    assert found["sign_p"] == pytest.approx(2 / 2**8)
    assert paired(BEFORE, candidate(1, [1])) == {}


@pytest.mark.parametrize(("risen", "kept"), [(1, False), (8, True)])
def test_a_gain_may_have_to_be_real(risen: int, kept: bool) -> None:
    before, after = candidate(0, *[[0, 0]] * 10), candidate(2, *[[1, 1]] * risen, *[[0, 0]] * (10 - risen))
    assert decide(before, after, RetentionConfig())[0]
    decided, why = decide(before, after, RetentionConfig(significant=True))
    assert decided is kept
    assert kept or "its 95 % interval reaches down to +0.000" in why
    assert not decide(BEFORE, Candidate(4, {"level-1": 0.9, "level-2": 0.9}), RetentionConfig(significant=True))[0]


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
