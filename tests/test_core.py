"""Each rule of the deciding core, one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.directory import PATIENCE, Directory
from dask_hoplite.core.events import (
    Abandoned,
    Declined,
    Finished,
    Lagging,
    Measured,
    Progressed,
    Pushed,
    Released,
    SourceFailed,
    Stalled,
    Wanted,
    WorkerJoined,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Cancel, NoSource, Pull, Wait

NBYTES = 2**30
TIMEOUT = 1.5


class Story:
    """A directory, and workers that are named by host and number: ``a1`` is on host ``a``."""

    def __init__(self, workers: str, holders: str = "", cost: CostModel | None = None):
        self.known = dict.fromkeys(holders.split())
        self.directory = Directory(lambda key: self.known, cost=cost, stall_timeout=TIMEOUT)
        self.epochs: dict[str, int] = {}
        self.now = 0.0
        for worker in workers.split():
            self.join(worker)

    @property
    def tree(self):
        return self.directory.trees["x"]

    def handle(self, event):
        told = self.directory.handle(event, self.now)
        for instruction in told:
            if isinstance(instruction, Pull):
                self.epochs[instruction.receiver] = instruction.epoch
        return told

    def ask(self, event):
        """Of the one who asks, the one answer."""
        [told] = self.handle(event)
        assert told.receiver == event.receiver
        return told

    def join(self, worker):
        assert self.handle(WorkerJoined(worker, worker[0])) == []

    def leave(self, worker):
        self.known.pop(worker, None)
        return self.handle(WorkerLeft(worker))

    def want(self, *receivers, **details):
        """The sources that receivers get, in this order."""
        told = [self.ask(Wanted("x", r, NBYTES, **details)) for r in receivers]
        sources = [getattr(instruction, "source", None) for instruction in told]
        return sources if len(sources) > 1 else sources[0]

    def report(self, kind, receiver, received=0, *details, epoch=None):
        epoch = self.epochs[receiver] if epoch is None else epoch
        return self.handle(kind("x", receiver, epoch, received, *details))

    def progress(self, receiver, received):
        assert self.report(Progressed, receiver, received) == []

    def lag(self, receiver, rate, received=0, epoch=None):
        [told] = self.report(Lagging, receiver, received, rate, epoch=epoch)
        return told

    def fail(self, receiver, received=0, epoch=None):
        [told] = self.report(SourceFailed, receiver, received, "reset", epoch=epoch)
        return told

    def stall(self, receiver, received=0, epoch=None):
        [told] = self.report(Stalled, receiver, received, epoch=epoch)
        return told

    def finish(self, receiver, epoch=None, *, latency=0.001, seconds=1.0, known=True):
        epoch = self.epochs[receiver] if epoch is None else epoch
        assert self.handle(Finished("x", receiver, epoch, latency, seconds, "tcp")) == []
        if known:
            self.known[receiver] = None


# Who is chosen


def test_first_receiver_takes_the_complete_copy():
    story = Story("a1 b1", holders="a1")
    told = story.ask(Wanted("x", "b1", NBYTES))
    assert told == Pull("x", "b1", "a1", 1, "a complete copy that is free", rate=0.0)


def test_large_objects_go_along_a_chain():
    story = Story("a1 b1 c1 d1", holders="a1")
    assert story.want("b1", "c1", "d1", expected=3) == ["a1", "b1", "c1"]
    assert [story.tree.transfers[w].depth for w in ("b1", "c1", "d1")] == [1, 2, 3]


def test_same_host_comes_first_even_if_it_is_far_down():
    story = Story("a1 b1 c1 c2 d1", holders="a1 d1")
    assert story.want("b1", "c1") == ["a1", "d1"]
    assert story.want("c2") == "c1"  # though b1 is as near and free


def test_same_host_whole_or_in_part():
    story = Story("a1 a2 b1", holders="a1")
    assert story.want("a2") == "a1"
    assert story.tree._load["a"] == 0  # it took no link


def test_on_the_same_host_the_one_that_feeds_the_fewest():
    story = Story("a1 b1 b2 b3 b4", holders="a1")
    assert story.want("b1", "b2", "b3", "b4") == ["a1", "b1", "b2", "b3"]


def test_an_object_crosses_to_each_host_once():
    story = Story("a1 b1 c1 b2 c2 b3 c3", holders="a1")
    sources = story.want("b1", "c1", "b2", "c2", "b3", "c3")
    assert sources == ["a1", "b1", "b1", "c1", "b2", "c2"]


def test_a_host_feeds_one_other_though_several_of_its_workers_could():
    story = Story("a1 b1 b2 c1 d1 e1", holders="a1")
    assert story.want("b1", "b2", "c1") == ["a1", "b1", "b1"]
    assert story.want("d1") == "c1"  # not b2, whose host sends already


def test_a_complete_copy_that_is_free_comes_before_receivers():
    story = Story("a1 b1 c1 d1", holders="a1 c1")
    assert story.want("b1", "d1") == ["a1", "c1"]


def test_nearest_open_receiver():
    story = Story("a1 b1 c1 d1 e1 f1", holders="a1 f1")
    assert story.want("b1", "c1", "d1", "e1") == ["a1", "f1", "b1", "c1"]


def test_all_busy_takes_whose_host_feeds_the_fewest():
    story = Story("a1 b1 c1 d1", holders="a1")
    story.want("b1", "c1", "d1")
    assert story.tree.transfers["d1"].source == "c1"
    # c1 loses b1: d1 is below it, and a1 is busy with b1.
    told = story.fail("c1")
    assert (told.source, told.reason) == ("a1", "all are busy; this one feeds the fewest")


def test_failed_sources_are_avoided():
    story = Story("a1 b1 c1", holders="a1 c1")
    assert story.want("b1") == "a1"
    assert story.fail("b1").source == "c1"
    told = story.fail("b1")
    assert isinstance(told, NoSource)
    assert told.tried == {"a1": "reset", "c1": "reset"}
    assert told.reason == "every source failed"


def test_a_new_request_may_try_all_again():
    story = Story("a1 b1", holders="a1")
    story.want("b1")
    assert isinstance(story.fail("b1"), NoSource)
    assert story.want("b1") == "a1"


def test_never_from_its_own_descendant():
    story = Story("a1 b1 c1 d1", holders="a1")
    story.want("b1", "c1", "d1")
    story.known.clear()
    story.known["d1"] = None  # an outdated view: d1 still receives, through b1
    assert isinstance(story.fail("b1"), NoSource)


def test_nobody_holds_it():
    story = Story("a1 b1")
    told = story.ask(Wanted("x", "b1", NBYTES))
    assert told == NoSource("x", "b1", {}, "no worker holds it")
    assert story.directory.trees == {}


def test_holders_outside_the_cluster_do_not_count():
    story = Story("a1 b1", holders="a1 z1")
    story.want("b1")
    assert isinstance(story.fail("b1"), NoSource)


def test_asking_again_gives_a_new_epoch():
    story = Story("a1 b1", holders="a1")
    first = story.ask(Wanted("x", "b1", NBYTES))
    again = story.ask(Wanted("x", "b1", NBYTES, received=10))
    assert again.epoch > first.epoch
    assert story.tree.transfers["b1"].resumed_from == 10
    assert [row["status"] for row in story.directory.log()] == ["asked again", "running"]


def test_wider_trees_use_places_that_were_none_before():
    story = Story("a1 b1 c1 d1 e1 f1 g1 h1", holders="a1")
    assert story.want("b1", "c1", "d1") == ["a1", "b1", "c1"]
    story.directory.cost = SimpleNamespace(fan_out=lambda nbytes, receivers: 2, expected=0.0)
    sources = story.want("e1", "f1", "g1", "h1")
    assert sources[0] == "a1"
    assert set(sources[1:]) == {"b1", "e1"}


# Receivers that fail, fall silent, finish


def test_stale_reports_are_dropped():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1")
    old = story.epochs["b1"]
    story.handle(Released("x"))
    story.want("b1")  # the next generation of the same key
    story.report(Progressed, "b1", 500, epoch=old)
    assert story.tree.transfers["b1"].received == 0
    story.finish("b1", epoch=old, known=False)
    story.report(Abandoned, "b1", 500, "cancelled", epoch=old)
    assert "b1" in story.tree.transfers


def test_who_asks_in_an_old_epoch_is_told_the_latest_decision_again():
    story = Story("a1 b1 c1", holders="a1 c1")
    story.want("b1")
    old = story.epochs["b1"]
    new = story.fail("b1")
    assert story.fail("b1", epoch=old) == new
    assert story.stall("b1", epoch=old) == new
    assert story.tree.transfers["b1"].source == "c1"


def test_who_asks_about_a_released_object_is_told_to_stop():
    story = Story("a1 b1", holders="a1")
    story.want("b1")
    story.handle(Released("x"))
    assert isinstance(story.stall("b1"), NoSource)
    assert isinstance(story.fail("b1"), NoSource)


def test_finishing_counts_in_an_epoch_that_was_overtaken():
    story = Story("a1 b1 c1", holders="a1 c1")
    story.want("b1")
    old = story.epochs["b1"]
    [told] = story.leave("a1")  # the last byte of a1 and this cross
    assert told.epoch > old
    latency = story.directory.cost.latency
    story.finish("b1", epoch=old)
    assert story.directory.cost.latency == latency  # it says nothing about the new source
    story.join("d1")
    assert story.directory.trees == {}


def test_abandoning_counts_in_an_epoch_that_was_overtaken():
    story = Story("a1 b1 c1", holders="a1 c1")
    story.want("b1")
    old = story.epochs["b1"]
    story.leave("a1")
    assert story.report(Abandoned, "b1", 10, "cancelled", epoch=old) == []
    assert story.directory.trees == {}


def test_stalled_on_the_only_source_waits_for_long_but_not_for_ever():
    story = Story("a1 b1", holders="a1")
    story.want("b1")
    for _ in range(PATIENCE - 1):
        story.now += TIMEOUT
        told = story.stall("b1", 100)
        assert isinstance(told, Wait) and "no other source" in told.reason
    story.now += 2 * TIMEOUT
    told = story.stall("b1", 100)
    assert isinstance(told, NoSource) and "a1" in told.tried


def test_stalled_behind_a_source_that_has_no_more_waits():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    story.lag("b1", 0.0, 100)
    told = story.stall("c1", 100)
    assert told == Wait("x", "c1", story.epochs["c1"], "b1 waits for its own source")
    assert story.tree.transfers["c1"].source == "b1"


def test_stalled_though_its_source_has_more_moves():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    story.progress("b1", 200)
    assert story.stall("c1", 100).source == "a1"
    assert story.tree.transfers["c1"].tried == {"b1": "sent nothing for 1.5 s"}


def test_stalled_on_a_complete_copy_moves():
    story = Story("a1 b1 c1", holders="a1 c1")
    story.want("b1")
    assert story.stall("b1", 100).source == "c1"
    assert story.tree.transfers["b1"].tried == {"a1": "sent nothing for 1.5 s"}


def test_stalled_behind_a_silent_source_takes_its_place():
    """Or else its new source would feed both, at half the speed, though one takes nothing."""
    story = Story("a1 b1 c1 d1", holders="a1")
    story.want("b1", "c1", "d1")
    story.progress("b1", 100)
    story.now = TIMEOUT
    story.lag("c1", 0.0, 100)
    story.lag("d1", 0.0, 100)
    told = story.stall("c1", 100)
    assert (told.source, told.reason) == ("a1", "a complete copy that is free")
    assert story.tree._load["a"] == 1
    assert isinstance(story.stall("d1", 100), Wait), "c1 has just got another source"


def test_stalled_behind_a_silent_one_that_complained_moves_in_the_end():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    story.lag("b1", 0.0, 100)
    story.now = TIMEOUT
    assert isinstance(story.stall("c1", 100), Wait)
    story.now = 2 * TIMEOUT
    assert story.stall("c1", 100).source == "a1"


def test_who_is_silent_is_nobodys_source_until_it_speaks():
    story = Story("a1 b1 c1 d1 e1", holders="a1")
    story.want("b1", "c1")
    story.now = 2 * TIMEOUT + 0.1
    assert story.stall("c1").source == "a1"
    assert story.want("d1") == "c1"  # b1 would be nearer
    assert story.report(Progressed, "b1", 300) == []
    assert story.tree._load["a"] == 2  # it is still fed by the same
    assert story.want("e1") == "b1"


def chain(*, holders="a1", link=100.0):
    """b1, c1, d1 and e1 in a row, on links that carry 100 bytes per second."""
    story = Story("a1 b1 c1 d1 e1 f1", holders=holders, cost=CostModel(link=link))
    assert story.want("b1", "c1", "d1", "e1") == ["a1", "b1", "c1", "d1"]
    return story


def sources(story):
    return {r: transfer.source for r, transfer in story.tree.transfers.items()}


def test_a_slow_one_is_passed_and_ends_as_a_leaf():
    story = chain()
    assert isinstance(story.lag("b1", 10.0), Wait)
    told = story.lag("c1", 10.0)
    assert told.source == "a1" and "past b1, which is slow" in told.reason
    assert story.want("f1") == "e1", "b1 would be nearer"
    assert sources(story) == {"b1": "a1", "c1": "a1", "d1": "c1", "e1": "d1", "f1": "e1"}


def test_who_is_below_moves_with_the_one_that_passes():
    story = chain()
    for receiver in ("e1", "d1"):  # in any order
        assert isinstance(story.lag(receiver, 10.0), Wait)
    assert isinstance(story.lag("c1", 10.0), Wait), "b1 has not complained: it may be c1 itself"
    assert isinstance(story.lag("b1", 10.0), Wait)
    assert isinstance(story.lag("d1", 10.0), Wait)
    assert story.lag("c1", 10.0).source == "a1"
    assert story.report(Progressed, "c1", 10) == []
    assert sources(story) == {"b1": "a1", "c1": "a1", "d1": "c1", "e1": "d1"}


def test_a_slow_one_in_the_middle_is_passed():
    story = chain()
    story.now += TIMEOUT
    assert isinstance(story.lag("c1", 10.0), Wait)
    assert isinstance(story.lag("e1", 10.0), Wait)
    assert story.lag("d1", 10.0).source == "b1"


def test_passing_that_does_not_help_is_undone_and_tried_ever_more_rarely():
    """As when the source's own link carries no more, or others use it too."""
    story = chain()
    for wait in (2, 4, 8):
        story.lag("b1", 10.0)
        assert story.lag("c1", 10.0).source == "a1"
        assert isinstance(story.lag("c1", 5.0), Wait), "connecting takes time"
        story.now += 0.5 * TIMEOUT
        told = story.lag("c1", 5.0)
        assert told.source == "b1" and "did not help" in told.reason
        story.now += (wait - 0.5) * TIMEOUT
        story.lag("b1", 10.0)
        assert isinstance(story.lag("c1", 10.0), Wait)
        assert story.tree._load["a"] == 1
        story.now += TIMEOUT
    assert story.want("f1") == "e1"


