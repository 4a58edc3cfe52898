"""The pool as a list of facts; no sandbox, no clock."""

import random

import pytest

from termrsi.sandbox.pool import Assign, Close, Command, Cost, Grant, Late, Pool, Refuse, Start, State, Wake


def test_places_are_bounded_and_the_queue_is_fair() -> None:
    pool = Pool(2)
    assert pool.request("a", 0.0) == (0, [Start(1, 0)])
    assert pool.request("b", 0.0) == (2, [Start(3, 2)])
    assert pool.request("snapshot c", 0.0) == (4, [])
    assert pool.request("d", 0.0) == (5, [])
    assert pool.started(3, 1.0) == [Grant(3, 2)]
    assert pool.release(3, "released", 2.0) == [Close(3, "released")]
    assert pool.num_live == 2  # the place is free once the end has been seen
    assert pool.closed(3, 3.0) == [Start(6, 4)]
    assert pool.failed(1, 3.0, again=False) == [Refuse(0), Close(1, "could not start")]
    assert pool.closed(1, 3.0) == [Start(7, 5)]


def test_each_id_is_closed_once() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    pool.started(1, 0.0)
    assert pool.release(1, "released", 1.0) == [Close(1, "released")]
    assert pool.release(1, "again", 1.0) == []
    assert pool.closed(1, 1.0) == []
    assert pool.closed(1, 1.0) == []
    assert pool.release(1, "late", 1.0) == []
    assert pool.num_live == 0


def test_a_start_that_ends_after_its_withdrawal_is_not_granted() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    assert pool.withdraw(0, "its requester gave up", 1.0) == [Close(1, "its requester gave up")]
    assert pool.withdraw(0, "again", 1.0) == []
    assert pool.started(1, 2.0) == []
    assert pool.failed(1, 2.0, again=True) == []


def test_a_waiting_request_is_withdrawn() -> None:
    pool = Pool(1)
    for name in "abc":
        pool.request(name, 0.0)
    assert pool.withdraw(2, "gave up", 0.0) == []
    pool.started(1, 0.0)
    pool.release(1, "released", 1.0)
    assert pool.closed(1, 1.0) == [Start(4, 3)]


def test_a_tick_names_what_is_late() -> None:
    pool = Pool(2, {State.STARTING: 5.0, State.LEASED: 10.0, State.CLOSING: 5.0, State.IN_DOUBT: 100.0})
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    pool.started(1, 1.0)
    assert pool.tick(5.0) == []
    assert pool.tick(6.0) == [Late(3, "b", State.STARTING, 6.0), Close(3, "starting too long")]
    assert pool.tick(11.0) == []
    assert pool.tick(11.5) == [
        Late(1, "a", State.LEASED, 10.5),
        Close(1, "leased too long"),
        Late(3, "b", State.CLOSING, 5.5),  # from here on in doubt
    ]
    assert pool.tick(12.0) == [Close(3, "its end was not seen")]


def test_one_in_doubt_keeps_its_place_until_its_end_is_seen_or_it_is_given_up() -> None:
    pool = Pool(1, {State.IN_DOUBT: 50.0})
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    pool.started(1, 0.0)
    pool.release(1, "released", 1.0)
    pool.doubt(1, 1.0)
    assert pool.count(State.IN_DOUBT) == 1
    assert pool.release(1, "again", 1.0) == []
    assert pool.tick(2.0) == [Close(1, "its end was not seen")]
    assert pool.closed(1, 3.0) == [Start(3, 2)]
    pool.started(3, 3.0)
    pool.request("c", 3.0)
    pool.release(3, "released", 4.0)
    pool.doubt(3, 4.0)
    assert pool.tick(55.0) == [Late(3, "b", State.IN_DOUBT, 51.0), Start(5, 4)]
    assert pool.closed(3, 56.0) == []


def test_starts_that_fail_are_tried_again_after_pauses_that_double() -> None:
    pool = Pool(1, max_starts=3, first_pause_s=1.0, longest_pause_s=3.0)
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    assert pool.failed(1, 0.0, again=True) == [Close(1, "could not start")]
    assert pool.closed(1, 0.0) == [Wake(1.0)]
    assert pool.tick(0.5) == [Wake(1.0)]
    assert pool.tick(1.0) == [Start(3, 0)]  # its turn is still the first
    pool.failed(3, 1.0, again=True)
    assert pool.closed(3, 1.0) == [Wake(3.0)]
    assert pool.tick(3.0) == [Start(4, 0)]
    assert pool.failed(4, 3.0, again=True) == [Refuse(0), Close(4, "could not start")]
    assert pool.closed(4, 3.0) == [Wake(6.0)]  # not 4 s: the longest pause
    assert pool.tick(6.0) == [Start(5, 2)]
    assert pool.started(5, 6.0) == [Grant(5, 2)]
    pool.release(5, "released", 7.0)
    pool.closed(5, 7.0)
    assert pool.request("c", 7.0)[1] == [Start(7, 6)]  # a start that succeeded ends the pause


