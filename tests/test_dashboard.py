"""The page in the dashboard: what is drawn, where it is, and that it moves."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import re
from types import SimpleNamespace
from urllib.request import urlopen

import dask
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.dashboard.scheduler import template_variables
from distributed.utils_test import captured_logger, gen_test
from tornado.websocket import websocket_connect

import dask_hoplite as hoplite
from benchmarks.browser import browser, text, why_not
from benchmarks.dashboard import slow_links
from dask_hoplite import Hoplite
from dask_hoplite.core.directory import Directory
from dask_hoplite.core.events import (
    Combined,
    Combining,
    Finished,
    Progressed,
    Ready,
    Rooted,
    SourceFailed,
    Wanted,
    WorkerJoined,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Combine, Pull
from dask_hoplite.core.reduction import Reduction
from dask_hoplite.core.wishes import Wishes
from dask_hoplite.dashboard.drawing import (
    COLORS,
    MOVED,
    NAMED,
    ROWS,
    WIDTH,
    Drawing,
    Forest,
    edge,
    listed,
    short,
    shortened,
)
from dask_hoplite.dashboard.picture import LINGER, Cell, Observer, Picture, Sketch
from tests.helpers import array, hosted, until

MB = 10**6

#: So much goes along a chain
NBYTES = 1000 * MB


class Stage:
    """A directory and reductions as an observer sees them, without Dask.

    The first worker holds all objects.
    """

    def __init__(self, *workers):
        self.now = 100.0
        self.whole = {workers[0]}
        self.directory = Directory(self.holders)
        self.reductions = SimpleNamespace(runs={}, contributors={}, size=lambda run: NBYTES)
        self.wishes = Wishes()
        self.epochs = {}
        self.observer = Observer()
        for worker in workers:
            self.handle(WorkerJoined(worker, f"host of {worker}"))

    def holders(self, key):
        return self.whole

    def handle(self, event):
        for told in self.directory.handle(event, self.now):
            if isinstance(told, Pull):
                self.epochs[told.receiver] = told.epoch

    def want(self, *receivers):
        for receiver in receivers:
            self.handle(Wanted("x", receiver, NBYTES))

    def report(self, kind, receiver, *details):
        self.handle(kind("x", receiver, self.epochs[receiver], *details))

    def look(self, seconds=1.0):
        self.now += seconds
        return self.observer.look(self, self.now)

    def sketch(self, seconds=1.0):
        [sketch] = self.look(seconds).sketches
        return sketch


def drawing(picture):
    return Drawing(picture, str)


# What is seen


def test_a_chain_on_its_way():
    stage = Stage("a", "b", "c")
    stage.want("b", "c")
    stage.now += 2
    stage.report(Progressed, "b", 500 * MB)
    sketch = stage.sketch()
    assert {name: (c.sources, c.received, c.state) for name, c in sketch.cells.items()} == {
        "a": ((), NBYTES, "whole"),
        "b": (("a",), 500 * MB, "receiving"),
        "c": (("b",), 0, "receiving"),
    }
    assert sketch.cells["b"].rate == sketch.rate == 250 * MB, (
        "bytes per second until the last report"
    )
    assert sketch.share == 0.25
    assert not sketch.over
    assert sketch.copies == 1


def test_what_is_done_is_shown_for_a_while():
    stage = Stage("a", "b", "c")
    stage.want("b", "c")
    stage.now += 4
    for worker in "bc":
        stage.report(Finished, worker, 0.1, 0.9)
        stage.whole.add(worker)
    sketch = stage.sketch()
    assert [cell.state for cell in sketch.takers] == ["done", "done"]
    assert sketch.over
    assert sketch.cells["c"].rate == 250 * MB
    assert stage.look(LINGER - 2).sketches
    assert not stage.look(2).sketches
    assert not stage.observer.history.finished


def test_who_is_done_remains_in_the_tree_while_others_are_not():
    stage = Stage("a", "b", "c")
    stage.want("b", "c")
    stage.report(Finished, "b", 0.1, 0.9)
    stage.whole.add("b")
    assert stage.sketch(3 * LINGER).cells["b"].state == "done"
    assert stage.sketch().cells["c"].sources == ("b",)


@pytest.mark.parametrize("looked_before", [True, False])
def test_a_change_of_source(looked_before):
    stage = Stage("a", "b", "c")
    stage.want("b", "c")
    if looked_before:
        assert not stage.look().changes
    stage.report(Progressed, "c", 300 * MB)
    stage.report(SourceFailed, "c", 400 * MB, "connection reset")
    picture = stage.look()
    [change] = picture.changes
    assert (change.key, change.receiver, change.left, change.source) == ("x", "c", "b", "a")
    assert (change.at, change.reason) == (400 * MB, "connection reset")
    cell = picture.sketches[0].cells["c"]
    assert cell.moved
    assert "from byte 400,000,000 on" in cell.note
    assert picture.sketches[0].changes == 1
    assert stage.look().changes == [change], "it is told once"


def test_several_changes_between_two_looks():
    stage = Stage("a", "b", "c", "d")
    stage.want("b", "c", "d")
    stage.handle(WorkerLeft("b"))
    stage.now += 0.1
    stage.handle(WorkerLeft("c"))
    changes = stage.look().changes
    assert [(c.receiver, c.left) for c in changes] == [("d", "c"), ("c", "b")]
    assert {change.reason for change in changes} == {"source left"}


def test_an_end_is_no_change_of_source():
    stage = Stage("a", "b")
    stage.want("b")
    stage.handle(WorkerLeft("b"))
    stage.handle(WorkerJoined("b", "host"))
    stage.now += 1
    stage.want("b")
    picture = stage.look()
    assert not picture.changes
    assert not picture.sketches[0].cells["b"].moved


def test_a_long_log_is_read_once():
    stage = Stage("a", "b", "c")
    read = []

    class Log(list):
        def __reversed__(self):
            for row in super().__reversed__():
                read.append(row)
                yield row

    stage.directory.ended = Log()
    for _ in range(100):
        stage.want("b")
        stage.report(Finished, "b", 0.1, 0.9)
    stage.look()
    assert len(read) == 100
    stage.look()
    assert len(read) == 101, "up to the last one that is known"


def test_traffic():
    stage = Stage("a", "b")
    stage.want("b")
    stage.look()
    stage.report(Progressed, "b", 600 * MB)
    picture = stage.look(2)
    [a, b] = picture.traffic
    assert (a.worker, a.sent, a.sending, a.received) == ("a", 600 * MB, 300 * MB, 0)
    assert (b.worker, b.received, b.receiving, b.sent) == ("b", 600 * MB, 300 * MB, 0)


def test_all_who_look_share_a_picture():
    stage = Stage("a", "b")
    first = stage.look()
    assert stage.look(0.4) is first
    assert stage.look(0.4) is not first


def test_after_a_restart_there_is_nothing():
    stage = Stage("a", "b")
    stage.want("b")
    assert stage.look().sketches
    stage.directory = Directory(stage.holders)
    assert not stage.look(0.1).sketches


def test_objects_that_are_kept():
    stage = Stage("a", "b", "c")
    stage.wishes.add("kept", None)
    stage.wishes.add("x", None)
    stage.want("b")
    picture = stage.look()
    assert picture.kept == [("kept", 1)]
    table = drawing(picture).objects
    assert table["object"] == ["x", "kept"]
    assert table["kind"] == ["transfer", "kept"]


class Sum:
    """A reduction of an operand of each worker, as the plugin has it."""

    def __init__(self, stage, *workers, **how):
        self.key = "sum"
        self.stage = stage
        self.nodes = {}
        operands = {f"x{worker}": worker for worker in workers}
        self.plan = Reduction(
            "sum",
            list(operands),
            len(operands),
            lambda key: [operands[key]],
            stage.directory.hosts,
            lambda key: 10**9,
            itertools.count(1).__next__,
            **how,
        )
        stage.reductions.runs["sum"] = self
        for key in operands:
            self.handle(Ready("sum", key))
        self.handle(Rooted("sum", workers[0]))

    def handle(self, event):
        for told in self.plan.handle(event, self.stage.now):
            if isinstance(told, Combine):
                self.nodes[told.worker] = told

    def report(self, kind, worker, *details):
        self.handle(kind("sum", worker, self.nodes[worker].node, *details))


def test_a_reduction_with_its_contributors():
    stage = Stage("a", "b", "c")
    run = Sum(stage, "a", "b", "c")
    stage.look()
    stage.now += 1
    run.report(Combining, "b", (200,), 200)
    sketch = stage.sketch()
    assert sketch.kind == "reduction"
    assert sketch.contributors == ("xa", "xb", "xc")
    assert {cell.worker for cell in sketch.cells.values()} == {"a", "b", "c"}
    [b] = [cell for cell in sketch.cells.values() if cell.worker == "b"]
    assert (b.received, b.rate, b.operands) == (200, 100, ("xb",))
    [root] = [cell for cell in sketch.cells.values() if "the result" in cell.note]
    assert root.worker == "a"
    assert Forest(sketch).depth[root.name] == 0, "what goes into it is drawn behind it"
    table = drawing(stage.observer.picture).objects
    assert table["contributors"] == ["3 of 3: xa, xb, xc"]

    for worker in "cba":
        if worker in run.nodes:
            run.report(Combined, worker, 1.0, NBYTES)
    del stage.reductions.runs["sum"]
    stage.reductions.contributors["sum"] = ("xa", "xb", "xc")
    assert stage.sketch().over
    assert not stage.look(LINGER + 1).sketches
    assert not stage.observer.sums


def test_a_reduction_that_failed_is_not_shown():
    stage = Stage("a", "b", "c")
    Sum(stage, "a", "b", "c")
    assert stage.look().sketches
    del stage.reductions.runs["sum"]
    assert not stage.look().sketches


def test_a_ring():
    stage = Stage("a", "b", "c", "d")
    Sum(stage, "a", "b", "c", "d", ring=True)
    sketch = stage.sketch()
    assert sketch.kind == "ring"
    assert len(Forest(sketch).places()) == 4
    assert len(drawing(stage.observer.picture).edges["x0"]) == 4


# Where it is drawn


def tree(parents, state="receiving", key="x"):
    """A sketch of an object, with the source of each."""
    cells = {
        name: Cell(name, name, (source,) if source else (), 500, 1000, state)
        for name, source in parents.items()
    }
    return Sketch(key, "transfer", 1000, cells)


def chain(n, key="x"):
    return tree({f"w{i}": f"w{i - 1}" if i else "" for i in range(n)}, key=key)


def test_a_short_chain_is_a_row():
    places = Forest(chain(5)).places()
    assert places == {f"w{i}": (i, 0) for i in range(5)}


def test_a_long_chain_is_a_snake():
    places = Forest(chain(2000)).places()
    assert len(set(places.values())) == 2000
    for i in range(1999):
        (x, y), (u, v) = places[f"w{i}"], places[f"w{i + 1}"]
        assert abs(x - u) + abs(y - v) == 1
    assert max(x for x, _ in places.values()) == WIDTH - 1


def test_branches_have_rows_of_their_own():
    sketch = tree({"a": "", "b": "a", "c": "a", "d": "c", "e": "a"})
    assert Forest(sketch).places() == {
        "a": (0, 0),
        "c": (1, 0),
        "d": (2, 0),
        "b": (1, 1),
        "e": (1, 2),
    }


def test_a_wide_star_has_a_place_for_each():
    sketch = tree({"a": "", **{f"w{i}": "a" for i in range(200)}})
    places = Forest(sketch).places()
    assert len(set(places.values())) == 201
    assert max(y for _, y in places.values()) < 10
    assert places["a"] == (0, 0)


def test_a_circle_has_a_place_for_each():
    places = Forest(tree({"a": "c", "b": "a", "c": "b"})).places()
    assert len(set(places.values())) == 3


def test_two_copies_to_take_from():
    places = Forest(tree({"a": "", "b": "", "c": "a", "d": "b"})).places()
    assert len(set(places.values())) == 4


def test_edges():
    straight = edge((0, 0), (1, 0))
    assert (straight["mx"], straight["my"], straight["cy"]) == (0.5, 0, 0)
    bent = edge((0, 0), (4, 0))
    assert bent["cy"] > 0.5, "not through what is between"
    assert edge((4, 0), (0, 0))["angle"] == -edge((0, 0), (4, 0))["angle"] + 0.0


def test_columns_are_of_one_length():
    stage = Stage("a", "b", "c", "d")
    stage.want("b", "c", "d")
    stage.report(SourceFailed, "d", 0, "why")
    stage.wishes.add("kept", None)
    Sum(stage, "a", "b", "c")
    drawn = drawing(stage.look())
    for columns in (drawn.cells, drawn.edges, drawn.heads, drawn.workers, drawn.objects):
        assert len({len(values) for values in columns.values()}) == 1
    assert len(drawn.cells["x"]) == 7
    assert MOVED in drawn.edges["color"]
    assert "2 objects moving" in drawn.summary


def test_there_is_no_more_than_there_is_room_for():
    picture = Picture(0.0, [chain(500, key=f"x{i}") for i in range(4)])
    drawn = drawing(picture)
    assert drawn.rows <= ROWS
    assert "more objects than there is room for" in drawn.summary
    assert len(drawn.objects["object"]) == 4, "all are in the table"
    assert not any(drawn.cells["label"]), "names would not be legible"
    drawn = drawing(Picture(0.0, [chain(ROWS * WIDTH + 100)]))
    assert "not shown" in drawn.heads["text"][0]
    drawn = drawing(Picture(0.0, [chain(NAMED)]))
    assert all(drawn.cells["label"])


def test_states_have_colours():
    for state, color in COLORS.items():
        assert set(drawing(Picture(0.0, [tree({"a": ""}, state)])).cells["color"]) == {color}


def test_nothing_at_all():
    drawn = drawing(Picture(0.0))
    assert "0 workers · 0 objects moving" in drawn.summary


def test_long_names():
    assert shortened("x" * 100, 40).count("x") == 39
    assert short("127.0.0.1:45678") == "…1:45678"
    assert short("worker-7") == "worker-7"
    assert listed(range(20)) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


# Where it is


@contextlib.asynccontextmanager
async def cluster(workers=2, **kwargs):
    """A scheduler with a dashboard, workers and a client, in this process and on real sockets."""
    async with contextlib.AsyncExitStack() as stack:
        config = {"hoplite.min-size": 1000, "hoplite.stall-timeout": "500ms"}
        stack.enter_context(dask.config.set(config))
        enter = stack.enter_async_context
        s = await enter(Scheduler(host="127.0.0.1", port=0, dashboard_address=":0", **kwargs))
        hosts = [f"127.0.0.{2 + i}" for i in range(workers)]  # as if they were several
        ws = [await enter(Worker(s.address, name=f"w{i}", host=h)) for i, h in enumerate(hosts)]
        c = await enter(Client(s.address, asynchronous=True))
        yield c, s, ws


async def get(s, path):
    """A page of the scheduler."""

    def read():
        with urlopen(f"http://127.0.0.1:{s.http_server.port}/{path}") as answer:
            return answer.read().decode()

    return await asyncio.to_thread(read)


async def is_listed(s):
    """Whether navigation and JupyterLab's list have our pages: both or none."""
    found = {
        "hoplite" in template_variables(s)["pages"],  # which is dear to see on Dask's pages
        "/individual-hoplite-trees" in json.loads(await get(s, "individual-plots.json")).values(),
    }
    assert len(found) == 1
    return found.pop()