def test_passing_that_helps_a_little_is_kept():
    story = chain()
    story.lag("b1", 10.0)
    story.lag("c1", 10.0)
    story.now += 0.5 * TIMEOUT
    assert isinstance(story.lag("c1", 50.0), Wait)
    assert sources(story)["c1"] == "a1"


def test_complaints_that_are_due_at_once_may_come_in_any_order():
    """As at the start, when the looks of all are in step: who is slow may be heard last."""
    story = chain()
    story.now += 0.21 * TIMEOUT
    told = story.lag("d1", 10.0)
    assert isinstance(told, Wait) and told.again == pytest.approx(0.04 * TIMEOUT)
    assert story.lag("e1", 10.0).again == pytest.approx(0.04 * TIMEOUT)
    story.lag("c1", 10.0)
    assert not any(t.slow for t in story.tree.transfers.values())
    story.now += 0.04 * TIMEOUT
    assert story.lag("e1", 10.0).reason == "d1 waits for its own source"
    assert story.lag("d1", 10.0).source == "b1"


def test_a_slow_one_makes_way_for_others_of_its_source():
    story = chain()
    story.now += TIMEOUT
    story.lag("c1", 10.0)
    assert story.lag("d1", 10.0).source == "b1"
    assert isinstance(story.lag("c1", 10.0), Wait), "nobody knows how d1 fares"
    story.now += 0.3 * TIMEOUT
    assert story.lag("c1", 10.0).source == "e1"
    assert isinstance(story.lag("c1", 10.0), Wait)
    assert sources(story) == {"b1": "a1", "d1": "b1", "e1": "d1", "c1": "e1"}


