"""GroupBuffer as lists of facts: staleness is bounded by slots, and each group comes out once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from termrsi.queues.buffer import GroupBuffer


@given(
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    facts=st.lists(st.tuples(st.sampled_from(["admit", "put", "drop", "take", "trained"]), st.integers(0, 99)), max_size=300),
)
@settings(max_examples=200)
def test_any_order_of_events(batch: int, staleness: int, facts: list[tuple[str, int]]) -> None:
    buffer: GroupBuffer[str] = GroupBuffer(batch, staleness)
    admitted = 0
    out: list[str] = []
    dropped: list[str] = []
    training = False
    for fact, pick in facts:
        waiting = buffer.sampling
        if fact == "admit":
            room = buffer.free > 0
            assert buffer.admit(f"g{admitted}") is room
            admitted += room
        elif fact == "put" and waiting:
            buffer.put(waiting[pick % len(waiting)], "rollouts")
        elif fact == "drop" and waiting and pick < 20:
            dropped.append(waiting[pick % len(waiting)])
            buffer.drop(dropped[-1])
        elif fact == "take" and not training:
            ready = buffer.take()
            training = ready is not None
            for group in ready or []:
                assert group.staleness == buffer.version - group.version
                assert group.staleness <= staleness
                out.append(group.group_id)
        elif fact == "trained" and training:
            buffer.trained()
            training = False
        assert 0 <= buffer.free <= buffer.capacity == batch * (1 + staleness)
    if training:
        buffer.trained()
    for group_id in buffer.sampling:
        buffer.put(group_id, "rollouts")
    while rest := buffer.take_rest():
        assert all(group.staleness <= staleness for group in rest)
        out += [group.group_id for group in rest]
        buffer.trained()
    assert sorted(out + dropped) == sorted(f"g{i}" for i in range(admitted))
    assert out == sorted(out, key=lambda name: int(name[1:]))  # in the order of admission
    assert buffer.free == buffer.capacity


def test_slots_stop_the_sampler_not_a_filter() -> None:
    buffer: GroupBuffer[int] = GroupBuffer(2, 1)
    assert [buffer.admit(g) for g in "abcde"] == [True] * 4 + [False]
    for g in "bcd":
        buffer.put(g, 0)
    assert buffer.take() is None  # a is the oldest: it is not overtaken
    buffer.put("a", 1)
    first = buffer.take()
    assert first is not None
    assert [(r.group_id, r.group, r.staleness) for r in first] == [("a", 1, 0), ("b", 0, 0)]
    assert not buffer.admit("e")  # trained on, but not yet done
    buffer.trained()
    assert buffer.admit("e")
    second = buffer.take()
    assert second is not None
    assert [r.staleness for r in second] == [1, 1]


def test_without_staleness_the_next_batch_waits_for_the_last() -> None:
    buffer: GroupBuffer[int] = GroupBuffer(1, 0)
    assert buffer.admit("a")
    buffer.put("a", 1)
    assert buffer.take()
    assert not buffer.admit("b")
    buffer.trained()
    assert buffer.admit("b")


def test_resume() -> None:
    buffer: GroupBuffer[int] = GroupBuffer(1, 2)
    for i, g in enumerate("abc"):
        buffer.admit(g)
        if g != "b":
            buffer.put(g, i)
    saved = buffer.to_list()
    assert saved == [("a", 0, 0), ("c", 0, 2)]
    again = GroupBuffer.from_list(saved, batch_groups=1, max_staleness=2, version=buffer.version)
    assert again.admit("b")  # it was being sampled: it starts anew
    with pytest.raises(ValueError, match="before"):
        again.admit("a")
    with pytest.raises(ValueError, match="do not fit"):
        GroupBuffer.from_list(saved, batch_groups=1, max_staleness=0, version=0)
    with pytest.raises(ValueError, match="would be trained at 4"):
        GroupBuffer.from_list(saved[:1], batch_groups=1, max_staleness=2, version=4)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="max_staleness"):
        GroupBuffer(1, -1)
    buffer: GroupBuffer[int] = GroupBuffer(1, 1)
    with pytest.raises(ValueError, match="no batch"):
        buffer.trained()
    with pytest.raises(KeyError):
        buffer.put("x", 1)
    buffer.admit("a")
    buffer.put("a", 1)
    with pytest.raises(ValueError, match="twice"):
        buffer.put("a", 1)
    buffer.take()
    with pytest.raises(ValueError, match="still being trained"):
        buffer.take()
    with pytest.raises(ValueError, match="is being trained"):
        buffer.drop("a")


def test_a_buffer_goes_on_with_the_slots_that_were_held() -> None:
    """At version 3 with one update of lag: what was admitted at 2 comes first, then what is new."""
    buffer: GroupBuffer[str] = GroupBuffer(2, 1, 3)
    buffer.readmit("a", 2)
    buffer.readmit("b", 3)
    assert buffer.sampling == ("a", "b")
    assert buffer.free == 2
    assert buffer.admit("c")
    for name in ("b", "a"):
        buffer.put(name, name)
    assert [(r.group_id, r.version, r.staleness) for r in buffer.take() or []] == [("a", 2, 1), ("b", 3, 0)]
    with pytest.raises(ValueError, match="a was admitted before"):
        buffer.readmit("a", 3)
    buffer.readmit("d", 3)
    with pytest.raises(ValueError, match="e of version 3 would be trained at 5"):
        buffer.readmit("e", 3)
    with pytest.raises(ValueError, match="e does not fit into 4 slots"):
        buffer.readmit("e", 5)
