"""Loops whose step time is known by hand, and what must hold of every loop."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from termrsi.sizing.simulation import Machine, Outcome, Tail, Workload, simulate

ALONE = Workload(
    batch_groups=1, group_size=1, turns=Tail(3), reply=Tail(100), observation=Tail(50), command_s=Tail(2.0), prompt=10,
    verify_s=5.0, start_s=1.0,
)  # fmt: skip
HEAVY = replace(
    ALONE, batch_groups=4, group_size=3, turns=Tail(10, 1.0, 60), reply=Tail(80, 1.0, 600), command_s=Tail(1.0, 1.5, 60)
)


def machine(**more: object) -> Machine:
    """A tenth of a second a token whatever the batch, and prompts for nothing."""
    given: dict[str, object] = {
        "engines": 1, "step_s": lambda batch, tokens: 0.1, "prefill_s": lambda tokens, context: 0.0,
        "learn_s": lambda lengths: 7.0, "load_s": 3.0,
    }  # fmt: skip
    return Machine(**(given | more))  # type: ignore[arg-type]  # as the tests give them


def times(work: Workload, machine: Machine, *staleness: int, **more: int) -> list[float]:
    return [simulate(work, machine, max_staleness=s, **more).step_s for s in staleness]  # type: ignore[arg-type]  # numbers


def test_one_episode_on_one_engine_is_the_sum() -> None:
    found = simulate(ALONE, machine(), max_staleness=0)
    rollout_s = 1.0 + 3 * (100 * 0.1 + 2.0) + 5.0
    assert found.step_s == pytest.approx(rollout_s + 7.0 + 3.0)
    assert found.generator == pytest.approx(30.0 / found.step_s)
    assert found.learner == pytest.approx(7.0 / found.step_s)
    assert found.weights == pytest.approx(3.0 / found.step_s)
    assert found.commands == pytest.approx(6.0 / found.step_s)
    assert found.verifications == pytest.approx(5.0 / found.step_s)
    assert (found.batch, found.tokens_s) == (pytest.approx(1.0), pytest.approx(300 / found.step_s))


def test_prompts_cost_what_is_not_cached() -> None:
    asked: list[tuple[int, int]] = []

    def prefill_s(tokens: int, context: int) -> float:
        asked.append((tokens, context))
        return tokens / 10.0

    found = simulate(ALONE, machine(prefill_s=prefill_s), max_staleness=0, warm_up=0, steps=1)
    assert asked == [(10, 10), (50, 160), (50, 310)]
    assert found.step_s == pytest.approx(1.0 + 36.0 + 11.0 + 5.0 + 10.0)
    assert found.cached == pytest.approx((110 + 260) / 480)


def test_learning_is_of_all_that_was_read() -> None:
    seen: list[Sequence[int]] = []

    def learn_s(lengths: Sequence[int]) -> float:
        seen.append(list(lengths))
        return 1.0

    simulate(ALONE, machine(learn_s=learn_s), max_staleness=0, warm_up=0, steps=1)
    assert seen == [[10 + 3 * 100 + 2 * 50]]


def test_without_time_to_sample_the_learner_is_the_bound() -> None:
    endless = machine(step_s=lambda batch, tokens: 0.0)
    free = replace(ALONE, command_s=Tail(0.0), verify_s=0.0, start_s=0.0, batch_groups=5)
    assert times(free, endless, 0, 1, 4) == pytest.approx([10.0, 10.0, 10.0])


def test_a_long_rollout_overlaps_with_learning() -> None:
    """48 s of rollout and 10 of update: alternating, or the slower of the two with a batch ahead."""
    free = machine(drain=False, load_s=0.0, learn_s=lambda lengths: 10.0)
    work = replace(ALONE, start_s=0.0, verify_s=12.0)
    assert times(work, free, 0, 1) == pytest.approx([58.0, 29.0]), "two slots of one group: both are under way at once"
    bound = replace(work, verify_s=2.0)
    assert times(bound, replace(free, learn_s=lambda lengths: 100.0), 1) == pytest.approx([100.0])


def test_one_sequence_at_a_time_is_a_queue() -> None:
    """Twelve replies of 10 s on three engines that take one each: 40 s where they are spread evenly."""
    work = replace(ALONE, batch_groups=12, turns=Tail(1), command_s=Tail(0.0), start_s=0.0, verify_s=0.0)
    narrow = machine(engines=3, max_num_seqs=1)
    assert times(work, narrow, 0) == pytest.approx([40.0 + 10.0])
    assert times(work, replace(narrow, routing="turn"), 0) == pytest.approx([40.0 + 10.0])
    assert times(work, replace(narrow, routing="hash"), 0)[0] > 50.0, "a hash spreads them unevenly"


def test_a_group_stays_together_as_far_as_the_slack_goes() -> None:
    """Eight rollouts of one group, two engines of four sequences: no more than one above the other's goes where the first went."""
    work = replace(ALONE, group_size=8, turns=Tail(1), command_s=Tail(0.0), start_s=0.0, verify_s=0.0)
    shared = machine(engines=2, max_num_seqs=4, step_s=lambda batch, tokens: 0.1 * batch)
    assert simulate(work, shared, max_staleness=0).batch == pytest.approx(4.0)
    assert simulate(work, replace(shared, max_num_seqs=64), max_staleness=0).batch == pytest.approx(8.0)


