"""GroupBuffer as lists of facts: staleness is bounded by slots, each group comes out once, and which of them make a batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from termrsi.queues.buffer import GroupBuffer, Taken
from termrsi.records import Flow

FLOWS = st.builds(
    lambda n, s, extra, replace, first: Flow(n, s, -1 if extra > n * s else extra, replace, first),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(-1, 12),
    st.integers(0, 3),
    st.booleans(),
)
FACTS = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "put", "put", "refuse", "drop", "take", "trained", "killed"]), st.integers(0, 99)),
    max_size=300,
)


class Life:
    """A buffer, and what a stage that is killed knows of it: the groups that it had begun, and which of them were refused."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.buffer: GroupBuffer[str] = GroupBuffer(flow)
        self.begun: list[str] = []
        self.open: dict[str, tuple[int, bool]] = {}
        self.out: list[str] = []
        self.looked_at: list[str] = []
        self.dropped: list[str] = []
        self.batch: Taken[str] | None = None

    def admit(self) -> bool:
        name, room = f"g{len(self.begun)}", self.buffer.free > 0
        assert self.buffer.admit(name) is room
        if room:
            self.begun.append(name)
            self.open[name] = (self.buffer.version, False)
        return room

    def refuse(self, name: str) -> None:
        self.buffer.refuse(name)
        self.open[name] = (self.open[name][0], True)

    def take(self) -> None:
        self.batch = self.buffer.take()
        if self.batch is None:
            return
        n, refused = self.flow.batch_groups, self.batch.refused
        assert len(self.batch.groups) + self.batch.missing == n
        assert len(refused) - self.batch.missing <= self.flow.replace  # those that were replaced
        assert self.batch.missing == 0 or len(refused) - self.batch.missing == self.flow.replace
        for group in self.batch.groups:
            assert group.staleness == self.buffer.version - group.version
            assert group.staleness <= self.flow.max_staleness
        for name in self.names():
            assert self.open[name][1] is (name in refused)
        self.out += [group.group_id for group in self.batch.groups]
        self.looked_at += self.names()

    def names(self) -> list[str]:
        assert self.batch is not None
        return [*self.batch.refused, *(group.group_id for group in self.batch.groups)]

    def trained(self) -> None:
        for name in self.names():
            del self.open[name]
        self.buffer.trained()
        self.batch = None

    def killed(self) -> None:
        """It goes on from the end of the last step that was trained: that batch is none any more."""
        if self.batch is not None:
            self.trained()
        version = self.buffer.version
        self.buffer = GroupBuffer(self.flow, version)
        for name, (born, refused) in self.open.items():
            self.buffer.readmit(name, born, refused)


@given(flow=FLOWS, facts=FACTS)
@settings(max_examples=400, deadline=None)
def test_any_order_of_events_and_kills(flow: Flow, facts: list[tuple[str, int]]) -> None:
    life = Life(flow)
    for fact, pick in facts:
        waiting = life.buffer.sampling
        one = waiting[pick % len(waiting)] if waiting else ""
        if fact == "admit":
            life.admit()
        elif fact == "put" and one:
            life.buffer.put(one, "rollouts")
        elif fact == "refuse" and one and pick < 60:
            life.refuse(one)
        elif fact == "drop" and one and pick < 20:
            life.buffer.drop(one)
            del life.open[one]
            life.dropped.append(one)
        elif fact == "take" and life.batch is None:
            life.take()
        elif fact == "trained" and life.batch is not None:
            life.trained()
        elif fact == "killed" and pick < 10:
            life.killed()
        assert 0 <= life.buffer.free <= life.buffer.capacity == flow.capacity
    while life.open:  # to the end: what was begun is trained, with new groups to fill the last batch
        if life.batch is not None:
            life.trained()
        while life.admit() and len(life.begun) < 400:
            pass
        for name in life.buffer.sampling:
            life.buffer.put(name, "rollouts")
        life.take()
        assert life.batch is not None  # what is waited for is only what is sampled
        if len(life.begun) > 380:
            break
    assert len(life.looked_at) == len(set(life.looked_at))
    assert not set(life.looked_at) & set(life.dropped)
    assert set(life.looked_at) | set(life.dropped) | set(life.open) == set(life.begun)
    if not flow.first:
        assert life.out == sorted(life.out, key=lambda name: int(name[1:]))  # in the order of admission


