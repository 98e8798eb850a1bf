"""Reports, progress bars, and what ``status()`` and ``transfers()`` look like."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import re
import signal
from html.parser import HTMLParser

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.client import FutureCancelledError
from distributed.utils_test import gen_cluster, gen_test
from hypothesis import given
from hypothesis import strategies as st

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, NotInstalledError, ReportError
from dask_hoplite.reporting import chart
from dask_hoplite.reporting.chart import Box, Link, Span
from dask_hoplite.reporting.page import Names, verdict
from dask_hoplite.reporting.story import tell
from dask_hoplite.representations import Status, Transfers
from tests.helpers import array, first_blocks, hoplite_cluster, hosted, plugin, until

# The story of an object


def row(source, receiver, start, stop, first=0, received=100, status="finished", **more):
    """One of ``transfers()``, of an object of 100 bytes."""
    return {
        "key": "x",
        "source": source,
        "receiver": receiver,
        "nbytes": 100,
        "received": received,
        "resumed_from": first,
        "start": start,
        "stop": stop,
        "latency": None,
        "status": status,
        "path": "tcp stream",
        "reason": "a reason",
        **more,
    }


ORPHAN = [
    row("a", "b", 0.0, 4.0, received=30, status="receiver left"),
    row("b", "c", 0.0, 4.0, received=40, status="source left"),
    row("a", "c", 4.0, 10.0, first=40),
]


def test_an_orphan_goes_on_elsewhere():
    story = tell(ORPHAN, 10.0)
    [b, c] = story.arrivals
    assert (b.status, c.status) == ("receiver left", "finished")
    [takeover] = story.takeovers
    assert (takeover.receiver, takeover.old, takeover.new) == ("c", "b", "a")
    assert (takeover.byte, takeover.at, takeover.why) == (40, 4.0, "source left")
    assert [(piece.first, piece.end) for piece in c.pieces] == [(0, 40), (40, 100)]
    assert story.last is c and story.seconds == 10.0


def test_what_is_running_and_what_nobody_has():
    story = tell([row("a", "b", 1.0, None, received=20, status="running")], 3.0)
    assert story.seconds == 2.0 and story.last is None and not story.shares
    assert verdict(story, Names({})) == "Nobody has got all of it yet."
    lost = [
        row("a", "b", 0.0, 1.0, received=20, status="source left"),
        row(None, "b", 0.0, 1.0, received=20, status="every source failed"),
    ]
    [b] = tell(lost, 1.0).arrivals
    assert b.status == "every source failed" and len(b.pieces) == 1
    with pytest.raises(ValueError, match="nothing has moved"):
        tell(lost[1:], 1.0)


def test_one_that_gets_it_twice_or_starts_again():
    again = [row("a", "b", 0.0, 1.0), row("a", "b", 1.0, 2.0)]
    assert len(tell(again, 2.0).arrivals) == 2
    anew = [
        row("a", "b", 0.0, 1.0, received=60, status="asked again"),
        row("c", "b", 1.0, 2.0, first=0),
    ]
    [b] = tell(anew, 2.0).arrivals
    assert [(piece.first, piece.end, piece.moved) for piece in b.pieces] == [
        (0, 0, 60),
        (0, 100, 100),
    ]


def bound(rows):
    story = tell(rows, 0.0)
    return {share.name: pytest.approx(share.seconds) for share in story.shares}, story


def test_what_bounded_the_time():
    names = Names({})
    chain = [row("a", "b", 0.0, 10.0), row("b", "c", 0.0, 10.0, latency=0.5)]
    shares, story = bound([*chain, row("c", "d", 0.0, 10.5, latency=1.0)])
    assert shares["first byte"] == 1.0 and shares["slow"] == 0.0
    assert verdict(story, names).startswith("The time is that of the bytes on a link")
    shares, story = bound([*chain, row("b", "e", 0.0, 40.0)])
    assert (shares["moving"], shares["slow"]) == (10.0, 30.0)
    assert "b → e carried 2 B/s, 25 % of the median" in verdict(story, names)
    shares, story = bound([*chain, row("b", "e", 30.0, 40.0)])
    assert shares["late"] == 30.0 and "asked for it" in verdict(story, names)
    shares, story = bound([*chain, row("b", "e", 0.0, 40.0, latency=30.0)])
    assert shares["first byte"] == 30.0 and "its first byte" in verdict(story, names)
    frozen = row("b", "e", 0.0, 35.0, received=50, status="sent nothing")
    shares, story = bound([*chain, frozen, row("a", "e", 35.0, 40.0, first=50)])
    assert shares["given up"] == 30.0 and "given up" in verdict(story, names)


def test_the_bottleneck_is_the_first_slow_link_on_the_way():
    quick = [row("a", f"q{i}", 0.0, 1.0) for i in range(5)]
    slow = [row("a", "b", 0.0, 1.0), row("b", "c", 0.0, 9.8), row("c", "d", 0.0, 10.0)]
    story = tell([*quick, *slow], 10.0)
    assert story.bottleneck[0].receiver == "c"


@st.composite
def histories(draw):
    """Receivers whose sources are replaced, one after the other, with pauses in which they ask."""
    rows = []
    for number in range(draw(st.integers(1, 4))):
        at = draw(st.floats(0, 10))
        byte = 0
        marks = sorted(draw(st.lists(st.integers(0, 100), max_size=4)))
        for mark in [*marks, 100]:
            stop = at + draw(st.floats(0, 5))
            status = "finished" if mark == 100 else "source left"
            latency = draw(st.none() | st.floats(0, 6))
            source = draw(st.sampled_from(["a", "w0", "w1", "w2", "w3"]))
            rows.append(row(source, f"w{number}", at, stop, byte, mark, status, latency=latency))
            if mark == 100:
                break
            at, byte = stop, mark
    return draw(st.permutations(rows))


@given(histories())
def test_pieces_cover_the_object_and_shares_the_time(rows):
    story = tell(rows, 100.0)
    for arrival in story.arrivals:
        assert arrival.status == "finished"
        ends = [0, *(piece.end for piece in arrival.pieces)]
        assert [piece.first for piece in arrival.pieces] == ends[:-1] and ends[-1] == 100
    assert all(share.seconds >= 0 for share in story.shares)
    total = sum(share.seconds for share in story.shares)
    assert total == pytest.approx(story.last.stop - story.begin)


# Pictures


@pytest.mark.parametrize("children", [1, 2, 3, 200])
def test_a_tree_of_200_fits_a_page_without_overlaps(children):
    boxes = [Box(str(i), f"w{i}", "1.23 s", "good", "") for i in range(201)]
    links = [Link(str((i - 1) // children), str(i)) for i in range(1, 201)]
    picture = chart.tree(boxes, links, [Link("7", "3", "bad"), Link("7", "nobody")])
    places = {(box.x, box.y) for box in picture.boxes}
    assert len(places) == 201 and len(picture.edges) == 201
    assert all(0 <= box.x and box.x + box.wide <= picture.wide for box in picture.boxes)
    assert all(0 <= box.y and box.y + box.high <= picture.high for box in picture.boxes)
    lines = {box.y for box in picture.boxes}
    assert len(lines) < 30 or children in (2, 3)


def test_a_circle_is_no_tree_but_can_be_drawn():
    boxes = [Box(name, name, "", "good", "") for name in "abc"]
    circle = [Link("a", "b"), Link("b", "c"), Link("c", "a")]
    assert len(chart.tree(boxes, circle).edges) == 3


def test_ticks_are_round_and_bars_within_the_page():
    for seconds in (0.0, 0.00123, 0.8, 7.0, 86_400.0):
        spans = [Span("a → b", "a note", "good", "", 0.0, seconds)]
        time = chart.timeline(spans, seconds)
        assert 1 <= len(time.ticks) <= 11
        assert time.bars[0].x + time.bars[0].wide <= time.wide + 2


# The page


class Page(HTMLParser):
    """A report, as somebody sees it."""

    def __init__(self, path):
        super().__init__()
        self.text = path if path.startswith("<") else open(path, encoding="utf-8").read()
        self.kinds, self.words, self.open = [], [], []
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.kinds.append((tag, dict(attributes).get("class")))

    def handle_endtag(self, tag):
        while self.open.pop() != tag:  # some need no end
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data.strip())

    def count(self, tag, kind):
        return self.kinds.count((tag, kind))


def serve_half(key, dask_worker):
    """Let the next one who asks for an object get only the first half of it, and wait for ever."""
    plain = dask_worker.handlers["hoplite_pull"]

    async def serve(comm, **request):
        if request["key"] != key:
            return await plain(comm, **request)
        dask_worker.handlers["hoplite_pull"] = plain
        async with dask_worker.plugins["hoplite"].shelf.reading(key) as buffer:
            half = first_blocks(buffer, buffer.nbytes // 2)
            await comm.write({"status": "OK", "offset": 0, **buffer.layout.to_message()})
            await comm.stream.write(half)
            return await comm.read()

    dask_worker.handlers["hoplite_pull"] = serve


async def have_half(key, receivers, dask_worker):
    """Wait until half of an object is here, if it is on its way here."""
    incoming = dask_worker.plugins["hoplite"].puller.incoming
    if dask_worker.address in receivers:
        await until(lambda: key in incoming and incoming[key].received >= incoming[key].nbytes // 2)
        return incoming[key].received
    return None


@gen_test(timeout=90)
async def test_a_killed_worker_is_in_the_picture(tmp_path):
    with dask.config.set({"hoplite.shared-memory": False, "hoplite.stall-timeout": "20s"}):
        async with (
            LocalCluster(
                n_workers=4, threads_per_worker=1, asynchronous=True, dashboard_address=None
            ) as cluster,
            Client(cluster, asynchronous=True) as c,
        ):
            await c.register_plugin(Hoplite())
            s = cluster.scheduler
            pids = await c.run(os.getpid)
            home, *others = pids
            x = hosted(c, 8 * 2**20, worker=home)
            await wait(x)
            await c.run(serve_half, x.key, workers=[home])
            coming = c.loop.asyncio_loop.create_task(hoplite.broadcast(x, client=c))
            trees = plugin(s).directory.trees
            await until(lambda: x.key in trees and len(trees[x.key].transfers) == 3)
            tree = {r: t.source for r, t in trees[x.key].transfers.items()}
            [killed] = (receiver for receiver, source in tree.items() if source == home)
            [orphan] = (receiver for receiver, source in tree.items() if source == killed)
            there = await c.run(have_half, x.key, others)
            name = s.workers[killed].name
            os.kill(pids[killed], signal.SIGKILL)
            await coming
            path = await hoplite.report(x, tmp_path / "page.html", client=c)
            took_over = next(
                row
                for row in await hoplite.transfers(client=c)
                if row["receiver"] == orphan and row["resumed_from"]
            )
    assert took_over["resumed_from"] == there[orphan] == 4 * 2**20
    assert took_over["source"] != killed
    page = Page(path)
    new = took_over["source"].rpartition("/")[2]
    sentence = next(word for word in page.words if "went on at byte" in word)
    assert "went on at byte 4,194,304 of 8,388,608 (50 %)" in sentence
    assert re.search(rf"with \d \({new}\) in place of {name} \({killed[6:]}\) \[left\]", sentence)
    # The picture: the orphan, and the line from its new source; the dead, and the line from there.
    assert page.count("g", "box new") == 1 and "at 4.00 MiB" in page.words
    assert page.count("path", "edge new") == 1
    assert page.count("g", "box bad") == 1 and page.count("path", "edge bad") == 2
    title = f"({orphan[6:]}): a complete copy that is free"
    assert any(title in word or "on the same host" in word for word in page.words)
    assert any(word.startswith("from 4.00 MiB on, ") for word in page.words), "over time"
    assert page.count("path", "arrow") == 1
    assert "http" not in page.text.replace("http-equiv", "") and "<script" not in page.text