def test_a_batch_shares_its_engine() -> None:
    work = replace(ALONE, batch_groups=1, group_size=8, turns=Tail(1), command_s=Tail(0.0), start_s=0.0, verify_s=0.0)
    shared = machine(step_s=lambda batch, tokens: 0.1 * batch)
    found = simulate(work, shared, max_staleness=0)
    assert found.step_s == pytest.approx(80.0 + 10.0)
    assert found.batch == pytest.approx(8.0)


def test_a_full_cache_makes_turns_wait_and_prefixes_leave() -> None:
    """Room for one sequence of two: the other waits for the room, and each finds its prefix gone."""
    work = replace(ALONE, group_size=2, turns=Tail(2), observation=Tail(0), command_s=Tail(1.0), verify_s=0.0, start_s=0.0)
    wide = simulate(work, machine(), max_staleness=0, warm_up=0, steps=1)
    narrow = simulate(work, machine(cache_tokens=215), max_staleness=0, warm_up=0, steps=1)
    assert wide.step_s == pytest.approx(2 * 11.0 + 10.0)
    assert wide.cached > 0.0
    assert narrow.cached == 0.0
    assert narrow.step_s == pytest.approx(4 * 10.0 + 1.0 + 10.0)


def test_few_sandboxes_are_a_queue_too() -> None:
    work = replace(ALONE, group_size=4)
    alone = 1.0 + 36.0 + 5.0
    assert times(work, machine(sandboxes=1), 0) == pytest.approx([4 * alone + 10.0])
    assert times(work, machine(sandboxes=4), 0) == pytest.approx([alone + 10.0])


def test_a_new_version_waits_for_the_turns_in_flight_or_stops_them() -> None:
    """Two slots of one: while one group's update is moved, the other's reply of 10 s is under way."""
    work = replace(ALONE, turns=Tail(1), command_s=Tail(0.0), verify_s=0.0, start_s=0.0)
    waits, stops = (simulate(work, machine(drain=d, learn_s=lambda lengths: 1.0), max_staleness=1) for d in (True, False))
    assert waits.weights > stops.weights
    assert stops.weights * stops.step_s == pytest.approx(3.0)