@gen_test(timeout=60)
async def test_it_comes_and_goes_with_the_plugin():
    async with cluster() as (c, s, _):
        assert not await is_listed(s)
        before = json.loads(await get(s, "individual-plots.json"))
        await c.register_plugin(Hoplite())
        await c.register_plugin(Hoplite())
        assert await is_listed(s)
        assert before.items() <= json.loads(await get(s, "individual-plots.json")).items()
        for page in ("hoplite", "individual-hoplite-trees", "individual-hoplite-changes"):
            assert "Bokeh" in await get(s, page)
        first = await get(s, "")
        assert "Bokeh" in first, "Dask's first page is served as before"
        assert 'href="hoplite"' in first
        await c.unregister_scheduler_plugin("hoplite")
        assert not await is_listed(s)
        assert json.loads(await get(s, "individual-plots.json")) == before
        assert "Bokeh" in await get(s, "hoplite"), "to say that there is no Hoplite"
        await c.register_plugin(Hoplite())
        assert await is_listed(s)
        assert len(s.http_application.applications) == 2, "one application for all times"


@gen_test(timeout=60)
async def test_preload_and_prefix():
    async with cluster(preload=["dask_hoplite"], http_prefix="/here") as (_, s, _ws):
        assert 'href="hoplite"' in await get(s, "here/hoplite")