def test_where_nobody_knows_the_link_receivers_are_compared_with_each_other():
    story = chain(link=0.0)
    story.now += 0.2 * TIMEOUT
    for receiver, rate in [("e1", 10.0), ("d1", 10.0), ("b1", 90.0), ("c1", 10.0)]:
        [told] = story.report(Measured, receiver, 0, rate)
        assert isinstance(told, Wait) and told.again and not told.rate, "others may get more"
    story.now += told.again
    for receiver, rate in [("e1", 10.0), ("d1", 10.0), ("b1", 90.0), ("c1", 10.0)]:
        [told] = story.report(Measured, receiver, 0, rate)
        assert told.rate == 90.0
    told = story.lag("d1", 10.0)
    assert told.again, "c1 may be about to complain"
    story.now += told.again
    story.lag("c1", 10.0)
    assert story.lag("d1", 10.0).source == "b1"
    assert story.ask(Wanted("x", "f1", NBYTES)).rate == 90.0


def test_slow_though_its_source_is_not_becomes_a_leaf():
    story = chain()
    story.now += TIMEOUT
    assert isinstance(story.lag("e1", 10.0), Wait)
    assert isinstance(story.lag("e1", 10.0), Wait)
    assert story.want("f1") == "d1"


def test_a_link_that_carries_another_object_too_is_not_slow():
    story = chain()
    [told] = story.handle(Wanted("y", "f1", NBYTES))  # a1 has that, too
    assert told.source == "a1"
    told = story.lag("b1", 40.0)
    assert isinstance(told, Wait) and "other objects" in told.reason
    assert isinstance(story.lag("c1", 40.0), Wait)
    assert sources(story)["c1"] == "b1"
    assert not any(t.slow for t in story.tree.transfers.values())
    # Of its half, this is too little
    assert isinstance(story.lag("b1", 10.0), Wait)
    assert story.lag("c1", 10.0).source == "a1"