def test_a_turn_that_stopped_goes_on_once_what_it_has_is_computed_anew() -> None:
    """Of two slots the other's reply has 10 + 40 tokens as the weights come: 5 s of prompt, beside its own as it began."""
    work = replace(ALONE, turns=Tail(1), command_s=Tail(0.0), verify_s=0.0, start_s=0.0)
    asked: list[tuple[int, int]] = []

    def prefill_s(tokens: int, context: int) -> float:
        asked.append((tokens, context))
        return 0.0

    given = {"load_s": 0.0, "learn_s": lambda _: 4.0, "prefill_s": prefill_s}
    simulate(work, machine(drain=False, **given), max_staleness=1, warm_up=0, steps=3)
    begun = [one for one in asked if one == (10, 10)]
    anew = [one for one in asked if one not in begun]
    assert anew, "a turn was under way as new weights came"
    assert all(10 < tokens == context <= 110 for tokens, context in anew)
    asked.clear()
    simulate(work, machine(**given), max_staleness=1, warm_up=0, steps=3)
    assert set(asked) == {(10, 10)}, "they wait for its end instead"


@pytest.mark.parametrize(("wall_s", "turns"), [(11.0, 1), (12.5, 2), (25.0, 3)])
def test_no_reply_begins_once_an_episodes_time_is_over(wall_s: float, turns: int) -> None:
    found = simulate(replace(ALONE, wall_s=wall_s), machine(), max_staleness=0)
    assert found.step_s == pytest.approx(1.0 + turns * 12.0 + 5.0 + 7.0 + 3.0)


def test_a_history_that_fills_the_window_is_rewritten_or_ends() -> None:
    seen: list[Sequence[int]] = []

    def learn_s(lengths: Sequence[int]) -> float:
        seen.append(list(lengths))
        return 1.0

    work = replace(ALONE, turns=Tail(6), reply=Tail(100, 0.0, 100), window=500)
    simulate(work, machine(learn_s=learn_s), max_staleness=0, warm_up=0, steps=1)
    assert seen.pop() == [10 + 3 * 150], "the fourth reply might not fit any more"
    simulate(replace(work, compacted=40), machine(learn_s=learn_s), max_staleness=0, warm_up=0, steps=1)
    assert seen.pop() == [460, 50 + 3 * 100 + 2 * 50]


@pytest.mark.parametrize("seed", range(6))
def test_staleness_is_never_slower_where_nothing_is_shared(seed: int) -> None:
    """Engines whose speed knows no load: an episode takes as long whenever it begins, and more slots let it begin earlier."""
    found = times(HEAVY, machine(engines=2, drain=False, load_s=0.0), 0, 1, 2, 4, seed=seed, warm_up=0, steps=12)
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.2 * found[1]


def test_fewer_groups_ahead_are_older_and_gain_less() -> None:
    none, some, all_ = (simulate(HEAVY, machine(), max_staleness=s, extra=extra) for s, extra in ((0, -1), (1, 1), (1, -1)))
    assert (none.staleness, some.staleness, all_.staleness) == (0.0, 0.25, 1.0)
    assert none.step_s > some.step_s > all_.step_s


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_what_holds_of_every_loop(staleness: int) -> None:
    shared = machine(
        engines=3, step_s=lambda batch, tokens: 0.02 + 0.01 * batch, prefill_s=lambda tokens, context: tokens * 1e-4,
        cache_tokens=20_000, sandboxes=30, max_num_seqs=4,
    )  # fmt: skip
    found = simulate(HEAVY, shared, max_staleness=staleness, seed=1)
    assert isinstance(found, Outcome)
    assert found == simulate(HEAVY, shared, max_staleness=staleness, seed=1), "the same draws, the same events"
    assert found.step_s != simulate(HEAVY, shared, max_staleness=staleness, seed=2).step_s
    assert 0 <= found.staleness <= found.most <= staleness
    assert all(0.0 <= share <= 1.0 for share in (found.generator, found.learner, found.weights, found.cached))
    assert 1.0 <= found.batch <= 4.0
    assert found.commands + found.verifications <= 30


def test_a_machine_without_room_is_refused() -> None:
    for none in ({"engines": 0}, {"sandboxes": 0}, {"max_num_seqs": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            simulate(ALONE, machine(**none), max_staleness=0)