@gen_test()
async def test_a_scheduler_without_dashboard():
    with captured_logger("dask_hoplite") as log:
        async with cluster(dashboard=False) as (c, s, _):
            await c.register_plugin(Hoplite())
            assert np.array_equal(await hosted(c), array())
            await c.unregister_scheduler_plugin("hoplite")
            assert not s.http_application.applications
    assert "dashboard" not in log.getvalue()


@gen_test()
async def test_without_bokeh(monkeypatch):
    find_spec = importlib.util.find_spec

    def without_bokeh(name, *args):
        return None if name == "bokeh" else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without_bokeh)
    with captured_logger("dask_hoplite", level=logging.WARNING) as log:  # which people see
        async with cluster(dashboard=False) as (c, _s, _):
            await c.register_plugin(Hoplite())
            assert np.array_equal(await hosted(c), array())
    [line] = [line for line in log.getvalue().splitlines() if "dashboard" in line]
    assert line == "Hoplite: no page in the dashboard, as Bokeh is not installed"


@gen_test()
async def test_a_dashboard_of_another_kind_is_left_alone(monkeypatch):
    with captured_logger("dask_hoplite", level=logging.INFO) as log:
        async with cluster() as (c, _s, _):
            monkeypatch.delattr("distributed.dashboard.scheduler.template_variables")
            await c.register_plugin(Hoplite())
            assert np.array_equal(await hosted(c), array())
    [line] = [line for line in log.getvalue().splitlines() if "dashboard" in line]
    assert "no page in the dashboard" in line
    assert "has no template_variables" in line