def test_nothing_at_all_is_not_slow():
    story = chain()
    assert isinstance(story.lag("b1", 0.0), Wait)
    assert isinstance(story.lag("c1", 0.0), Wait)
    assert not any(t.slow for t in story.tree.transfers.values())
    assert sources(story)["c1"] == "b1"


def test_who_shares_a_source_with_another_goes_where_there_is_room():
    story = chain()
    story.tree.transfers["b1"].rate = 10.0
    story.tree.slow(story.tree.transfers["b1"])
    assert story.want("f1") == "a1"
    story.tree.unslow(story.tree.transfers["b1"])
    told = story.lag("b1", 50.0)
    assert told.source == "f1", "all others are below it"
    assert sources(story) == {"b1": "f1", "c1": "b1", "d1": "c1", "e1": "d1", "f1": "a1"}


def test_the_rate_that_a_link_should_have():
    story = chain()
    assert story.ask(Wanted("x", "f1", NBYTES)).rate == 100.0
    story.join("f2")
    assert story.ask(Wanted("x", "f2", NBYTES)).rate is None, "it comes from its own host"


def test_a_complaint_of_an_epoch_that_is_over():
    story = chain()
    old = story.epochs["c1"]
    story.fail("c1")
    assert story.lag("c1", 10.0, epoch=old).epoch == story.epochs["c1"]