def test_starts_that_fail_together_are_one_step_of_the_pause_and_keep_their_turns() -> None:
    pool = Pool(3, first_pause_s=1.0)
    for name in "abc":
        pool.request(name, 0.0)
    for number in (5, 1, 3):
        pool.failed(number, 0.1, again=True)
        assert pool.closed(number, 0.1)[-1] == Wake(1.1)
    assert pool.tick(1.1) == [Start(6, 0), Start(7, 2), Start(8, 4)]
    for _ in range(5000):  # a pause has no end of its own to overflow at
        pool.tick(pool._not_before_s)
        pool.failed(max(pool._live, default=0), pool._not_before_s, again=True)
    assert pool._not_before_s < 1e9


def test_a_fault_of_the_task_is_told_at_once_and_pauses_nothing() -> None:
    pool = Pool(2)
    pool.request("bad", 0.0)
    assert pool.failed(1, 0.0, again=False) == [Refuse(0), Close(1, "could not start")]
    assert pool.request("good", 0.0)[1] == [Start(3, 2)]


def test_memory_and_disk_admit() -> None:
    pool = Pool(10, capacity=Cost(100, 50))
    assert pool.request("a", 0.0, cost=Cost(60, 10))[1] == [Start(1, 0)]
    assert pool.request("big", 0.0, cost=Cost(50, 10))[1] == []
    assert pool.request("small", 0.0, cost=Cost(10, 10))[1] == []  # first come first served: the big one would wait for ever
    assert pool.in_use == Cost(60, 10)
    with pytest.raises(ValueError, match="this host has 100 MiB of memory and 50 MiB of disk"):
        pool.request("never", 0.0, cost=Cost(10, 51))
    pool.started(1, 0.0)
    pool.release(1, "released", 1.0)
    assert pool.closed(1, 1.0) == [Start(4, 2), Start(5, 3)]
    assert pool.in_use == Cost(60, 20)


def test_spares_are_started_ahead_and_serve_their_kind_at_once() -> None:
    pool = Pool(3, {State.SPARE: 10.0}, spares=1)
    pool.request("a", 0.0, kind="x")
    assert pool.started(1, 0.0) == [Grant(1, 0), Start(2, 0)]
    assert pool.wanted == {0}
    assert pool.request("a", 0.1, kind="x") == (3, [Assign(2, 3), Start(4, 0)])  # the one that starts is for it now
    assert pool.started(2, 0.2) == [Grant(2, 3)]
    assert pool.started(4, 0.3) == []
    assert pool.count(State.SPARE) == 1
    assert pool.request("b", 0.4, kind="y") == (5, [Close(4, "its place is needed")])
    assert pool.request("c", 0.4, kind="x") == (6, [])
    assert pool.closed(4, 0.5) == [Start(7, 5)]
    assert pool.started(7, 0.6) == [Grant(7, 5)]
    pool.release(1, "released", 0.7)
    pool.release(2, "released", 0.7)
    assert pool.closed(1, 0.8) == [Start(8, 6)]
    assert pool.started(8, 0.9) == [Grant(8, 6)]
    assert pool.closed(2, 1.0) == [Start(9, 6)]
    pool.started(9, 1.0)
    assert pool.request("c", 1.5, kind="x")[1][0] == Grant(9, 10)


def test_an_idle_spare_is_closed_and_a_failing_one_not_repeated() -> None:
    pool = Pool(2, {State.SPARE: 10.0}, spares=1, first_pause_s=1.0)
    pool.request("a", 0.0, kind="x")
    pool.started(1, 0.0)
    pool.started(2, 0.0)
    assert pool.tick(11.0) == [Close(2, "spare too long")]
    assert pool.closed(2, 11.0) == [Start(3, 0)]
    assert pool.failed(3, 12.0, again=True) == [Close(3, "could not start")]
    assert pool.closed(3, 12.0) == []
    assert pool.tick(20.0) == []


def test_requests_without_a_kind_share_nothing() -> None:
    pool = Pool(3, spares=2)
    pool.request("snapshot", 0.0)
    assert pool.started(1, 0.0) == [Grant(1, 0)]
    assert pool.request("snapshot", 0.0)[1] == [Start(3, 2)]


