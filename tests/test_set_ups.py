"""Other ways to set up a cluster: TLS, configuration."""

from __future__ import annotations

import asyncio
import json
import pathlib

import dask
import jsonschema
import numpy as np
import pytest
import yaml
from distributed import Client, LocalCluster, Scheduler, Variable, Worker, get_client, wait
from distributed.protocol import Serialize
from distributed.security import Security
from distributed.utils_test import gen_cluster, gen_test

import dask_hoplite
import dask_hoplite as hoplite
from dask_hoplite import Hoplite
from dask_hoplite.config import DEFAULTS, Config
from dask_hoplite.exceptions import TransferError
from dask_hoplite.transfer import pull, push, shelf
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import dump
from tests.helpers import array, first_blocks, hoplite_cluster, hosted, plugin, until

PACKAGE = pathlib.Path(dask_hoplite.__file__).parent


def schema():
    return yaml.safe_load((PACKAGE / "hoplite-schema.yaml").read_text())


def test_defaults_agree_with_the_schema():
    jsonschema.validate(DEFAULTS, schema())
    described = schema()["properties"]["hoplite"]["properties"]
    assert set(described) == set(DEFAULTS["hoplite"])
    assert all(entry["description"].strip() for entry in described.values())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"hoplite": {"min-sice": 1}}, schema())
    json.dumps(schema())


def test_configuration():
    assert Config.read().min_size == 512 * 1024
    with dask.config.set({"hoplite.min-size": "3 MiB"}):
        assert Config.read().min_size == 3 * 2**20
        assert Config.read(min_size=5).min_size == 5
    with pytest.raises(ValueError, match=r"hoplite\.min-size: 'a lot' is not a size"):
        Hoplite(min_size="a lot")
    with pytest.raises(ValueError, match="timeouts"):
        Hoplite(stall_timeout="0s")