def test_a_source_that_gave_nothing_is_shunned_by_that_receiver():
    story = Story("a1 b1 c1", holders="a1 b1")
    source = story.want("c1")
    other = story.fail("c1").source
    assert {source, other} == {"a1", "b1"}
    story.report(Abandoned, "c1", 0, "enough")
    for _ in range(2):  # also for the next object
        assert story.want("c1") == other
        story.report(Abandoned, "c1", 0, "enough")
    assert story.directory.shunned.keys() == {("c1", source)}
    story.leave(other)
    assert story.want("c1") == source, "if there is nobody else"
    story.finish("c1")
    assert not story.directory.shunned, "it did give something"


def test_shunning_ends_with_time_and_with_another_life():
    for end in ("time", "life"):
        story = Story("a1 b1 c1", holders="a1 b1")
        source = story.want("c1")
        story.fail("c1")
        story.report(Abandoned, "c1", 0, "enough")
        if end == "time":
            story.now += 41 * TIMEOUT
        else:
            story.directory.handle(WorkerLeft(source), story.now)
            story.join(source)
        assert story.want("c1") == source


def test_a_source_that_gave_something_is_not_shunned():
    story = Story("a1 b1 c1", holders="a1 b1")
    story.want("c1")
    story.fail("c1", received=100)
    assert not story.directory.shunned


def test_who_is_silent_is_no_load_to_the_source_that_it_gets_meanwhile():
    story = Story("a1 a2 a3 b1", holders="b1")
    assert story.want("a1", "a2", "a3") == ["b1", "a1", "a2"]
    story.now = 2 * TIMEOUT + 0.1
    story.progress("a1", 100)
    assert story.stall("a3").source == "a1"  # a2 is silent
    assert {told.source for told in story.leave("a1")} == {"b1"}
    assert story.tree._load["b"] == 1
    story.progress("a2", 100)
    assert story.tree._load["b"] == 2
    story.finish("a2")
    story.finish("a3")
    assert not +story.tree._load


def test_stalled_on_a_push_waits_for_who_pushes():
    story = Story("a1 b1", holders="")
    story.ask(Pushed("x", "a1", NBYTES, "client"))
    assert isinstance(story.stall("a1", 10), Wait)


def test_finished_is_a_source_before_dask_knows():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1")
    story.finish("b1", known=False)
    story.known.clear()
    assert story.want("c1") == "b1"


def test_finished_is_no_source_once_dask_knew_and_dropped_it():
    story = Story("a1 b1 c1 d1", holders="a1")
    assert story.want("b1") == "a1"
    story.finish("b1")
    assert story.want("c1") == "a1"
    story.known.pop("b1")
    assert story.want("d1") == "c1"


def test_finished_is_no_source_once_it_failed_somebody():
    story = Story("a1 b1 c1 d1 e1", holders="a1")
    story.want("b1")
    story.finish("b1", known=False)
    assert story.want("c1", "d1") == ["a1", "b1"]
    assert story.fail("d1").source == "c1"
    assert story.want("e1") == "d1"


def test_finished_that_asks_again_has_it_no_more():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1")
    story.finish("b1", known=False)
    assert story.want("b1") == "a1"
    assert story.ask(Wanted("x", "c1", NBYTES)).reason == "the nearest receiver that is free"


