"""Time with one job or more, by a clock that the test moves."""

from termrsi.actors.busy import Busy


def test_overlapping_jobs_count_once_and_what_is_under_way_counts() -> None:
    now = [10.0]
    busy = Busy(lambda: now[0])
    assert busy.seconds == 0.0
    with busy:
        now[0] = 12.0
        with busy:
            now[0] = 15.0
        assert busy.seconds == 5.0
        now[0] = 16.0
    now[0] = 100.0
    assert busy.seconds == 6.0
    with busy:
        now[0] = 101.5
        assert busy.seconds == 7.5