def test_a_fork_counts_beyond_the_size_too_and_keeps_others_waiting() -> None:
    pool = Pool(1, {State.LEASED: 10.0}, Cost(100, 100))
    request_id, (start,) = pool.request("a", 0.0, cost=Cost(60, 10))
    assert isinstance(start, Start)
    with pytest.raises(ValueError, match="not leased"):
        pool.forked(start.sandbox_id, 0.0)
    assert pool.started(start.sandbox_id, 0.0) == [Grant(start.sandbox_id, request_id)]
    fork = pool.forked(start.sandbox_id, 5.0)
    assert (pool.num_live, pool.in_use) == (2, Cost(120, 20))
    _, commands = pool.request("b", 5.0, cost=Cost(60, 10))
    assert commands == []
    assert pool.release(start.sandbox_id, "released", 6.0) == [Close(start.sandbox_id, "released")]
    assert pool.closed(start.sandbox_id, 6.0) == []  # the fork holds the place
    assert [type(one) for one in pool.tick(15.5)] == [Late, Close]  # and has a deadline of its own
    (start,) = pool.closed(fork, 16.0)
    assert isinstance(start, Start)
    assert (pool.num_live, pool.in_use) == (1, Cost(60, 10))


def test_stop_closes_all_and_takes_no_more() -> None:
    pool = Pool(1)
    pool.request("a", 0.0)
    pool.request("b", 0.0)
    assert pool.stop(1.0) == [Close(1, "pool closed")]
    assert pool.closed(1, 1.0) == []
    with pytest.raises(ValueError, match="closed"):
        pool.request("c", 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        Pool(0)


class Host:
    """Does what a pool says, with facts drawn at random; checks each command as it comes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        limits = {State.LEASED: 9.0, State.SPARE: 5.0}
        self.pool = Pool(self.rng.randint(1, 4), limits, Cost(100, 100), spares=self.rng.randint(0, 2), first_pause_s=0.1)
        self.doing: dict[int, str] = {}  # per sandbox that is not gone
        self.asked_by: dict[int, int] = {}
        self.costs: dict[int, Cost] = {}  # per request
        self.answered: list[int] = []
        self.withdrawn: list[int] = []
        self.now = 0.0

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(sandbox_id=number, request_id=asked_by):
                    assert number not in self.asked_by
                    self.doing[number], self.asked_by[number] = "starting", asked_by
                case Grant(sandbox_id=number, request_id=request_id):
                    assert self.doing[number] in ("starting", "spare")
                    self.doing[number] = "leased"
                    self.answered.append(request_id)
                case Refuse(request_id=request_id):
                    self.answered.append(request_id)
                case Close(sandbox_id=number):
                    assert self.doing[number] != "closing" or self.pool.count(State.IN_DOUBT)  # those are closed on each tick
                    self.doing[number] = "closing"
                case _:
                    pass

    def step(self) -> None:
        rng, pool, now = self.rng, self.pool, self.now
        kind = rng.choice(["request", "request", "started", "failed", "release", "closed", "doubt", "withdraw", "tick"])
        of = {"started": "starting", "failed": "starting", "release": "leased", "closed": "closing", "doubt": "closing"}.get(kind)
        found = [number for number, doing in self.doing.items() if doing == of]
        if kind == "request":
            cost = Cost(rng.randint(1, 60), rng.randint(1, 60))
            name = rng.choice(["", f"x{cost}", f"y{cost}"])
            request_id, commands = pool.request("r", now, kind=name, cost=cost)
            self.costs[request_id] = cost
            self.take(commands)
        elif kind == "withdraw":
            waiting = [one for one in self.costs if one not in self.answered and one not in self.withdrawn]
            if waiting:
                self.withdrawn.append(rng.choice(waiting))
                self.take(pool.withdraw(self.withdrawn[-1], "w", now))
        elif kind == "tick":
            self.take(pool.tick(now))
        elif found:
            self.fact(kind, rng.choice(found))

    def fact(self, kind: str, number: int) -> None:
        pool, now = self.pool, self.now
        match kind:
            case "started":
                self.doing[number] = "spare"
                self.take(pool.started(number, now))
            case "failed":
                self.take(pool.failed(number, now, again=self.rng.random() < 0.5))
            case "release":
                self.take(pool.release(number, "r", now))
            case "closed":
                del self.doing[number]
                self.take(pool.closed(number, now))
            case _:
                pool.doubt(number, now)
                self.doing[number] = "in doubt"  # the next tick has it closed again

    def check(self) -> None:
        used = self.pool.in_use
        mine = [self.costs[self.asked_by[number]] for number in self.doing]
        assert len(self.doing) == self.pool.num_live <= self.pool.size
        assert used == Cost(sum(cost.memory_mb for cost in mine), sum(cost.disk_mb for cost in mine))
        assert used.memory_mb <= 100
        assert used.disk_mb <= 100
        assert len(set(self.answered)) == len(self.answered)
        assert not set(self.answered) & set(self.withdrawn)


@pytest.mark.parametrize("seed", range(20))
def test_invariants_on_random_facts(seed: int) -> None:
    """Places and costs are never exceeded, each request is answered once, and all is free at the end."""
    host = Host(seed)
    for _ in range(200):
        host.now += host.rng.random()
        host.step()
        host.check()
    host.take(host.pool.stop(host.now))
    for number in list(host.doing):
        host.pool.closed(number, host.now)
    assert (host.pool.num_live, host.pool.in_use) == (0, Cost(0, 0))