def sessions(s):
    """Documents of our page that are open."""
    return s.http_application.applications[0].get_sessions("/hoplite")


#: Bokeh ends documents at once that nobody looks at.
BRIEF = {
    "allow_websocket_origin": ["*"],
    "keep_alive_milliseconds": 500,
    "check_unused_sessions_milliseconds": 50,
    "unused_session_lifetime_milliseconds": 50,
}


@gen_test(timeout=60)
async def test_nobody_looks_nothing_is_done():
    config = {"distributed.scheduler.dashboard.bokeh-application": BRIEF}
    with dask.config.set(config):
        async with cluster() as (c, s, _):
            await c.register_plugin(Hoplite())
            assert not sessions(s)
            [token] = re.findall(r'"token":"(.*?)"', await get(s, "hoplite"))
            url = f"ws://127.0.0.1:{s.http_server.port}/hoplite/ws"
            viewer = await websocket_connect(url, subprotocols=["bokeh", token])
            [document] = [session.document for session in sessions(s)]
            assert len(document.session_callbacks) == 1
            absent = document.get_model_by_name("hoplite-absent")
            line = document.get_model_by_name("hoplite-summary")
            assert "2 workers" in line.text
            assert not absent.visible
            before = line.text
            await until(lambda: line.text != before)
            await c.unregister_scheduler_plugin("hoplite")
            await until(lambda: absent.visible)
            assert absent.text == "Hoplite is not installed on this scheduler."
            await c.register_plugin(Hoplite())
            await until(lambda: not absent.visible)
            viewer.close()
            await until(lambda: not sessions(s))