def test_a_place_that_is_free_again_is_found():
    story = Story("a1 b1 c1 d1 e1", holders="a1")
    assert story.want("b1", "c1", "d1") == ["a1", "b1", "c1"]
    story.report(Abandoned, "c1", 0, "cancelled")
    told = story.ask(Wanted("x", "e1", NBYTES))
    assert (told.source, told.reason) == ("b1", "the nearest receiver that is free")


def test_children_of_one_who_finished_stay():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    story.finish("b1")
    assert story.tree.transfers["c1"].source == "b1"
    assert story.tree._load["b"] == 1


def test_abandoned_leaves_its_children_to_ask():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    story.report(Abandoned, "b1", 10, "cancelled")
    assert story.tree.transfers["c1"].source == "b1"
    assert story.fail("c1", 5).source == "a1"
    assert story.tree.transfers["c1"].resumed_from == 5


# Workers that come and go


def test_who_leaves_is_replaced():
    story = Story("a1 b1 c1 d1", holders="a1")
    story.want("b1", "c1", "d1")
    [told] = story.leave("b1")
    assert (told.receiver, told.source) == ("c1", "a1")
    assert story.tree.transfers["d1"].source == "c1"  # undisturbed
    assert set(story.tree.transfers) == {"c1", "d1"}


def test_the_last_copy_leaves():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    [told] = story.leave("a1")
    assert told == NoSource("x", "b1", {"a1": "left the cluster"}, "every source failed")
    assert isinstance(story.fail("c1"), NoSource)
    assert story.directory.trees == {}


def test_the_last_copy_of_a_long_chain_leaves():
    """Receivers give up one by one: each time all others must be seen to be below, quickly."""
    workers = [f"{chr(i)}1" for i in range(1000, 3000)]
    story = Story(" ".join(["a1", *workers]), holders="a1")
    story.want(*workers, expected=len(workers))
    seen = []
    eligible = story.tree._eligible
    story.tree._eligible = lambda *args: seen.append(args) or eligible(*args)
    [told] = story.leave("a1")
    assert isinstance(told, NoSource)
    for worker in workers[1:]:
        assert isinstance(story.fail(worker), NoSource)
    assert len(seen) < 10 * len(workers)


def test_who_leaves_and_comes_again_is_a_source_again():
    story = Story("a1 b1 c1", holders="a1 c1")
    story.want("b1")
    [told] = story.leave("a1")
    assert told.source == "c1"
    story.join("a1")
    story.known["a1"] = None
    assert story.fail("b1").source == "a1"


def test_who_left_is_no_source_though_dask_does_not_know():
    story = Story("a1 b1", holders="a1")
    story.leave("a1")
    story.known["a1"] = None
    assert isinstance(story.ask(Wanted("x", "b1", NBYTES)), NoSource)


def test_a_receiver_that_leaves_frees_its_source():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1")
    assert story.leave("b1") == []
    assert story.directory.trees == {}
    assert story.want("c1") == "a1"


def test_one_who_landed_and_leaves_leaves_no_row():
    story = Story("a1 b1", holders="a1")
    story.want("b1")
    story.finish("b1", known=False)
    assert story.directory.trees  # as nobody else knows of b1's copy
    story.leave("b1")
    assert story.directory.trees == {}


def test_load_of_a_receiver_that_is_introduced_late():
    story = Story("a1", holders="a1")
    assert story.want("a2") == "a1"  # from where, nobody knows
    assert story.tree._load["a"] == 1
    story.join("a2")
    story.finish("a2", known=False)
    assert story.tree._load["a"] == 0


# Pushes


def test_a_push_feeds_others():
    story = Story("a1 b1")
    told = story.ask(Pushed("x", "a1", NBYTES, "client"))
    assert told == Pull("x", "a1", "client", 1, "pushed from outside")
    assert story.want("b1") == "a1"


def test_a_push_of_which_the_receiver_does_not_know_yet():
    story = Story("a1 b1 c1")
    story.ask(Pushed("x", "a1", NBYTES, "reduction", ahead=True))
    assert story.ask(Wanted("x", "b1", NBYTES)).early
    story.progress("a1", 10)
    assert not story.ask(Wanted("x", "c1", NBYTES)).early


def test_a_push_that_fails_leaves_nothing():
    story = Story("a1")
    story.ask(Pushed("x", "a1", NBYTES, "client"))
    assert isinstance(story.fail("a1"), NoSource)
    assert story.directory.trees == {}


