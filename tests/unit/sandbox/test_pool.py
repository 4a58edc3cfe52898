"""The pool as a list of facts; no sandbox, no clock."""

import random

import pytest

from termrsi.sandbox.pool import Close, Command, Grant, Late, Pool, Start, State


def test_places_are_bounded_and_the_queue_is_fair() -> None:
    pool = Pool(2)
    assert pool.request("a", 0.0) == (0, [Start(0, "a")])
    assert pool.request("b", 0.0) == (1, [Start(1, "b")])
    assert pool.request("snapshot c", 0.0) == (2, [])
    assert pool.request("d", 0.0) == (3, [])
    assert pool.started(1, 1.0) == [Grant(1)]
    assert pool.release(1, "released", 2.0) == [Close(1, "released")]
    assert pool.num_live == 2  # the place is free once the end has been seen
    assert pool.closed(1, 3.0) == [Start(2, "snapshot c")]
    assert pool.release(0, "could not start", 3.0) == [Close(0, "could not start")]
    assert pool.closed(0, 3.0) == [Start(3, "d")]


def test_each_id_is_closed_once() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    pool.started(0, 0.0)
    assert pool.release(0, "released", 1.0) == [Close(0, "released")]
    assert pool.release(0, "again", 1.0) == []
    assert pool.closed(0, 1.0) == []
    assert pool.closed(0, 1.0) == []
    assert pool.release(0, "late", 1.0) == []
    assert pool.num_live == 0


def test_a_start_that_ends_after_its_release_is_not_granted() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    assert pool.release(0, "its requester gave up", 1.0) == [Close(0, "its requester gave up")]
    assert pool.started(0, 2.0) == []


def test_a_waiting_request_is_withdrawn() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    pool.request("c", 0.0)
    assert pool.release(1, "gave up", 0.0) == []
    pool.release(0, "released", 1.0)
    assert pool.closed(0, 1.0) == [Start(2, "c")]


def test_a_tick_names_what_is_late() -> None:
    pool = Pool(2, {State.STARTING: 5.0, State.LEASED: 10.0, State.CLOSING: 5.0})
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    pool.started(0, 1.0)
    assert pool.tick(5.0) == []
    assert pool.tick(6.0) == [Late(1, "b", State.STARTING, 6.0), Close(1, "starting too long")]
    assert pool.tick(11.0) == []
    assert pool.tick(11.5) == [
        Late(0, "a", State.LEASED, 10.5),
        Close(0, "leased too long"),
        Late(1, "b", State.CLOSING, 5.5),  # named again, closed no second time
    ]


def test_stop_closes_all_and_takes_no_more() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    assert pool.stop(1.0) == [Close(0, "pool closed")]
    assert pool.closed(0, 1.0) == []
    with pytest.raises(ValueError, match="closed"):
        pool.request("c", 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        Pool(0)


def test_invariants_on_random_facts() -> None:
    rng = random.Random(7)
    for _ in range(200):
        pool, seen, now = Pool(rng.randint(1, 3), {State.LEASED: 5.0}), [], 0.0
        starting: set[int] = set()
        live: set[int] = set()

        def take(commands: list[Command], seen: list[Command], starting: set[int], live: set[int]) -> None:
            for command in commands:
                seen.append(command)
                if isinstance(command, Start):
                    starting.add(command.sandbox_id)
                    live.add(command.sandbox_id)

        for _ in range(60):
            now += rng.random()
            number = rng.randint(0, 15)
            match rng.randint(0, 4):
                case 0:
                    take(pool.request("x", now)[1], seen, starting, live)
                case 1:
                    if number in starting:
                        starting.discard(number)
                        take(pool.started(number, now), seen, starting, live)
                case 2:
                    take(pool.release(number, "r", now), seen, starting, live)
                case 3:
                    closing = [c.sandbox_id for c in seen if isinstance(c, Close) and c.sandbox_id in live]
                    if closing:
                        live.discard(closing[0])
                        take(pool.closed(closing[0], now), seen, starting, live)
                case _:
                    take(pool.tick(now), seen, starting, live)
            assert len(live) == pool.num_live <= pool.size
        closes = [c.sandbox_id for c in seen if isinstance(c, Close)]
        grants = [c.sandbox_id for c in seen if isinstance(c, Grant)]
        starts = [c.sandbox_id for c in seen if isinstance(c, Start)]
        assert len(set(closes)) == len(closes)
        assert len(set(grants)) == len(grants)
        assert starts == sorted(starts)
