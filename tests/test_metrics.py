"""Metrics in Dask's /metrics, events in its log, and its own figures on transfers."""

from __future__ import annotations

import logging
import pathlib
import re
import sys

import numpy as np
import pytest
from distributed import Event, Scheduler, Worker, wait
from distributed.utils_test import captured_logger, gen_test
from prometheus_client.parser import text_string_to_metric_families
from tornado.httpclient import AsyncHTTPClient

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, metrics
from dask_hoplite.core.record import CAUSES, OUTCOMES
from tests.helpers import array, hoplite_cluster, hosted, plugin, until

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "metrics.md"
SCHEDULER, WORKER = "dask_scheduler_hoplite_", "dask_worker_hoplite_"


async def scrape(server, prefix):
    """Samples by short name, and by label where there is one, as Prometheus gets them."""
    url = f"http://localhost:{server.http_server.port}/metrics"
    text = (await AsyncHTTPClient().fetch(url)).body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                name = sample.name.removeprefix(prefix)
                [label] = sample.labels.values() or [""]
                found.setdefault(name, {})[label] = sample.value
                assert name.endswith("_total") == (family.type == "counter")
    return {n: values.get("", values) for n, values in found.items()}


def documented(prefix):
    return set(re.findall(rf"^\| `{prefix}(\w+)`", DOCS.read_text(), re.M))


def actions(s):
    return [event["action"] for _, event in s.get_events("hoplite")]


@hoplite_cluster()
async def test_a_broadcast(c, s, *workers):
    await c.register_plugin(Hoplite())
    before = await scrape(s, SCHEDULER)
    nbytes = 3_000_000
    x = hosted(c, nbytes, worker=workers[0].address)
    await hoplite.broadcast(x, client=c)
    await until(lambda: plugin(s).record.outcomes["finished"] == 3)
    after = await scrape(s, SCHEDULER)
    assert after["objects_moving"] == 0
    assert after["transfers_total"]["finished"] - before["transfers_total"]["finished"] == 3
    assert sum(after["transfers_total"].values()) == len(plugin(s).directory.log()) == 3
    got = plugin(s).directory.bytes_in
    assert after["received_bytes_total"] == sum(got.values()) >= 3 * nbytes
    assert after["decision_seconds_count"] > 3 and after["decision_seconds_sum"] > 0
    assert after["receivers"] == {"waiting": 0, "receiving": 0}
    came = went = 0
    for w in workers:
        await until(lambda w=w: not w.transfer_outgoing_count)
        here = await scrape(w, WORKER)
        assert here["objects"] == {"whole": 1, "partial": 0}
        assert here["objects_bytes"]["whole"] == s.tasks[x.key].nbytes
        assert here["pulls_total"]["finished"] == (w is not workers[0])
        came += sum(here.get("received_bytes_total", {}).values())
        went += sum(here.get("sent_bytes_total", {}).values())
        assert set(here.get("received_bytes_total", {})) <= {"tcp stream", "shared memory"}
    assert came == went == sum(got.values())
    assert actions(s) == []


@hoplite_cluster()
async def test_documented_names_are_those_that_are_scraped(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=workers[0].address)
    await c.submit(np.sum, x, workers=[workers[1].address])
    await until(lambda: plugin(s).record.outcomes["finished"])
    await until(lambda: not workers[0].transfer_outgoing_count)
    text, names = DOCS.read_text(), set(await scrape(s, SCHEDULER))
    assert names == documented(SCHEDULER)
    for w in workers[:2]:
        names = set(await scrape(w, WORKER)) | names
    assert names == documented(SCHEDULER) | documented(WORKER)
    assert all(f"`{name}`" in text for name in (*OUTCOMES, *CAUSES))
    told = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.M))
    source = pathlib.Path(sys.modules["dask_hoplite.core.record"].__file__).read_text()
    assert told == set(re.findall(r'"action": "([a-z-]+)"', source))


@hoplite_cluster()
async def test_they_vanish_with_uninstalling(c, s, *workers):
    assert not await scrape(s, SCHEDULER)
    await c.register_plugin(Hoplite())
    async with Worker(s.address) as late:
        assert await scrape(late, WORKER)
    assert await scrape(s, SCHEDULER) and await scrape(workers[0], WORKER)
    await c.unregister_scheduler_plugin("hoplite")
    assert not await scrape(s, SCHEDULER) and not await scrape(workers[0], WORKER)
    assert not metrics.SCHEDULERS.collector and not metrics.WORKERS.collector