@given(flow=FLOWS.filter(lambda flow: not flow.first), useful=st.lists(st.booleans(), min_size=80, max_size=80), order=st.randoms())
@settings(max_examples=200, deadline=None)
def test_what_a_fair_batch_holds_does_not_depend_on_who_finishes_first(flow: Flow, useful: list[bool], order) -> None:
    """The next groups in the order of admission, until n are of use, or `replace` of the others were passed over."""
    buffer: GroupBuffer[int] = GroupBuffer(flow)
    begun, at = 0, 0
    for _ in range(4):
        expected: list[int] = []
        places = passed = 0
        while places < flow.batch_groups:
            if useful[at] or passed == flow.replace:
                places += 1
                expected += [at] if useful[at] else []
            else:
                passed += 1
            at += 1
        taken = None
        while taken is None:
            while begun < len(useful) and buffer.admit(str(begun)):
                begun += 1
            if waiting := buffer.sampling:
                name = order.choice(waiting)
                buffer.put(name, 0) if useful[int(name)] else buffer.refuse(name)
            taken = buffer.take()
        assert [int(group.group_id) for group in taken.groups] == expected
        assert len(taken.groups) + len(taken.refused) == places + passed
        buffer.trained()


def test_slots_stop_the_sampler_not_a_filter() -> None:
    buffer: GroupBuffer[int] = GroupBuffer(Flow(2, 1))
    assert [buffer.admit(g) for g in "abcde"] == [True] * 4 + [False]
    for g in "bcd":
        buffer.put(g, 0)
    assert buffer.take() is None  # a is the oldest: it is not overtaken
    buffer.put("a", 1)
    first = buffer.take()
    assert first is not None
    assert [(r.group_id, r.group, r.staleness) for r in first.groups] == [("a", 1, 0), ("b", 0, 0)]
    assert not buffer.admit("e")  # trained on, but not yet done
    buffer.trained()
    assert buffer.admit("e")
    second = buffer.take()
    assert second is not None
    assert [r.staleness for r in second.groups] == [1, 1]


def test_without_staleness_the_next_batch_waits_for_the_last() -> None:
    buffer: GroupBuffer[int] = GroupBuffer(Flow(1))
    assert buffer.admit("a")
    buffer.put("a", 1)
    assert buffer.take()
    assert not buffer.admit("b")
    buffer.trained()
    assert buffer.admit("b")


def admitted(flow: Flow, names: str) -> GroupBuffer[str]:
    buffer: GroupBuffer[str] = GroupBuffer(flow)
    assert [buffer.admit(name) for name in names] == [True] * len(names)
    return buffer


def take(buffer: GroupBuffer[str]) -> list[tuple[str, int]]:
    batch = buffer.take()
    assert batch is not None
    return [(group.group_id, group.staleness) for group in batch.groups]


def test_extra_groups_are_the_first_of_the_next_batch() -> None:
    """Two of two, and one more under way: of the next batch one group is a version old, the other is new."""
    buffer = admitted(Flow(2, 1, extra=1), "abc")
    assert not buffer.admit("d")
    for name in "cba":
        buffer.put(name, name)
    assert take(buffer) == [("a", 0), ("b", 0)]  # c was the first to finish
    buffer.trained()
    assert buffer.admit("d")
    buffer.put("d", "d")
    assert buffer.admit("e")
    assert not buffer.admit("f")
    assert take(buffer) == [("c", 1), ("d", 0)]


def test_the_first_to_finish_make_the_batch_where_that_is_asked_for() -> None:
    buffer = admitted(Flow(2, 2, extra=1, first=True), "abc")
    buffer.put("c", "c")
    assert buffer.take() is None
    buffer.put("b", "b")
    assert take(buffer) == [("b", 0), ("c", 0)]
    buffer.trained()
    assert [buffer.admit(name) for name in "def"] == [True, True, False]
    for name in "ed":
        buffer.put(name, name)
    assert take(buffer) == [("d", 0), ("e", 0)]  # a is overtaken again
    buffer.trained()
    assert [buffer.admit(name) for name in "fg"] == [True, True]
    for name in "fg":
        buffer.put(name, name)
    assert buffer.take() is None  # a batch later it would be three versions old: the learner waits for it
    buffer.put("a", "a")
    assert take(buffer) == [("a", 2), ("f", 0)]


