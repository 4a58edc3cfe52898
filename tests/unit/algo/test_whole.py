"""What no part of a batch can tell: worked by hand."""

import math

import pytest

from termrsi.algo import whole
from termrsi.records import Sample


def sample(mask: list[int], rollout: str = "", group: str = "", sampler: tuple[float, ...] = ()) -> Sample:
    n = len(mask)
    return Sample(tuple(range(n)), tuple(mask), (0,) * n, rollout, group, sampler_logp=sampler or (0.0,) * n)


def test_rollouts_are_counted_over_their_chunks() -> None:
    samples = [sample([0, 1, 1], "a"), sample([0, 1], "b"), sample([0, 1, 1, 1], "a"), sample([0, 0], "c")]
    assert whole.rollout_tokens(samples) == [5, 1, 5, 0]
    assert whole.count_rollouts(samples) == 2
    unnamed = [sample([0, 1]), sample([0, 1, 1])]
    assert whole.rollout_tokens(unnamed) == [1, 2]
    assert whole.count_rollouts(unnamed) == 2


def test_the_divergence_of_a_prompt_is_a_mean_of_its_rollouts_means() -> None:
    """|r - 1| / 2 is 0.5 and 0.25 in one chunk of `a`, 1.5 in the other; 0.05 in `b`; `c` has no token; `d` is another prompt."""
    samples = [
        sample([0, 1, 1], "a", "p"),
        sample([0, 1], "b", "p"),
        sample([0, 1], "a", "p"),
        sample([0, 0], "c", "p"),
        sample([0, 1], "d", "q"),
    ]
    logp = [[9.0, math.log(2), math.log(0.5)], [9.0, math.log(1.1)], [9.0, math.log(4)], [0.0, 0.0], [0.0, math.log(0.9)]]
    of_p = ((0.5 + 0.25 + 1.5) / 3 + 0.05) / 2
    assert whole.prompt_tv(samples, logp) == pytest.approx([of_p, of_p, of_p, of_p, 0.05])
    alone = [sample([0, 1], "b"), sample([0, 1], "d"), sample([0, 0], "e")]
    assert whole.prompt_tv(alone, [logp[1], logp[4], [0.0, 0.0]]) == pytest.approx([0.05, 0.05, 0.0])


def test_a_stray_token_leaves_the_divergence_finite() -> None:
    assert math.isfinite(whole.prompt_tv([sample([0, 1], sampler=(0.0, -900.0))], [[0.0, -1.0]])[0])


def test_the_bound_is_one_of_the_values() -> None:
    """Of ten the ninth; the sampler's log-probability is taken off, and what is off the mask is not counted."""
    d = [0.01, -0.02, 0.03, -0.04, 0.05, -0.06, 0.07, -0.08, 0.09, 5.0]
    mask, sampler = [0, *[1] * 5, 0, *[1] * 5], (math.nan, *[-1.0] * 5, math.nan, *[-1.0] * 5)
    logp = [7.0, *(x - 1.0 for x in d[:5]), 7.0, *(x - 1.0 for x in d[5:])]
    assert whole.log_ratio_bound([sample(mask, sampler=sampler)], [logp], 0.9) == pytest.approx(0.09)
    assert whole.log_ratio_bound([sample(mask, sampler=sampler)], [logp], 0.95) == pytest.approx(5.0)
    parts = [sample([0, *[1] * 5], sampler=sampler[:6]), sample([0, *[1] * 5], sampler=sampler[6:]), sample([0, 0])]
    means = [abs(sum(d[:5])) / 5, abs(sum(d[5:])) / 5]
    for quantile, wanted in ((0.5, min(means)), (0.9, max(means))):
        found = whole.log_ratio_bound(parts, [logp[:6], logp[6:], [0.0, 0.0]], quantile, of_sequences=True)
        assert found == pytest.approx(wanted)
    assert whole.log_ratio_bound([], [], 0.9) == whole.log_ratio_bound([sample([0, 0])], [[0.0, 0.0]], 0.9) == 0.0


def test_the_samplers_log_probabilities_must_be_there() -> None:
    lacking = Sample((1, 2), (0, 1), (0, 0), "r")
    with pytest.raises(ValueError, match="r: sampler_logp holds 0 entries, 2 are needed"):
        whole.prompt_tv([lacking], [[0.0, -1.0]])