@gen_cluster(
    client=True,
    nthreads=[("tls://127.0.0.1", 1)] * 3,
    security=Security.temporary(),
    config={"hoplite.min-size": 1000},
)
async def test_tls(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = await c.scatter(array(30_000_000), broadcast=True)
    assert len(s.tasks[x.key].who_has) == 3
    await until(lambda: len(plugin(s).directory.log()) == 3)
    y = hosted(c, 900_000, worker=workers[0].address)
    totals = [c.submit(np.sum, y, workers=[w.address], pure=False) for w in workers]
    assert await c.gather(totals) == [array(900_000).sum(dtype=int)] * 3
    assert np.array_equal(await y, array(900_000))
    paths = {row["path"] for row in plugin(s).directory.log() if row["key"] == y.key}
    assert paths <= {"tls stream", ""}


@gen_cluster(
    client=True,
    nthreads=[("tls://127.0.0.1", 1)] * 3,
    security=Security.temporary(),
    config={"hoplite.min-size": 1000},
)
async def test_tls_without_shared_memory(c, s, *workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pull, "affinity", lambda: "")
        patch.setattr(shelf, "affinity", lambda: "other")
        await c.register_plugin(Hoplite())
        x = hosted(c, 30_000_000, worker=workers[0].address)
        await hoplite.broadcast(x, client=c)
        await until(lambda: len(plugin(s).directory.log()) == 2)
        assert {row["path"] for row in plugin(s).directory.log()} == {"tls stream"}
        for w in workers:
            assert np.array_equal(w.data[x.key], array(30_000_000))


async def collectives_are_right(c, s, workers, large):
    """All collectives, among workers that are taken to be on hosts of their own."""
    hosts = plugin(s).directory.hosts
    hosts.update((worker, f"host-{worker}") for worker in hosts)
    operands = [np.full(large, 2.0**i) for i in range(len(workers))]
    pairs = zip(operands, workers, strict=True)
    futures = [c.submit(lambda x=x: x, workers=[w.address], pure=False) for x, w in pairs]
    total = sum(operands)
    assert np.array_equal(await (await hoplite.reduce(futures, client=c)), total)
    everywhere = await hoplite.allreduce(futures, client=c)
    gathered = await hoplite.allgather(futures, client=c)
    blocks = await hoplite.reduce_scatter(futures, client=c)
    await wait([everywhere, gathered, *blocks])
    for number, w in enumerate(workers):
        assert np.array_equal(w.data[everywhere.key], total)
        assert all(map(np.array_equal, w.data[gathered.key], operands))
        assert np.array_equal(w.data[blocks[number].key], np.array_split(total, 3)[number])


@gen_cluster(
    client=True,
    nthreads=[("tls://127.0.0.1", 1)] * 3,
    security=Security.temporary(),
    config={"hoplite.min-size": 1000},
)
async def test_collectives_with_tls(c, s, *workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pull, "affinity", lambda: "")
        await c.register_plugin(Hoplite())
        await collectives_are_right(c, s, workers, large=1_000_000)


@gen_test(timeout=60)
async def test_collectives_over_websockets():
    with dask.config.set({"hoplite.min-size": 1000}):
        async with (
            Scheduler(protocol="ws", port=0, dashboard_address=":0") as s,
            Worker(s.address, nthreads=1) as a,
            Worker(s.address, nthreads=1) as b,
            Worker(s.address, nthreads=1) as d,
            Client(s.address, asynchronous=True) as c,
        ):
            await c.register_plugin(Hoplite())
            await collectives_are_right(c, s, (a, b, d), large=1_000_000)


@gen_test(timeout=60)
async def test_gathering_inside_tasks_uses_the_workers_pulls():
    async with (
        LocalCluster(
            n_workers=2, threads_per_worker=2, asynchronous=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        await c.register_plugin(Hoplite(min_size=1000))
        await c.wait_for_workers(2)
        a, b = cluster.scheduler.workers
        x = hosted(c, worker=a)
        await Variable("x", client=c).set(x)

        def gather():
            return int(get_client().gather(Variable("x").get()).sum(dtype=int))

        totals = [c.submit(gather, workers=[b], pure=False) for _ in range(2)]
        assert await c.gather(totals) == [array().sum(dtype=int)] * 2
        await until(lambda: plugin(cluster.scheduler).directory.bytes_in[b] >= 100_000)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_without_the_package(c, s, a, b):
    """A worker that could not load the plugin is served, and serves, by plain Dask."""
    await c.register_plugin(Hoplite())
    await b.plugin_remove("hoplite")
    x, y = hosted(c, worker=a.address), hosted(c, worker=b.address, seed=1)
    assert await c.submit(np.sum, x, workers=[b.address]) == array().sum(dtype=int)
    assert await c.submit(np.sum, y, workers=[a.address]) == array(seed=1).sum(dtype=int)
    assert np.array_equal(await y, array(seed=1))


@hoplite_cluster(
    nthreads=[("127.0.0.1", 1)] * 2,
    config={"hoplite.min-size": 1000, "hoplite.connect-timeout": "200ms"},
)
async def test_a_client_that_cannot_reach_the_workers(c, s, a, b):
    await c.register_plugin(Hoplite())
    connect = c.rpc.connect

    async def firewall(address, timeout=None):
        if address in s.workers:
            raise OSError("no route to host")
        return await connect(address, timeout)

    c.rpc.connect = firewall
    del s.handlers["scatter"], s.handlers["gather"]  # by which it would hold all of an object
    x = await c.scatter(array(), broadcast=True)
    assert len(s.tasks[x.key].who_has) == 2
    assert np.array_equal(await x, array())
    y = hosted(c, seed=1)
    assert np.array_equal(await c.gather(y), array(seed=1))
    assert not plugin(s).puts.pending


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_client_that_cannot_reach_the_workers_for_a_while(c, s, a, b):
    await c.register_plugin(Hoplite())
    x = hosted(c)
    assert np.array_equal(await c.gather(x), array())
    connect = c.rpc.connect

    async def freeze(address, timeout=None):
        if address in s.workers:
            raise OSError("timed out")
        return await connect(address, timeout)

    c.rpc.connect = freeze
    assert np.array_equal(await c.gather(x), array())  # by way of the scheduler
    c.rpc.connect = connect
    [holder] = (w for w in (a, b) if x.key in w.data)
    served = []
    plain = holder.handlers["hoplite_pull"]

    async def serve(comm, **message):
        served.append(message["receiver"])
        return await plain(comm, **message)

    holder.handlers["hoplite_pull"] = serve
    assert np.array_equal(await c.gather(x), array())
    assert served == [c.id]


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_client_that_leaves_in_the_middle(c, s, a, b):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as other:
        await other.register_plugin(Hoplite())
        placement = await other.scheduler.hoplite_place(
            client=other.id, nbytes={"x": 10_000}, broadcast=True, timeout=1
        )
        assert set(placement) == {"x"}
        assert plugin(s).puts.pending
    await until(lambda: not plugin(s).puts.pending)
    extensions = [w.plugins["hoplite"] for w in (a, b)]
    await until(
        lambda: (
            not any(e.arrivals.expected or e.puller.incoming or e.shelf.entries for e in extensions)
        )
    )
    assert not plugin(s).directory.trees and not s.tasks


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_client_that_left_before_its_request(c, s, a, b):
    await c.register_plugin(Hoplite())
    request = {"client": "gone", "nbytes": {"x": 10_000}, "broadcast": True, "timeout": 1}
    with pytest.raises(TransferError, match="'x': client gone left"):
        await c.scheduler.hoplite_place(**request)
    with pytest.raises(TransferError, match="client gone left"):
        await c.scheduler.scatter(data={"x": Serialize(array())}, workers=None, client="gone")
    assert not plugin(s).puts.pending and not plugin(s).directory.trees and not s.tasks
    assert "gone" not in s.clients


@pytest.mark.parametrize("started", [False, True])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_push_that_is_given_up_leaves_nothing(c, s, a, started):
    await c.register_plugin(Hoplite())
    puts, extension = plugin(s).puts, a.plugins["hoplite"]
    buffer, go_on = Buffer(*dump(array())), asyncio.Event()
    placement = await puts.place(c.id, {"x": buffer.nbytes}, timeout=1)
    plain_send, block = push.send, buffer.layout.block

    async def send(comm, buffer, offset):
        if started:
            await comm.stream.write(first_blocks(buffer, block))
        await go_on.wait()
        await plain_send(comm, buffer, block if started else 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "send", send)
        pushing = asyncio.create_task(
            push.push(c.rpc, a.address, "x", buffer, placement["x"][1], timeout=60)
        )
        entry = extension.arrivals.expected["x"].entry
        await until(lambda: entry.buffer.done())
        if started:
            await until(lambda: entry.buffer.result().received)
        puts.abort(["x"], "test")
        await until(lambda: not extension.arrivals.expected)
        go_on.set()
        with pytest.raises((TransferError, OSError)):
            await pushing
    await until(lambda: not plugin(s).tasks)
    assert not a.data and not extension.shelf.entries and not plugin(s).directory.trees


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_client_that_leaves_while_its_object_is_placed(c, s, a, b):
    await c.register_plugin(Hoplite())
    expecting, left = asyncio.Event(), asyncio.Event()

    async def expect(**message):
        expecting.set()
        await left.wait()
        return {"status": "OK"}

    for worker in (a, b):
        worker.handlers["hoplite_expect"] = expect
    async with Client(s.address, asynchronous=True) as other:
        placing = asyncio.create_task(
            plugin(s).puts.place(other.id, {"x": 10_000}, broadcast=True, timeout=1)
        )
        await expecting.wait()
    assert not plugin(s).puts.pending and not plugin(s).directory.trees
    left.set()
    with pytest.raises(TransferError, match="'x': was given up"):
        await placing
    assert not any(w.plugins["hoplite"].puller.incoming for w in (a, b))


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_leaves_in_the_middle(c, s, a, b, monkeypatch):
    await c.register_plugin(Hoplite())
    async with Worker(s.address, nthreads=1) as late:
        begun, begin, puller = asyncio.Event(), pull.Incoming.begin, late.plugins["hoplite"].puller

        def watched(incoming, layout, handle):
            if incoming.puller is puller:
                begun.set()
            return begin(incoming, layout, handle)

        monkeypatch.setattr(pull.Incoming, "begin", watched)
        x = hosted(c, 80_000_000, worker=a.address)
        await x
        broadcasting = asyncio.create_task(hoplite.broadcast(x, client=c))
        await begun.wait()
    await asyncio.wait_for(broadcasting, 20)
    assert len(s.tasks[x.key].who_has) == 2
    assert np.array_equal(b.data[x.key], array(80_000_000))