def test_pushed_again():
    story = Story("a1")
    story.ask(Pushed("x", "a1", NBYTES, "client"))
    story.ask(Pushed("x", "a1", NBYTES, "client"))
    story.progress("a1", 10)
    assert story.tree.transfers["a1"].received == 10
    assert [row["status"] for row in story.directory.log()] == ["begun anew", "running"]


# Releases and rows


def test_release_cancels_all_receivers():
    story = Story("a1 b1 c1", holders="a1")
    story.want("b1", "c1")
    told = story.handle(Released("x"))
    assert {(type(i), i.receiver, i.epoch) for i in told} == {(Cancel, "b1", 1), (Cancel, "c1", 2)}
    assert story.directory.trees == {}
    assert story.handle(Released("x")) == []


def test_rows_do_not_leak():
    story = Story("a1 b1 c1 d1", holders="a1")
    story.want("b1", "c1", "d1")
    for worker in ("d1", "b1", "c1"):
        story.finish(worker, known=False)
    assert set(story.tree.landed) == {"b1", "c1", "d1"}
    story.known.update(dict.fromkeys(("b1", "c1", "d1")))
    story.join("e1")  # whatever happens next
    assert story.directory.trees == {}
    assert [row["status"] for row in story.directory.log()] == ["finished"] * 3


def test_rows_of_copies_that_dask_never_knows_do_not_leak():
    story = Story("a1 b1", holders="a1")
    story.want("b1")
    story.finish("b1", known=False)
    story.now = 20 * TIMEOUT
    story.join("c1")
    assert story.directory.trees == {}


def test_log_and_bytes():
    story = Story("a1 b1 c1", holders="a1")
    story.now = 10.0
    story.want("b1", "c1")
    story.now = 11.0
    story.progress("b1", 700)
    story.progress("c1", 600)
    story.leave("b1")
    story.now = 12.0
    story.finish("c1")
    directory = story.directory
    assert directory.bytes_in == {"b1": 700, "c1": NBYTES}
    assert directory.bytes_out == {"a1": 700 + NBYTES - 600, "b1": 600}
    lost, gone, done = directory.log()
    assert (lost["status"], gone["status"], done["status"]) == (
        "source left",
        "receiver left",
        "finished",
    )
    assert (done["source"], done["resumed_from"], done["path"]) == ("a1", 600, "tcp")
    assert (done["start"], done["stop"]) == (11.0, 12.0)


def test_rows_are_the_callers():
    story = Story("a1 b1", holders="a1")
    story.want("b1")
    story.finish("b1")
    for row in story.directory.log():
        row["start"] += 1
    assert [row["start"] for row in story.directory.log()] == [0.0]


def test_an_orphan_that_is_given_a_source_before_it_asks_goes_on_where_it_is():
    story = Story("a1 b1 c1 d1", holders="a1")
    story.want("b1", "c1")
    old = story.epochs["c1"]
    story.leave("b1")  # which the directory hears of before c1 says how far it is
    story.fail("c1", received=700, epoch=old)
    story.finish("c1")
    directory = story.directory
    assert directory.bytes_in["c1"] == NBYTES
    assert directory.bytes_out == {"a1": NBYTES - 700}
    lost, _, done = directory.log()
    assert (lost["source"], lost["received"], lost["status"]) == ("b1", 700, "source left")
    assert (done["source"], done["resumed_from"], done["received"]) == ("a1", 700, NBYTES)


def test_the_time_to_the_first_byte_is_known_of_a_first_source():
    story = Story("a1 b1 c1", holders="a1 c1")
    story.want("b1")
    story.leave("a1")
    story.finish("b1", latency=-1.0)  # of one that it asked before
    story.join("a1")
    story.want("a1")
    story.finish("a1", latency=0.25)
    known = {row["receiver"]: row["latency"] for row in story.directory.log()}
    assert known == {"b1": None, "a1": 0.25}


def test_not_an_event():
    with pytest.raises(TypeError, match="not an event"):
        Story("a1").handle("x")


# The cost model


@pytest.mark.parametrize(
    ("nbytes", "receivers", "fan_out"),
    [
        (2**16, 4, 4),
        (2**16, 1000, 4),
        (2**20, 4, 1),
        (2**20, 1000, 2),
        (2**30, 4, 1),
        (2**30, 1000, 1),
    ],
)
def test_fan_out(nbytes, receivers, fan_out):
    assert CostModel(latency=0.002, bandwidth=1e8).fan_out(nbytes, receivers) == fan_out


@pytest.mark.parametrize("nbytes", [2**16, 2**20, 2**30])
@pytest.mark.parametrize("receivers", [1, 2, 16, 1024])
def test_fan_out_is_the_fastest(nbytes, receivers):
    cost = CostModel(latency=1e-4, bandwidth=1.25e9)
    best = cost.seconds(nbytes, receivers, cost.fan_out(nbytes, receivers))
    widths = [2**i for i in range(11) if 2**i <= receivers]
    assert best <= min(cost.seconds(nbytes, receivers, width) for width in widths)