# That it moves


def receivers(s, key):
    """Who receives an object."""
    tree = s.extensions["hoplite"].directory.trees.get(key)
    return tree.transfers if tree is not None else {}


@pytest.mark.browser
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@gen_test(timeout=110)
async def test_a_broadcast_in_a_browser(tmp_path):
    async with cluster(workers=4) as (c, s, ws):
        await c.register_plugin(Hoplite())
        x = hosted(c, 16_000_000, worker=ws[0].address)
        operands = [hosted(c, 1000, worker=w.address, seed=i) for i, w in enumerate(ws)]
        await asyncio.gather(x, *operands)
        with contextlib.ExitStack() as stack:
            driver = await asyncio.to_thread(stack.enter_context, browser())
            pace = stack.enter_context(slow_links(0.01))

            async def shows(*patterns):
                page = ""
                while not all(re.search(pattern, page, re.MULTILINE) for pattern in patterns):
                    await asyncio.sleep(0.1)  # or the browser does nothing else
                    page = await asyncio.to_thread(text, driver)
                return page

            spreading = asyncio.create_task(hoplite.broadcast(x, client=c))
            await until(lambda: len(receivers(s, x.key)) == 3)
            url = f"http://127.0.0.1:{s.http_server.port}/hoplite"
            await asyncio.to_thread(driver.get, url)
            page = await shows("4 workers · 1 object moving", x.key, r"^\d+%$")
            [before, *_] = re.findall(r"^(\d+)%$", page, re.MULTILINE)
            await shows("1 object moving", rf"^(?!{before}%)\d+%$")  # it has more by now
            pace.pause = 0
            await spreading
            total = await hoplite.reduce(operands, client=c)
            await shows("0 objects moving", "^100%$")
            assert await asyncio.to_thread(driver.save_screenshot, str(tmp_path / "page.png"))
            assert (tmp_path / "page.png").stat().st_size > 10_000
            log = await asyncio.to_thread(driver.get_log, "browser")
            assert not [entry for entry in log if entry["level"] in ("WARNING", "SEVERE")]
            del total