@gen_test()
async def test_preload():
    async with (
        Scheduler(dashboard_address=":0", preload=["dask_hoplite"], port=0) as s,
        Worker(s.address) as w,
    ):
        assert await scrape(s, SCHEDULER) and await scrape(w, WORKER)


@hoplite_cluster(config={"distributed.dashboard.prometheus.namespace": "lab"})
async def test_namespace(c, s, *workers):
    await c.register_plugin(Hoplite())
    assert await scrape(s, "lab_scheduler_hoplite_")


@hoplite_cluster()
async def test_without_the_client_library(c, s, *workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "find_spec", lambda name: None)
        with captured_logger("dask_hoplite.metrics", logging.INFO) as log:
            await c.register_plugin(Hoplite())
    assert set(log.getvalue().splitlines()) == {
        "Hoplite has no metrics: prometheus_client is not installed"
    }
    x = await hoplite.broadcast(array(), client=c)
    assert len(s.tasks[x.key].who_has) == 4
    assert not await scrape(s, SCHEDULER)


async def receiving(c, s, source, receiver, nbytes=50_000_000):
    """A receiver in the middle of an object of which there is another copy."""
    x = hosted(c, nbytes, worker=source.address)
    await x
    side = source.plugins["hoplite"]
    serve = side.serve

    async def half(comm, **kwargs):
        async with side.shelf.reading(x.key) as whole:
            growing = type(whole)(whole.layout, whole.frames, received=nbytes // 2)
        entry = side.shelf.promise(x.key)
        entry.buffer.set_result(growing)
        return await serve(comm, **kwargs)

    source.handlers["hoplite_pull"] = half
    total = c.submit(np.sum, x, workers=[receiver.address])
    incoming = receiver.plugins["hoplite"].puller.incoming
    await until(lambda: x.key in incoming and incoming[x.key].received > nbytes // 4)
    return x, total


@hoplite_cluster(config={"hoplite.shared-memory": False, "hoplite.min-size": 1000})
async def test_a_source_that_leaves(c, s, a, b, third, *workers):
    await c.register_plugin(Hoplite())
    x, total = await receiving(c, s, a, b)
    await until(lambda: plugin(s).directory.trees[x.key].transfers[b.address].received)
    before = await scrape(s, SCHEDULER)
    assert before["receivers"] == {"waiting": 0, "receiving": 1}
    assert before["objects_moving"] == 1
    here = await scrape(b, WORKER)
    assert here["objects"]["partial"] == 1 and here["objects_bytes"]["partial"] > 10_000_000
    assert here["pulls_running"]["receiving"] == 1
    s.add_replica(s.tasks[x.key], s.workers[third.address])
    third.update_data({x.key: array(50_000_000)})
    await a.close()
    assert await total == array(50_000_000).sum(dtype=int)
    await until(lambda: plugin(s).record.outcomes["finished"])
    after = await scrape(s, SCHEDULER)
    causes = {cause for cause, count in after["reparentings_total"].items() if count}
    assert causes and causes <= {"source_left", "source_failed"}
    assert sum(after["reparentings_total"].values()) == 1 == after["resumes_total"]
    [(_, event)] = await c.get_events("hoplite")
    assert event["action"] == "reparented" and event["key"] == x.key
    assert (event["former"], event["source"]) == (a.address, third.address)
    assert event["receiver"] == b.address and event["resumed_from"] > 10_000_000
    for name, value in before.items():
        if name.endswith("_total"):
            values = value.items() if isinstance(value, dict) else [("", value)]
            now = after[name] if isinstance(value, dict) else {"": after[name]}
            assert all(now[label] >= was for label, was in values), name


@hoplite_cluster()
async def test_a_reduction(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = [hosted(c, 10_000, worker=w.address, seed=i) for i, w in enumerate(workers)]
    total = hoplite.reduce(operands, client=c)
    assert np.array_equal(await (await total), sum(array(10_000, i).astype("u8") for i in range(4)))
    found = await scrape(s, SCHEDULER)
    assert found["reductions_total"] == {"finished": 1, "failed": 0, "released": 0}
    assert found["reductions_running"] == found["reductions_replanned_total"] == 0
    sums = [(await scrape(w, WORKER)) for w in workers]
    assert sum(sum(one.get("received_bytes_total", {}).values()) for one in sums) == 3 * 80_000
    failing = await hoplite.reduce(
        [operands[0], c.submit(array, 77, workers=[workers[1].address])], client=c
    )
    with pytest.raises(ValueError):
        await failing
    await until(lambda: not plugin(s).reductions.runs)
    assert (await scrape(s, SCHEDULER))["reductions_total"]["failed"] == 1
    [(_, event)] = await c.get_events("hoplite")
    assert event["action"] == "reduction-failed" and event["key"] == failing.key
    assert event["reason"]


def gated(n, seed):
    Event("gate").wait()
    return array(n, seed)


@hoplite_cluster()
async def test_a_reduction_that_begins_again(c, s, *workers):
    await c.register_plugin(Hoplite())
    operands = [
        c.submit(array, 10_000, i, workers=[w.address], allow_other_workers=True, pure=False)
        for i, w in enumerate(workers[:3])
    ]
    await wait(operands)
    operands.append(c.submit(gated, 10_000, 3, workers=[workers[3].address]))
    total = await hoplite.reduce(operands, client=c)
    runs = plugin(s).reductions.runs
    await until(lambda: total.key in runs and len(runs[total.key].plan.nodes) == 3)
    await workers[0].close()
    await Event("gate", client=c).set()
    assert np.array_equal(await total, sum(array(10_000, i).astype("u8") for i in range(4)))
    found = await scrape(s, SCHEDULER)
    events = [e for _, e in s.get_events("hoplite") if e["action"] == "reduction-replanned"]
    assert found["reductions_replanned_total"] == len(events) > 0
    assert found["reductions_total"]["finished"] == 1
    assert {event["key"] for event in events} == {total.key}
    assert all(workers[0].address in event["reason"] for event in events)


@hoplite_cluster()
async def test_a_lost_object(c, s, *workers):
    await c.register_plugin(Hoplite())
    [x] = await c.scatter([array()], workers=[workers[0].address])
    await workers[0].close()
    await until(lambda: "object-lost" in actions(s))
    [(_, event)] = await c.get_events("hoplite")
    assert event["key"] == x.key and list(event["holders"]) == [workers[0].address]
    assert (await scrape(s, SCHEDULER))["objects_lost_total"] == 1


# Dask's own figures


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_dask_has_transfers_of_dependencies_in_its_figures(c, s, a, b):
    await c.register_plugin(Hoplite())
    await c.get_task_stream()  # from now on there is one
    nbytes = 3_000_000
    x = hosted(c, nbytes, worker=a.address)
    total = c.submit(np.sum, x, workers=[b.address])
    await total
    size = s.tasks[x.key].nbytes
    [came] = b.transfer_incoming_log
    assert came["who"] == a.address and came["keys"] == {x.key: size} and came["total"] == size
    assert came["stop"] >= came["start"]
    assert came["bandwidth"] == pytest.approx(size / came["duration"])
    await until(lambda: a.transfer_outgoing_log)
    [went] = a.transfer_outgoing_log
    assert went["who"] == b.address and went["total"] == a.transfer_outgoing_bytes_total >= nbytes
    assert not a.transfer_outgoing_bytes and not a.transfer_outgoing_count
    [(where, (bandwidth, count))] = b.bandwidth_workers.items()
    assert where == a.address and count == 1 and bandwidth > 0
    await b.heartbeat()
    assert (a.address, b.address) in {pair[::-1] for pair in s.bandwidth_workers} | set(
        s.bandwidth_workers
    )
    assert any("ndarray" in str(kind) for kind in s.bandwidth_types)
    [transfer] = [
        step
        for record in await c.get_task_stream(count=100)
        for step in record["startstops"]
        if step["action"] == "transfer"
    ]
    assert transfer["source"] == a.address
    assert (transfer["start"], transfer["stop"]) == (came["start"], came["stop"])


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_dask_has_each_copy_once_in_its_figures(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = await c.scatter(array(3_000_000), broadcast=True)
    size = s.tasks[x.key].nbytes
    await until(lambda: not any(w.transfer_outgoing_count for w in workers))
    came = [row for w in workers for row in w.transfer_incoming_log]
    went = [row for w in workers for row in w.transfer_outgoing_log]
    assert [row["total"] for row in came] == [size] * 2
    assert [row["keys"].keys() for row in went] == [{x.key}] * 2
    assert all(row["total"] >= 3_000_000 for row in went)
    y = hosted(c, 3_000_000, worker=workers[0].address)
    totals = [c.submit(np.sum, y, workers=[workers[1].address], pure=False) for _ in range(3)]
    await c.gather(totals)
    assert len([row for row in workers[1].transfer_incoming_log if y.key in row["keys"]]) == 1
