"""RecoveryQueue against a list; newest first, oldest evicted, nothing in two places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.queues.recovery import RecoveryQueue
from termrsi.records import EnvironmentSpec, RecoveryPoint, Snapshot, TaskSpec

TASK = TaskSpec("t", "f", "do", "/t", EnvironmentSpec())


def point(i: int) -> RecoveryPoint:
    return RecoveryPoint(str(i), TASK, Snapshot(str(i), "local", "/s", "d"), (1, 2), 1, born_step=i)


def test_newest_first_and_oldest_evicted() -> None:
    queue = RecoveryQueue(3)
    for i in range(5):
        queue.push(point(i))
    assert [p.id for p in queue.evicted] == ["0", "1"]
    assert [p.id for p in queue.take(2)] == ["4", "3"]
    assert [p.id for p in queue.take(5)] == ["2"]
    assert queue.take(1) == []
    assert queue.peek(1) == []
    assert [p.id for p in queue.clear_evicted()] == ["0", "1"]
    assert queue.evicted == ()


@given(capacity=st.integers(1, 4), steps=st.lists(st.one_of(st.just("push"), st.integers(0, 3)), max_size=40))
def test_every_point_is_in_one_place(capacity: int, steps: list[str | int]) -> None:
    queue, model, evicted, taken, made = RecoveryQueue(capacity), [], [], [], 0
    for step in steps:
        if isinstance(step, int):
            taken += queue.take(step)
            model = model[step:]
        else:
            queue.push(point(made))
            model = [str(made), *model]
            evicted += reversed(model[capacity:])
            model, made = model[:capacity], made + 1
        assert [p.id for p in queue.to_list()] == model
        assert [p.id for p in queue.evicted] == evicted
        assert len(queue) == len(model)
    everywhere = [p.id for p in (*queue.to_list(), *queue.evicted, *taken)]
    assert sorted(everywhere, key=int) == [str(i) for i in range(made)]
    again = RecoveryQueue.from_list(queue.to_list(), capacity)
    assert again.to_list() == queue.to_list()
    assert again.evicted == ()


def test_a_look_leaves_everything_where_it_is() -> None:
    queue = RecoveryQueue.from_list([point(3), point(2), point(1)], 3)
    for _ in range(2):
        assert [p.id for p in queue.peek(2)] == ["3", "2"]
    assert [p.id for p in queue.peek(9)] == ["3", "2", "1"]
    queue.push(point(4))
    assert [p.id for p in queue.peek(1)] == ["4"]
    assert [p.id for p in queue.evicted] == ["1"]


def test_resume_with_a_smaller_capacity_evicts_the_oldest() -> None:
    queue = RecoveryQueue.from_list([point(3), point(2), point(1)], 2)
    assert [p.id for p in queue.to_list()] == ["3", "2"]
    assert [p.id for p in queue.evicted] == ["1"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RecoveryQueue(0)
    queue = RecoveryQueue(2)
    queue.push(point(1))
    with pytest.raises(ValueError, match="already"):
        queue.push(point(1))
    with pytest.raises(ValueError, match="cannot take"):
        queue.take(-1)
    with pytest.raises(ValueError, match="cannot take"):
        queue.peek(-1)
