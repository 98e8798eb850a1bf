"""When a receiver tells how its bytes come."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dask_hoplite.core.watch import Watch


def story(*rates, timeout=1.5, rate=100.0):
    """What is told when bytes come at these rates, in one interval each."""
    watch = Watch(timeout, rate, 0, 0.0)
    now = received = 0.0
    told = []
    for lately in rates:
        now += watch.interval
        received += lately * watch.interval
        told.append(watch.look(received, now))
    return told


def test_all_is_well():
    told = story(*[100.0] * 12)
    assert [i for i, finding in enumerate(told, 1) if finding] == [5, 10]
    assert set(told) == {None, "progressed"}


def test_a_complaint_is_made_at_once_and_taken_back_at_once():
    assert story(100, 10, 100, 100) == [None, "lagging", "progressed", None]
    assert story(100, 0, 100) == [None, "lagging", "progressed"]
    assert story(10, 0, 10) == ["lagging", "lagging", "lagging"], "of one thing, then of another"


def test_slow_bytes_are_told_of_ever_more_rarely():
    told = story(*[10.0] * 40)
    when = [i for i, finding in enumerate(told) if finding]
    pauses = [b - a for a, b in pairwise(when)]
    assert set(filter(None, told)) == {"lagging"}
    assert pauses[:2] == [2, 4]
    assert set(pauses[2:]) == {5}


def test_nothing_for_a_stall_timeout_is_a_stall():
    told = story(100, *[0.0] * 11)
    assert told[1] == "lagging"
    assert [i for i, finding in enumerate(told) if finding == "stalled"] == [5, 10]


def test_where_the_rate_does_not_matter_only_nothing_is_too_little():
    assert story(0.001, 0.001, 0.0, rate=None) == [None, None, "lagging"]


def test_where_nobody_knows_the_rate_it_is_told():
    assert story(50.0, 50.0, 50.0, 0.0, rate=0.0) == ["measured", None, "measured", "lagging"]


@pytest.mark.parametrize("expected, slow", [(80.0, False), (100.0, True)])
def test_what_was_measured_is_judged_when_others_are_known(expected, slow):
    watch = Watch(1.5, 0.0, 0, 0.0)
    assert watch.look(50 * watch.interval, watch.interval) == "measured"
    assert watch.expect(expected) == slow
    found = watch.look(100 * watch.interval, 2 * watch.interval)
    assert found is None, "it is known already, or as it should be"


def test_time_counts_from_the_first_byte():
    watch = Watch(1.5, 100.0, 0, 0.0)
    assert watch.look(5.0, 0.3, begun=0.25) is None, "too early"
    assert watch.look(35.0, 0.6, begun=0.25) is None
    assert watch.rate == pytest.approx(100.0)


def test_to_start_again_is_not_a_negative_rate():
    watch = Watch(1.5, 100.0, 1000, 0.0)
    assert watch.look(10, watch.interval) == "lagging"
    assert watch.rate == 0