def test_depth_in_the_cost_model():
    cost = CostModel(latency=1.0, bandwidth=1.0)
    assert cost.seconds(0, 5, 1) == 5  # a chain
    assert cost.seconds(0, 5, 5) == 1  # a star
    assert cost.seconds(0, 2, 2) == 1
    assert cost.seconds(0, 6, 2) == 2  # 2 + 4
    assert cost.seconds(0, 7, 2) == 3
    assert cost.seconds(10, 6, 2) == 22


def test_learning():
    cost = CostModel(latency=1.0, bandwidth=100.0, weight=0.125)
    cost.learn(latency=0.0, nbytes=1000, seconds=2.0)
    assert cost.latency == pytest.approx(0.5, rel=1e-5)
    assert cost.bandwidth == 100.0  # it was over too soon to say
    cost.learn(latency=0.5, nbytes=9000, seconds=10.0)
    assert cost.bandwidth == 200.0
    cost.learn(latency=8.5, nbytes=1, seconds=1.0)
    assert cost.latency == pytest.approx(0.75, rel=1e-5)  # a high sample counts for less


def test_learning_what_a_link_carries():
    cost = CostModel(latency=1.0)
    cost.learn(latency=1.0, nbytes=1000, seconds=0.02)
    cost.learn(latency=1.0, nbytes=2**22, seconds=0.001)
    assert cost.link == 0, "too little, or too soon"
    cost.learn(latency=1.0, nbytes=2**22, seconds=0.5)
    assert cost.link == 2**23
    cost.learn(latency=1.0, nbytes=2**22, seconds=1.0)
    assert 0.9 * 2**23 < cost.link < 2**23, "one that was disturbed says little"
    assert cost.bandwidth == CostModel().bandwidth


def test_hops_within_a_host_say_nothing_about_the_network():
    cost = CostModel(latency=1.0, bandwidth=100.0)
    story = Story("a1 a2 b1", holders="a1", cost=cost)
    assert story.want("a2") == "a1"
    story.finish("a2", latency=1e-5, seconds=20.0)
    assert (cost.latency, cost.bandwidth) == (1.0, 100.0)
    assert story.want("b1") in ("a1", "a2")
    story.finish("b1", latency=1e-5, seconds=20.0)
    assert cost.latency < 1.0 < 100.0 < cost.bandwidth


def test_a_hop_far_down_counts_for_one():
    cost = CostModel(latency=1.0, bandwidth=100.0, weight=1.0)
    story = Story("a1 b1 c1", holders="a1", cost=cost)
    story.want("b1", "c1")
    assert story.tree.transfers["c1"].depth in (1, 2)
    depth = story.tree.transfers["c1"].depth
    story.finish("c1", latency=0.5, seconds=20.0)
    assert cost.latency == 0.5 / depth


def test_a_source_that_was_decided_for_ahead_may_not_know_yet():
    story = Story("a1 b1 c1 d1", holders="a1")
    first = story.ask(Wanted("x", "b1", NBYTES, ahead=True))
    second = story.ask(Wanted("x", "c1", NBYTES, ahead=True))
    assert (first.source, first.early) == ("a1", False)
    assert (second.source, second.early) == ("b1", True)
    story.progress("c1", 10)
    assert not story.ask(Wanted("x", "d1", NBYTES)).early, "c1 has shown that it knows"


def test_a_source_that_did_not_begin_is_offered_to_nobody_else():
    story = Story("a1 b1 c1 d1", holders="a1")
    story.ask(Wanted("x", "b1", NBYTES, ahead=True))
    assert story.want("c1") == "b1"
    assert story.fail("c1").source == "a1"
    assert "b1" not in story.tree.transfers
    assert story.want("d1") == "c1"
    assert story.want("b1") == "d1", "it may still ask"


def test_what_was_decided_ahead_and_is_not_needed_is_forgotten():
    story = Story("a1 b1", holders="a1")
    story.ask(Wanted("x", "b1", NBYTES, ahead=True))
    assert story.directory.receives("b1")
    story.handle(Declined("x", "b1", story.epochs["b1"]))
    assert not story.directory.receives("b1")
    assert not story.directory.trees


def test_declining_does_not_end_what_was_asked_for_since():
    story = Story("a1 b1", holders="a1")
    ahead = story.ask(Wanted("x", "b1", NBYTES, ahead=True))
    story.want("b1")
    story.handle(Declined("x", "b1", ahead.epoch))
    assert story.directory.receives("b1")
