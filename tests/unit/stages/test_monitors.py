"""The figures of a step, each worked by hand; what a batch does not define has no key."""

from dataclasses import replace

import pytest

from termrsi.records import Chunk, Rollout, Sample, ScoredRollout, StopReason, Turn, Verdict
from termrsi.stages import credit, monitors

LOST, WON = Verdict(False, 0.0), Verdict(True, 1.0)


def rollout(
    number: int, turns: int, stop: StopReason = StopReason.done, verdict: Verdict = LOST, *, family: str = "f", task: str = "t"
) -> ScoredRollout:
    """One chunk of two action tokens a turn, each turn after one token that is not."""
    ids = tuple(range(3 * turns))
    mask, turn_ids = (0, 1, 1) * turns, tuple(i // 3 for i in ids)
    chunks = (Chunk(ids, mask, turn_ids, (-1.0,) * (2 * turns)),) if turns else ()
    made = Rollout(f"r{number}", "g", task, family, "react", chunks, (Turn("", "ls", ""),) * turns, stop)
    return ScoredRollout(made, verdict)


def sample(scored: ScoredRollout, advantages: list[float]) -> Sample:
    """The last chunk with these advantages on its action tokens, and a wrong one wherever there is none."""
    left = iter(advantages)
    (made,) = credit.samples_of(scored, 1.0)[-1:]
    return Sample(
        made.ids, made.mask, made.turn_ids, made.rollout_id, advantages=tuple(next(left) if m else 99.0 for m in made.mask)
    )


def test_shares_of_end_reasons_and_of_dropped_episodes_make_one() -> None:
    ended = [StopReason.done, StopReason.done, StopReason.time_limit, StopReason.sandbox_spoiled]
    shares = monitors.ends([rollout(i, 1, stop) for i, stop in enumerate(ended)], asked=5)
    assert shares == {
        "stop/done": 0.4,
        "stop/turn_limit": 0.0,
        "stop/context_limit": 0.0,
        "stop/time_limit": 0.2,
        "stop/format_errors": 0.0,
        "stop/sandbox_spoiled": 0.2,
        "stop/dropped": 0.2,
    }


def test_no_episode_has_no_shares() -> None:
    assert monitors.ends([], asked=0) == {}
    assert monitors.ends([], asked=2)["stop/dropped"] == 1.0


def test_an_early_failure_ended_in_the_first_quarter_and_not_by_its_own_word() -> None:
    """Of 8 turns two are the quarter. Four failures: one early by format, one early by its word, one late, one at the limit."""
    scored = [
        rollout(0, 2, StopReason.format_errors),
        rollout(1, 1, StopReason.done),
        rollout(2, 3, StopReason.context_limit),
        rollout(3, 8, StopReason.turn_limit),
        rollout(4, 1, StopReason.context_limit, WON),
    ]
    assert monitors.early_failures(scored, max_turns=8) == {"early_failure": 0.25, "early_submission": 0.25}
    assert monitors.early_failures(scored[1:4], max_turns=8) == {"early_failure": 0.0, "early_submission": pytest.approx(1 / 3)}


def test_an_episode_without_a_turn_is_early_whatever_the_limit() -> None:
    assert monitors.early_failures([rollout(0, 0, StopReason.context_limit)], max_turns=1)["early_failure"] == 1.0
    assert monitors.early_failures([rollout(0, 1, StopReason.context_limit)], max_turns=3)["early_failure"] == 0.0


def test_without_a_failure_there_is_no_rate_of_early_ones() -> None:
    assert monitors.early_failures([rollout(0, 1, verdict=WON)], max_turns=8) == {}


def test_checks_are_pooled_over_a_family_and_rewards_are_its_mean() -> None:
    """Pooled: (3 + 1) / (4 + 2); the mean of the two shares would be 0.625. A skipped check is one that did not pass."""
    scored = [
        rollout(0, 1, verdict=Verdict(False, 0.0, ("a", "b", "c"), ("d",)), family="text"),
        rollout(1, 1, verdict=Verdict(False, 0.0, ("a",), (), ("b",)), family="text"),
        rollout(2, 1, verdict=Verdict(True, 1.0, ("a",)), family="net"),
    ]
    figures = monitors.families(scored, [0.25, 0.5, 1.0], {})
    assert figures == {
        "reward/net": 1.0,
        "reward/text": 0.375,
        "checks/net": 1.0,
        "checks/text": pytest.approx(4 / 6),
    }


def test_checks_that_a_report_lacks_did_not_pass() -> None:
    """A spoiled sandbox leaves no report, a broken test file one line: their tasks have four checks and two."""
    spoiled = rollout(0, 1, StopReason.sandbox_spoiled, Verdict(False, 0.0, source="spoiled"), task="four")
    broken = rollout(1, 1, verdict=Verdict(False, 0.0, ("a",)), task="two")
    assert monitors.families([spoiled, broken], [0.0, 0.0], {"four": 4, "two": 2})["checks/f"] == pytest.approx(1 / 6)


def test_a_family_without_reports_has_a_reward_and_no_checks() -> None:
    assert monitors.families([rollout(0, 1), rollout(1, 1, verdict=WON)], [0.0, 1.0], {}) == {"reward/f": 0.5}
    assert monitors.families([rollout(1, 1, verdict=WON)], [1.0], {"t": 3}) == {"reward/f": 1.0}


def test_advantage_variance_is_that_of_the_turns_so_far_from_the_end() -> None:
    """Two rollouts, of four turns and of one. Last turns: 1, 3, 5, 7; the turn before: 2, 4; two or three left: 0, 0, 6, 6."""
    long, short = rollout(0, 4), rollout(1, 1)
    samples = [sample(long, [0.0, 0.0, 6.0, 6.0, 2.0, 4.0, 1.0, 3.0]), sample(short, [5.0, 7.0])]
    assert monitors.advantage_variance([long, short], samples) == pytest.approx(
        {"advantage_var/turns_left_0": 5.0, "advantage_var/turns_left_1": 1.0, "advantage_var/turns_left_2-3": 9.0}
    )


@pytest.mark.parametrize(
    ("left", "bucket"),
    [(0, "0"), (1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (7, "4-7"), (8, "8-15"), (15, "8-15"), (16, "16+"), (40, "16+")],
)
def test_each_number_of_turns_left_has_its_bucket(left: int, bucket: str) -> None:
    """Of a rollout of `left` + 1 turns only the first one's two tokens differ: 1 and 3 amid tokens of 0."""
    scored = rollout(0, left + 1)
    figures = monitors.advantage_variance([scored], [sample(scored, [1.0, 3.0] + [0.0] * (2 * left))])
    assert {name for name, value in figures.items() if value > 0.0} == {f"advantage_var/turns_left_{bucket}"}


def test_turns_are_counted_over_all_chunks_and_only_where_tokens_were_sampled() -> None:
    """Chunks: turns 0 and 1, then 2 and 5 (3 and 4 held no token). Of the first chunk's sample, alone, turn 1 has two left."""
    chunks = (
        Chunk((1, 2, 3), (1, 1, 1), (0, 1, 1), (0.0,) * 3),
        Chunk((4, 5, 6), (1, 1, 1), (2, 5, 5), (0.0,) * 3),
    )
    cut = ScoredRollout(Rollout("r#x", "g", "t", "f", "react", chunks, (), StopReason.done), LOST)
    first, last = credit.samples_of(cut, 1.0)
    samples = [Sample(s.ids, s.mask, s.turn_ids, s.rollout_id, advantages=(0.0, 2.0, 4.0)) for s in (first, last)]
    assert monitors.advantage_variance([cut], samples[:1]) == {"advantage_var/turns_left_2-3": pytest.approx(8 / 3)}
    assert monitors.advantage_variance([cut], samples) == {
        "advantage_var/turns_left_0": 1.0,
        "advantage_var/turns_left_2-3": pytest.approx(8 / 3),
    }  # one left: a single token


def test_a_sample_of_no_rollout_is_an_error() -> None:
    scored = rollout(0, 1)
    with pytest.raises(KeyError):
        monitors.advantage_variance([rollout(1, 1)], [sample(scored, [1.0, 2.0])])


def test_nothing_to_learn_from_has_no_variance() -> None:
    assert monitors.advantage_variance([rollout(0, 2)], []) == {}


def test_tokens_are_told_by_the_weights_that_sampled_them() -> None:
    """Of 10 tokens 4 are one version behind, 2 are two; one turn of three is of two versions. Unknown ones do not count."""
    turns = [Turn("", "ls", "", weights=weights) for weights in (((3, 2),), ((4, 4), (5, 3)), ((5, 1),), ())]
    one = rollout(0, 2)
    scored = [replace(one, rollout=replace(one.rollout, turns=tuple(turns[i : i + 2]))) for i in (0, 2)]
    assert monitors.versions(scored) == {"versions/behind": pytest.approx(0.8), "versions/mixed": pytest.approx(1 / 3)}
    assert monitors.versions([rollout(0, 2)]) == {}
