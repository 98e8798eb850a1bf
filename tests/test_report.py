"""Reports, progress bars, and what ``status()`` and ``transfers()`` look like."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import os
import pathlib
import pickle
import re
import signal
import sys
import tempfile
from html.parser import HTMLParser

import numpy as np
import pytest
from distributed import Client, LocalCluster, Nanny, wait
from distributed.client import FutureCancelledError
from hypothesis import given
from hypothesis import strategies as st

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, NotInstalledError, ReportError
from dask_hoplite.collectives.account import REMEMBERED
from dask_hoplite.report import page as report_page
from dask_hoplite.reporting import chart
from dask_hoplite.reporting.chart import Box, Link, Span
from dask_hoplite.reporting.page import Names, transfers, verdict
from dask_hoplite.reporting.representations import Status, Transfers
from dask_hoplite.reporting.story import tell
from tests.helpers import array, hoplite_cluster, hosted, plugin, until

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


@pytest.mark.parametrize(
    "rows",
    [
        [row("a", "b", 0.0, None, received=20, status="running")],
        [row("a", "b", 0.0, 1.0, received=20, status="source left")],
        [row("a", "b", 0.0, 1.0, latency=1.0)],  # all of it came at once
        [row("a", "b", 0.0, 0.0)],
        [row("a", "b", 0.0, 1.0, nbytes=0, received=0)],
    ],
)
def test_what_has_no_end_or_no_rate_is_shown_too(rows):
    """Nobody has finished, or no time has passed in which bytes came."""
    known = {"state": "memory", "nbytes": 100, "min_size": 1, "holders": ["a"]}
    told = {"key": "x", "rows": rows, "reductions": [], **known}
    seen = Page(report_page({"now": 2.0, "workers": {}, "objects": [told]}))
    assert seen.count("g", "box root") == 1


def test_who_had_all_of_it_and_left_is_shown_as_gone():
    rows = [row("tcp://a:1", "tcp://b:1", 0.0, 1.0), row("tcp://b:1", "tcp://c:1", 0.0, 1.0)]
    there = {f"tcp://{name}:1": {"name": name, "there": name != "b"} for name in "abc"}
    boxes = transfers(tell(rows, 1.0), Names(there))["tree"].boxes
    assert {box.label: (box.kind, box.note) for box in boxes} == {
        "a": ("root", ""),
        "b": ("bad", "1.00 s, left"),
        "c": ("good", "1.00 s"),
    }


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
    return rows


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
    assert all(box.x >= 0 and box.x + box.wide <= picture.wide for box in picture.boxes)
    assert all(box.y >= 0 and box.y + box.high <= picture.high for box in picture.boxes)
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

    def __init__(self, text):
        super().__init__()
        self.text = text
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


def on_workers():
    """What a test lets processes do. They get its code, and need not import this module for it."""

    def serve_half(key, dask_worker):
        """Let the next one who asks for an object get the first half only, and wait for ever."""
        from dask_hoplite.transfer.wire import Wire

        plain = dask_worker.handlers["hoplite_pull"]

        async def serve(comm, **request):
            if request["key"] != key:
                return await plain(comm, **request)
            dask_worker.handlers["hoplite_pull"] = plain
            async with dask_worker.plugins["hoplite"].shelf.reading(key) as buffer:
                wire = Wire(buffer)
                half = b"".join(wire.sealed(0, wire.position(buffer.nbytes // 2)))
                await comm.write({"status": "OK", "offset": 0, **buffer.layout.to_message()})
                await comm.stream.write(half)
                return await comm.read()

        dask_worker.handlers["hoplite_pull"] = serve

    def received(key, dask_worker):
        """Bytes that are here of an object that is on its way here."""
        incoming = dask_worker.plugins["hoplite"].puller.incoming.get(key)
        return incoming and incoming.received

    return serve_half, received


@hoplite_cluster(
    Worker=Nanny, config={"hoplite.shared-memory": False, "hoplite.stall-timeout": "20s"}
)
async def test_a_killed_worker_is_in_the_picture(c, s, *nannies):
    await c.register_plugin(Hoplite())
    pids = await c.run(os.getpid)
    home, *others = pids
    x = c.submit(np.ones, 2**20, workers=[home])
    await wait(x)
    serve_half, received = on_workers()
    await c.run(serve_half, x.key, workers=[home])
    coming = asyncio.create_task(hoplite.broadcast(x, client=c))
    trees = plugin(s).directory.trees
    await until(lambda: x.key in trees and len(trees[x.key].transfers) == 3)
    tree = {r: t.source for r, t in trees[x.key].transfers.items()}
    [killed] = (receiver for receiver, source in tree.items() if source == home)
    [orphan] = (receiver for receiver, source in tree.items() if source == killed)
    there = {}
    while set(there.values()) != {4 * 2**20}:  # a question takes as long as it takes
        there = await c.run(received, x.key, workers=others)
    name = s.workers[killed].name
    os.kill(pids[killed], signal.SIGKILL)
    await coming
    page = Page(await written(x, c))
    took_over = next(
        row
        for row in await hoplite.transfers(client=c)
        if row["receiver"] == orphan and row["resumed_from"]
    )
    await until(lambda: killed not in s.workers and len(s.workers) == 4, 20)  # its nanny's part
    assert took_over["resumed_from"] == there[orphan] == 4 * 2**20
    assert took_over["source"] != killed
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


@hoplite_cluster()
async def test_report_of_a_broadcast_and_a_reduction(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = [hosted(c, worker=w.address, seed=i) for i, w in enumerate(workers)]
    total = await hoplite.allreduce(operands, client=c)
    x = await hoplite.broadcast(hosted(c, worker=workers[0].address), client=c)
    await wait(total)
    await until(lambda: plugin(s).reductions.accounts(total.key)[-1]["status"] == "finished")
    (told,) = (await c.scheduler.hoplite_report(keys=[total.key]))["objects"]
    (account,) = told["reductions"]
    assert (account["operands"], account["contributors"]) == (4, 4)
    assert {one["worker"] for one in account["sums"]} == {w.address for w in workers}
    assert account["start"] <= min(one["start"] for one in account["sums"])
    both = Page(await written([total, x], c))
    assert both.kinds.count(("section", None)) == 2 and total.key in both.words
    assert any("4 of 4" in word for word in both.words)
    key = x.key
    del x
    await until(lambda: key not in s.tasks)
    assert key in Page(await written(key, c)).words, "released, but remembered"


async def written(futures, client):
    """The page, which leaves no file behind that would have to be removed."""
    with tempfile.TemporaryDirectory() as folder:
        path = await hoplite.report(futures, pathlib.Path(folder) / "page.html", client=client)
        return pathlib.Path(path).read_text(encoding="utf-8")


@hoplite_cluster()
async def test_a_reduction_whose_worker_leaves(c, s, *workers):
    await c.register_plugin(Hoplite(stall_timeout="60s"))  # no other sums before one has left
    operands = [
        c.submit(array, 100_000, i, workers=[w.address], allow_other_workers=True, pure=False)
        for i, w in enumerate(workers)
    ]
    await wait(operands)
    for worker in workers:
        worker.handlers["hoplite_pull"] = never
    total = await hoplite.reduce(operands, root=workers[3].address, client=c)
    key = total.key

    def sums():
        accounts = plugin(s).reductions.accounts(key)
        return accounts[-1]["sums"] if accounts else []

    await until(lambda: len(sums()) == 4)
    page = Page(await written(total, c))
    assert page.count("g", "box run") >= 3, "as far as it is: the one that takes from none may be"
    await workers[0].close()
    await until(lambda: any("given up" in one["status"] for one in sums()))
    page = Page(await written(total, c))
    assert page.count("g", "box bad") >= 1
    del total
    await until(lambda: plugin(s).reductions.accounts(key)[-1]["status"] == "released")
    assert "Reduction: released" in Page(await written(key, c)).words


async def never(**request):
    await asyncio.Event().wait()


@hoplite_cluster()
async def test_only_the_last_reductions_are_remembered(c, s, *workers):
    await c.register_plugin(Hoplite())
    reductions = plugin(s).reductions
    assert reductions.ended.maxlen == REMEMBERED
    reductions.ended.extend({"key": "other"} for _ in range(REMEMBERED))
    total = await hoplite.reduce([hosted(c), hosted(c, seed=1)], client=c)
    await wait(total)
    await until(lambda: reductions.accounts(total.key))
    assert len(reductions.ended) == REMEMBERED


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_cannot_be_reported(c, s, *workers):
    with pytest.raises(NotInstalledError, match="register_plugin"):
        await hoplite.report("x", client=c)
    with pytest.raises(NotInstalledError, match="register_plugin"):
        await hoplite.progress(c.submit(int), notebook=False, client=c)
    await c.register_plugin(Hoplite())
    with pytest.raises(ReportError, match=r"'x': .* Dask does not know this key") as caught:
        await hoplite.report("x", client=c)
    assert caught.value.key == "x" and isinstance(caught.value, ValueError)
    small = c.submit(int)
    with pytest.raises(ReportError, match=r"below hoplite.min-size \(0.98 kiB\)"):
        await wait(small) and await hoplite.report(small, client=c)
    one = hosted(c)
    with pytest.raises(ReportError, match=r"on 1 worker\(s\), and no transfer"):
        await wait(one) and await hoplite.report(one, client=c)
    later = c.submit(int, workers=["127.0.0.1:1"], key="later")
    await until(lambda: "later" in s.tasks)
    with pytest.raises(ReportError, match="in state 'no-worker'"):
        await hoplite.report(later, client=c)
    await c.replicate(one)
    await until(lambda: plugin(s).directory.ended)
    with pytest.raises(OSError, match=r"/nowhere/page\.html"):
        await hoplite.report(one, "/nowhere/page.html", client=c)
    for wrong in (None, [], 1.5j, object()):
        with pytest.raises(TypeError, match="of futures or of a key, not of a"):
            hoplite.report(wrong, client=c)
    with pytest.raises(TypeError, match="there is none in a list"):
        hoplite.progress(["x"], client=c)


# Progress


def shown(bar):
    """What a text bar wrote, without what it wrote over."""
    return bar.getvalue().rpartition("\r")[2]


@hoplite_cluster()
async def test_progress_in_a_terminal(c, s, *workers):
    await c.register_plugin(Hoplite())
    for worker in workers[1:]:
        worker.handlers["hoplite_acquire"], worker.plain = held, worker.handlers["hoplite_acquire"]
    x = hosted(c, worker=workers[0].address)
    await wait(x)
    gate.clear()
    coming = asyncio.create_task(hoplite.broadcast(x, client=c))
    await until(lambda: len(plugin(s).directory.trees) == 1)
    told = await c.scheduler.hoplite_progress(keys=[x.key])
    assert (told["status"], told["copies"], told["wanted"]) == ("running", 1, 4)
    assert (told["all"], told["remaining"]) == (400_000, 300_000)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        drawing = asyncio.create_task(
            hoplite.progress(x, notebook=False, client=c, interval="10ms")
        )
        await until(lambda: "1 of 4 copies" in out.getvalue())
        assert not drawing.done()
        for worker in workers[1:]:
            worker.handlers["hoplite_acquire"] = worker.plain
        gate.set()
        await coming
        await drawing
    line = shown(out)
    assert re.search(r"\[#{40}\] \| 100% \| 390.62 kiB of 390.62 kiB \| 4 of 4 copies \| ", line)
    assert line.endswith("\n") and "25%" in out.getvalue()


gate = asyncio.Event()


async def held(comm, **request):
    """In place of what lets a worker acquire something: not yet."""
    await gate.wait()
    return {"status": "partial-fail", "keys": [], "reasons": {}}


@hoplite_cluster()
async def test_progress_ends_when_there_will_be_no_more(c, s, *workers):
    await c.register_plugin(Hoplite())
    failed = c.submit(lambda: 1 / 0)
    await wait(failed)
    waiting, other = c.map(int, [0, 1], workers=["127.0.0.1:1"])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        await hoplite.progress([failed, waiting], notebook=False, client=c)
        assert "failed: " in shown(out) and "ZeroDivisionError" in shown(out)
        drawing = asyncio.create_task(hoplite.progress(waiting, notebook=False, client=c))
        await until(lambda: "1 not made yet" in out.getvalue())
        await waiting.cancel()
        await drawing
        assert f"{waiting.key!r} was " in shown(out)
        drawing = asyncio.create_task(hoplite.progress(other, notebook=False, client=c))
        await until(lambda: shown(out).endswith("s") or drawing.done())
        del other
        await drawing
        assert "was released" in shown(out)
        with pytest.raises(FutureCancelledError):
            hoplite.progress(waiting, notebook=False, client=c)


def test_progress_in_a_notebook_and_with_a_synchronous_client(loop, monkeypatch):
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            protocol="tcp",
            dashboard_address=None,
            loop=loop,
        ) as cluster,
        Client(cluster, loop=loop) as client,
    ):
        client.register_plugin(Hoplite(min_size=1000))
        x = hoplite.broadcast(client.submit(array))
        bar = hoplite.progress(x, notebook=True)
        client.sync(bar.listen)
        assert bar.bar.value == 1 and bar.bar.bar_style == "success"
        assert "2 of 2 copies" in bar.bar_text.value and "Finished" in bar.elapsed_time.value
        failed = client.submit(lambda: 1 / 0)
        wait(failed)
        bar = hoplite.progress(failed, notebook=True)
        client.sync(bar.listen)
        assert bar.bar.bar_style == "danger" and "ZeroDivisionError" in bar.elapsed_time.value
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert hoplite.progress(x, notebook=True) is None
        assert "2 of 2 copies" in shown(out)


# What people see of status() and transfers()


def test_rows_are_shown_as_a_table():
    rows = Transfers(ORPHAN)
    assert rows == ORPHAN and isinstance(rows, list)
    assert pickle.loads(pickle.dumps(rows)) == copy.copy(rows) == ORPHAN
    lines = repr(rows).splitlines()
    assert lines[0] == "3 transfers" and lines[1].split()[:3] == ["key", "source", "receiver"]
    assert lines[4].split()[:4] == ["x", "a", "c", "100"]
    assert Page(rows._repr_html_()).kinds.count(("tr", None)) == 4
    assert repr(Transfers()) == "0 transfers" and Transfers()._repr_html_() == "<p>0 transfers</p>"
    evil = Transfers([row("<b>", "c", 0.0, None, status="running", key=("<i>", 0))])
    assert "<b>" not in evil._repr_html_() and "<i>" not in evil._repr_html_()


@hoplite_cluster()
async def test_status_is_shown_as_tables(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=workers[0].address)
    await hoplite.broadcast(x, client=c)
    await until(lambda: len(plugin(s).directory.ended) == 3)
    status = await hoplite.status(client=c)
    assert type(status) is Status and status == dict(status)
    assert status["workers"].keys() == {w.address for w in workers}
    assert f"Hoplite {hoplite.__version__}: 4 workers" in repr(status)
    assert "97.66 kiB" in repr(status) and "0 objects moving" in repr(status)
    assert Page(status._repr_html_()).kinds.count(("tr", None)) == 5
    rows = await hoplite.transfers(client=c)
    assert type(rows) is Transfers and len(rows) == 3
    assert all(row["latency"] >= 0 for row in rows)
    tree = {"source": "a", "received": 10, "reason": "free"}
    moving = Status(objects={"x": {"nbytes": 20, "holders": ["a"], "tree": {"b": tree}}})
    assert "1 object moving" in repr(moving) and "10 B of 20 B" in repr(moving)
