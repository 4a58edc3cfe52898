"""Episodes that share a prefix share an engine, as long as no other engine is idle for it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.queues import prefix_router
from termrsi.queues.prefix_router import PrefixRouter


def test_groups_are_spread_and_a_groups_rollouts_are_together() -> None:
    router = PrefixRouter(3, slack=8)
    places = {f"g{i}": {router.begin(f"g{i}") for _ in range(4)} for i in range(6)}
    assert all(len(engines) == 1 for engines in places.values())
    assert Counter(next(iter(engines)) for engines in places.values()) == {0: 2, 1: 2, 2: 2}
    assert router.loads == [8, 8, 8]


def test_an_idle_machine_is_filled_evenly() -> None:
    """Each group ends before the next begins: without a count of those begun all would go to the first engine."""
    router = PrefixRouter(2, slack=8)
    found = []
    for i in range(4):
        found.append(router.begin(f"g{i}"))
        router.end(found[-1])
    assert found == [0, 1, 0, 1]


def test_a_recovery_goes_where_the_failed_history_is_cached() -> None:
    router = PrefixRouter(4, slack=8)
    homes = {f"g{i}": router.begin(f"g{i}") for i in range(4)}
    assert [router.begin(f"r{i}", home=f"g{i}") for i in range(4)] == list(homes.values())
    assert router.begin("r9", home="never seen") in range(4)


def test_a_group_that_is_too_large_for_one_engine_moves_on() -> None:
    router = PrefixRouter(2, slack=4)
    found = [router.begin("g") for _ in range(12)]
    assert found[:5] == [0] * 5
    assert found[5] == 1
    assert max(router.loads) - min(router.loads) <= 5


def test_an_engine_alone_has_them_all() -> None:
    router = PrefixRouter(1, slack=0)
    assert {router.begin(str(i)) for i in range(5)} == {0}


def test_old_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "REMEMBERED", 2)
    router = PrefixRouter(2, slack=100)
    for key in ("a", "b", "c"):
        router.begin(key)
    assert list(router._places) == ["b", "c"]


def test_without_an_engine_there_is_nothing_to_route_to() -> None:
    with pytest.raises(ValueError, match="no engine"):
        PrefixRouter(0, slack=1)


@given(st.integers(1, 5), st.integers(0, 6), st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=80))
def test_no_engine_runs_further_ahead_than_the_slack_and_one(engines: int, slack: int, steps: list[tuple[int, bool]]) -> None:
    """At the moment of a choice; what ends may leave one behind."""
    router, held = PrefixRouter(engines, slack), []
    for key, ends in steps:
        if ends and held:
            router.end(held.pop(0))
            continue
        least = min(router.loads)
        chosen = router.begin(f"g{key}")
        held.append(chosen)
        assert router.loads[chosen] <= least + slack + 1
    for engine in held:
        router.end(engine)
    assert router.loads == [0] * engines