def test_a_group_of_no_use_lends_its_slot_to_the_next() -> None:
    buffer = admitted(Flow(2, replace=1), "ab")
    assert not buffer.admit("c")
    buffer.refuse("a")
    assert buffer.admit("c")
    buffer.refuse("c")  # one was replaced: this one is not
    assert not buffer.admit("d")
    buffer.put("b", "b")
    batch = buffer.take()
    assert batch is not None
    assert ([g.group_id for g in batch.groups], batch.refused, batch.missing) == (["b"], ("a", "c"), 1)
    buffer.trained()
    assert buffer.admit("d")


def test_who_was_replaced_is_a_matter_of_the_order_of_admission() -> None:
    """Ahead of the learner: d and c are of no use, and were told so first; a is what the first batch replaces."""
    buffer = admitted(Flow(2, 1, replace=1), "abcd")
    for name in "dca":
        buffer.refuse(name)
    assert [buffer.admit(name) for name in "efg"] == [True, True, False]  # b and e are one batch, with a and c looked past...
    for name in "bef":
        buffer.put(name, name)
    first = buffer.take()
    assert first is not None  # ...no: past a alone, and b, c are the places
    assert ([g.group_id for g in first.groups], first.refused, first.missing) == (["b"], ("a", "c"), 1)
    buffer.trained()
    second = buffer.take()
    assert second is not None
    assert ([g.group_id for g in second.groups], second.refused, second.missing) == (["e", "f"], ("d",), 0)


def test_nothing_is_begun_that_is_of_no_batch() -> None:
    buffer = admitted(Flow(2, 1, replace=3, batches=1), "ab")
    assert not buffer.admit("c")
    buffer.refuse("a")
    assert buffer.admit("c")
    for name in "bc":
        buffer.put(name, name)
    assert take(buffer) == [("b", 0), ("c", 0)]
    assert buffer.free == 0
    buffer.trained()
    assert buffer.free == 0


def test_refusals() -> None:
    for wrong in ({"batch_groups": 0}, {"max_staleness": -1}, {"replace": -1}, {"extra": 3}, {"extra": -2}):
        with pytest.raises(ValueError, match="max_staleness"):
            Flow(**{"batch_groups": 2, "max_staleness": 1} | wrong)  # type: ignore[arg-type]  # these are numbers
    buffer: GroupBuffer[int] = GroupBuffer(Flow(1, 1))
    with pytest.raises(ValueError, match="no batch"):
        buffer.trained()
    for end in (lambda: buffer.put("x", 1), lambda: buffer.refuse("x"), lambda: buffer.drop("x")):
        with pytest.raises(KeyError):
            end()
    buffer.admit("a")
    buffer.put("a", 1)
    for end in (lambda: buffer.put("a", 1), lambda: buffer.refuse("a")):
        with pytest.raises(ValueError, match="twice"):
            end()
    with pytest.raises(ValueError, match="is finished"):
        buffer.drop("a")
    with pytest.raises(ValueError, match="admitted before"):
        buffer.admit("a")
    buffer.take()
    with pytest.raises(ValueError, match="still being trained"):
        buffer.take()


def test_a_buffer_goes_on_with_the_slots_that_were_held() -> None:
    """At version 3 with one update of lag: what was admitted at 2 comes first, then what is new."""
    buffer: GroupBuffer[str] = GroupBuffer(Flow(2, 1), 3)
    buffer.readmit("a", 2)
    buffer.readmit("b", 3)
    assert buffer.sampling == ("a", "b")
    assert buffer.free == 2
    assert buffer.admit("c")
    for name in ("b", "a"):
        buffer.put(name, name)
    assert take(buffer) == [("a", 1), ("b", 0)]
    with pytest.raises(ValueError, match="a was admitted before"):
        buffer.readmit("a", 3)
    buffer.trained()
    buffer.readmit("d", 4)
    with pytest.raises(ValueError, match="e of version 3 would be trained at 5"):
        buffer.readmit("e", 3)
    buffer.readmit("f", 4)
    buffer.readmit("g", 4)
    with pytest.raises(ValueError, match="e does not fit into 4 slots"):
        buffer.readmit("e", 6)


def test_what_was_refused_stays_so() -> None:
    buffer: GroupBuffer[str] = GroupBuffer(Flow(2, 1, replace=2), 3)
    buffer.readmit("a", 2, refused=True)
    buffer.readmit("b", 3)
    assert buffer.sampling == ("b",)
    assert buffer.free == 3
