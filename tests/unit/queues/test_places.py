"""Which place gets the next job: the least loaded of those that answer; a lost one is left out, tried again, and taken up."""

import math

import pytest

from termrsi.queues.places import Places


def test_jobs_go_to_the_least_loaded_and_in_turn() -> None:
    places = Places(["a", "b", "c"])
    assert [places.begin(0.0) for _ in range(4)] == [0, 1, 2, 0]
    places.end(1)
    assert places.begin(0.0) == 1
    assert places.begin(0.0, frozenset({0})) == 0
    with pytest.raises(ValueError, match="no place"):
        Places([])


def test_a_lost_one_is_left_out_for_a_pause_that_doubles_and_is_taken_up_once_it_answers() -> None:
    places = Places(["a", "b"], first_pause_s=1.0, longest_pause_s=4.0)
    assert places.lost(0, 10.0, "died") is True
    assert places.lost(0, 10.5, "died") is False, "what was lost together counts once"
    assert places.open(10.9) == [1]
    assert places.open(11.0) == [0, 1], "to be tried again"
    assert places.up() == [1]
    pauses = []
    now_s = 11.0
    for _ in range(4):
        places.lost(0, now_s, "died")
        places.lost(1, now_s, "died")
        pauses.append(places.next_s(now_s))
        now_s += pauses[-1] + 4.0
    assert pauses == [1.0, 2.0, 4.0, 4.0], "doubled, up to the longest"
    assert places.heard(0, "a2") is True
    assert places.heard(0) is False
    assert (places.name(0), places.none_since_s(100.0), places.next_s(100.0)) == ("a2", 0.0, 0.0)


def test_when_none_answers_it_is_told_for_how_long_and_why() -> None:
    places = Places(["node 1", "node 2"])
    places.lost(0, 5.0, "died")
    assert places.none_since_s(20.0) == 0.0
    places.lost(1, 12.0, "hung")
    assert places.none_since_s(20.0) == 8.0
    assert places.told(20.0) == "node 1 for 15 s (died), node 2 for 8 s (hung)"
    assert not places.none_left()


def test_what_is_gone_comes_back_no_more() -> None:
    places = Places(["a", "b"])
    assert [places.gone(0, 1.0, "too often"), places.gone(0, 1.0, "too often")] == [True, False]
    assert places.heard(0) is False
    assert places.open(1000.0) == [1]
    assert places.begin(1000.0, frozenset({0})) is None
    places.gone(1, 2.0, "too often")
    assert places.none_left()
    assert places.next_s(3.0) == math.inf
    assert places.told(3.0) == "a for 2 s (too often), b for 1 s (too often)"


def test_one_that_answers_and_cannot_do_its_jobs_is_passed_over_while_there_are_others() -> None:
    places = Places(["a", "b"], first_pause_s=1.0, longest_pause_s=4.0)
    places.failed(0, 10.0)
    places.failed(0, 10.5)
    assert [places.begin(10.9) for _ in range(3)] == [1, 1, 1], "what failed together counts once"
    assert places.begin(11.0) == 0
    assert (places.up(), places.none_since_s(20.0)) == ([0, 1], 0.0), "it is not lost"
    places.failed(0, 12.0)
    places.heard(0)
    assert places.begin(13.9, frozenset({0, 1})) == 1, "twice as long; that it answers says nothing of its jobs"
    places.failed(1, 13.0)
    places.served(0)
    assert places.begin(13.9) == 0, "it works again"
    places.failed(0, 13.0)
    assert places.begin(13.5, frozenset({0})) == 0, "with no other it is all there is"


def test_those_that_are_away_may_come_back_and_are_waited_for_by_themselves() -> None:
    places = Places(["a", "b", "c"], first_pause_s=2.0)
    places.lost(1, 10.0, "died")
    places.gone(2, 10.0, "too often")
    assert (places.away(11.0), places.away(11.0, 5.0), places.away(15.0, 5.0)) == ([1], [1], [])
    assert (places.next_s(11.0), places.next_s(11.0, {1}), places.next_s(11.0, {2})) == (0.0, 1.0, math.inf)
    assert [places.is_gone(place) for place in (0, 1, 2)] == [False, False, True]
    places.heard(1)
    assert places.away(11.0) == []
