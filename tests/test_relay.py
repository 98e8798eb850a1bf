"""Clients that reach only the scheduler: their objects go through it, a window at a time."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.comm import connect, listen
from distributed.comm.core import CommClosedError
from distributed.core import Status
from distributed.security import Security
from distributed.utils_test import gen_cluster, gen_test

import dask_hoplite as hoplite
from benchmarks.cluster import Cluster
from benchmarks.laboratory import Laboratory, why_not
from dask_hoplite import Hoplite, TransferError, client
from dask_hoplite.fetch import Fetch
from dask_hoplite.transfer import relay
from dask_hoplite.transfer.relay import Carrier, Relay
from tests.helpers import array, first_blocks, hoplite_cluster, hosted, plugin, until


def firewall(c, s):
    """Let a client reach nobody but the scheduler."""
    plain = c.rpc.connect

    async def connect(address, timeout=None):
        if address != s.address:
            raise OSError("no route to host")
        return await plain(address, timeout)

    c.rpc.connect = connect


def no_whole_objects(s):
    """Let the scheduler refuse Dask's own way, by which it would hold all of an object."""

    async def refuse(**message):
        raise AssertionError("by Dask's own way")

    s.handlers["scatter"] = s.handlers["gather"] = refuse


@contextlib.contextmanager
def windows(nbytes=64 * 1024):
    """Use smaller windows; see how large they were."""
    sizes = []
    make = relay.host_array
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "WINDOW", nbytes)
        patch.setattr(relay, "host_array", lambda n: sizes.append(n) or make(n))
        yield sizes


def relaying():
    return [task for task in asyncio.all_tasks() if task.get_name() == "hoplite-relay"]


async def nothing_is_left(c, s):
    """No connection is in use, and nobody relays."""
    await until(lambda: not relaying() and not s.rpc.active and not c.rpc.active)
    assert not plugin(s).puts.pending


async def there_and_back(c, s, workers, path="tcp stream, relayed"):
    """Scatter, broadcast and gather, and look how."""
    no_whole_objects(s)
    with windows() as sizes:
        x = await c.scatter(array(3_000_000), broadcast=True)
        assert len(s.tasks[x.key].who_has) == len(workers)
        assert np.array_equal(await c.gather(x), array(3_000_000))
        y = hosted(c, 1_000_000, seed=1)
        assert np.array_equal(await c.gather(y), array(1_000_000, seed=1))
    assert sizes == [64 * 1024] * 3
    await until(lambda: [row["status"] for row in plugin(s).directory.log()].count("finished"))
    [row] = [r for r in await hoplite.transfers(client=c) if r["source"] == c.id]
    assert row["path"] == path
    await nothing_is_left(c, s)
    for worker in workers:
        assert worker.address not in c.rpc.available or not c.rpc.available[worker.address]


@hoplite_cluster()
async def test_there_and_back(c, s, *workers):
    await c.register_plugin(Hoplite())
    firewall(c, s)
    await there_and_back(c, s, workers)


@hoplite_cluster()
async def test_connections_are_used_again(c, s, *workers):
    await c.register_plugin(Hoplite())
    firewall(c, s)
    x = hosted(c, 1_000_000)
    await c.gather(x)
    before = len(c.rpc.available[s.address]), len(s.rpc._created)
    for _ in range(5):
        assert np.array_equal(await c.gather(x), array(1_000_000))
    assert (len(c.rpc.available[s.address]), len(s.rpc._created)) == before


@gen_cluster(
    client=True,
    nthreads=[("tls://127.0.0.1", 1)] * 2,
    security=Security.temporary(),
    config={"hoplite.min-size": 1000},
)
async def test_tls(c, s, *workers):
    await c.register_plugin(Hoplite())
    firewall(c, s)
    await there_and_back(c, s, workers, "tls stream, relayed")


@gen_test(timeout=60)
async def test_messages():
    async with (
        LocalCluster(
            n_workers=2,
            processes=False,
            protocol="ws://",
            asynchronous=True,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        await c.wait_for_workers(2)
        await c.register_plugin(Hoplite(min_size=1000))
        s = cluster.scheduler
        firewall(c, s)
        await there_and_back(c, s, cluster.workers.values(), "ws messages, relayed")


@pytest.mark.parametrize("source", ["tcp://", "ws://"])
@pytest.mark.parametrize("target", ["tcp://", "ws://"])
@gen_test()
async def test_between_streams_and_messages(source, target):
    async with contextlib.AsyncExitStack() as stack:

        async def pair(protocol):
            accepted = asyncio.get_running_loop().create_future()
            over = asyncio.Event()

            async def handle(comm):
                accepted.set_result(comm)
                await over.wait()

            listener = await stack.enter_async_context(listen(f"{protocol}127.0.0.1", handle))
            comm = await connect(listener.contact_address)
            stack.callback(comm.abort)
            stack.callback(over.set)
            stack.callback((await accepted).abort)
            return comm, await accepted

        (sender, inlet), (outlet, receiver) = await pair(source), await pair(target)
        data = array(300_000).tobytes()
        with windows(10_000) as sizes:
            carrying = asyncio.create_task(Carrier(inlet, outlet, len(data)).run())
            if source == "tcp://":
                sender.stream.write(data)
            else:
                for i in range(0, len(data), 7_000):
                    await sender.write({"bytes": data[i : i + 7_000]})
            got = b""
            while len(got) < len(data):
                if target == "tcp://":
                    got += await receiver.stream.read_bytes(100_000, partial=True)
                else:
                    got += (await receiver.read())["bytes"]
            await carrying
        assert got == data and sizes == [10_000]


@pytest.mark.parametrize("how", ["each time", "client"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_if_the_user_says_so(c, s, a, b, how):
    await c.register_plugin(Hoplite())
    no_whole_objects(s)
    relayed = []
    plain = s.handlers["hoplite_relay"]

    async def relay(comm, worker):
        relayed.append(worker)
        return await plain(comm, worker)

    s.handlers["hoplite_relay"] = relay
    x = await c.scatter(array())
    assert np.array_equal(await c.gather(x), array())
    assert np.array_equal(await c.gather(x, direct=True), array())
    assert not relayed, "where nothing is said, and it is possible, directly"
    if how == "client":
        direct, c.direct_to_workers = None, False
    else:
        direct = False
    y = await c.scatter(array(seed=1), direct=direct)
    assert len(relayed) == 1
    assert np.array_equal(await c.gather(y, direct=direct), array(seed=1))
    assert len(relayed) == 2
    await nothing_is_left(c, s)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_dies_in_the_middle_of_a_gather(c, s, a, b):
    await c.register_plugin(Hoplite())
    x = hosted(c, 900_000, worker=a.address)
    await wait(x)
    offsets, fetches = [], []

    class Watched(Fetch):
        def __init__(self, *args):
            super().__init__(*args)
            fetches.append(self)

    # Of a serialisation of its own, by which the rest is got only if it begins equally.
    b.update_data({x.key: array(900_000)}, stimulus_id="test")
    plain = b.handlers["hoplite_pull"]

    async def serve(comm, offset, **message):
        offsets.append(offset)
        return await plain(comm, offset=offset, **message)

    async def die(comm, key, **message):
        async with a.plugins["hoplite"].shelf.reading(key) as buffer:
            await comm.write({"status": "OK", "offset": 0, **buffer.layout.to_message()})
            await comm.stream.write(first_blocks(buffer, 512 * 2**10))
            await until(lambda: fetches[0].received == 512 * 2**10)
        s.add_replica(s.tasks[x.key], s.workers[b.address])
        await s.remove_worker(a.address, stimulus_id="test")
        comm.abort()
        return Status.dont_reply

    a.handlers["hoplite_pull"], b.handlers["hoplite_pull"] = die, serve
    firewall(c, s)
    no_whole_objects(s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "Fetch", Watched)
        assert np.array_equal(await c.gather(x), array(900_000))
    assert offsets == [512 * 2**10] * 2, "first it asks what the receiver has"
    await nothing_is_left(c, s)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_dies_in_the_middle_of_a_scatter(c, s, *workers):
    await c.register_plugin(Hoplite())
    died = []

    def die_first(worker, plain):
        async def accept(comm, layout, **message):
            if died:
                return await plain(comm, layout=layout, **message)
            died.append(worker)
            await comm.write({"status": "OK", "share": False})
            await comm.stream.read_bytes(500_000)
            await s.remove_worker(worker.address, stimulus_id="test")
            comm.abort()
            return Status.dont_reply

        return accept

    for worker in workers:
        worker.handlers["hoplite_push"] = die_first(worker, worker.handlers["hoplite_push"])
    firewall(c, s)
    no_whole_objects(s)
    x = await c.scatter(array(30_000_000))
    assert len(died) == 1 and died[0].address not in s.workers
    assert np.array_equal(await c.gather(x), array(30_000_000))
    await nothing_is_left(c, s)


@pytest.mark.parametrize("way", ["direct", "relayed"])
@pytest.mark.parametrize("when", ["at first", "in the middle"])
@hoplite_cluster(
    nthreads=[("127.0.0.1", 1)] * 2,
    config={"hoplite.min-size": 1000, "hoplite.push-timeout": "2s"},
)
async def test_a_worker_that_falls_silent_in_the_middle_of_a_scatter(c, s, *workers, when, way):
    await c.register_plugin(Hoplite())
    silent, go_on = [], asyncio.Event()

    def silence_first(worker, plain):
        async def accept(comm, layout, **message):
            if silent:
                return await plain(comm, layout=layout, **message)
            silent.append(worker)
            if when == "in the middle":
                await comm.write({"status": "OK", "share": False})
                await comm.stream.read_bytes(500_000)
            await go_on.wait()
            comm.abort()
            return Status.dont_reply

        return accept

    for worker in workers:
        worker.handlers["hoplite_push"] = silence_first(worker, worker.handlers["hoplite_push"])
    if way == "relayed":
        firewall(c, s)
    no_whole_objects(s)
    x = await c.scatter(array(60_000_000))
    assert len(silent) == 1
    assert silent[0].address not in {ws.address for ws in s.tasks[x.key].who_has}
    assert np.array_equal(await c.gather(x), array(60_000_000))
    await nothing_is_left(c, s)
    go_on.set()


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_that_the_scheduler_cannot_reach_either(c, s, a, b):
    await c.register_plugin(Hoplite())
    firewall(c, s)
    plain = s.rpc.connect
    refused = []

    async def connect(address, timeout=None):
        if relaying():
            refused.append(address)
            raise OSError("no route to host")
        return await plain(address, timeout)

    s.rpc.connect = connect
    with pytest.raises(TransferError, match=r"cannot reach tcp://.* no route to host") as caught:
        await c.scatter({"x": array()})
    assert set(caught.value.tried) == {a.address, b.address}
    x = hosted(c)
    refused.clear()
    assert np.array_equal(await c.gather(x), array()), "by Dask's own way"
    assert len(refused) == 1
    await nothing_is_left(c, s)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_what_a_relay_refuses(c, s, a):
    await c.register_plugin(Hoplite())
    relay = Relay(c.rpc, s.address)
    comm = await relay.connect("tcp://10.9.8.7:65")
    await comm.write({"op": "hoplite_pull", "key": "x"})
    answer = await comm.read()
    assert answer["status"] == "gone" and "10.9.8.7:65: " in answer["reason"]
    relay.reuse("tcp://10.9.8.7:65", comm)
    comm = await relay.connect(a.address)
    await comm.write({"op": "terminate"})
    with pytest.raises(CommClosedError):
        await comm.read()
    relay.reuse(a.address, comm)
    assert a.status == Status.running
    await nothing_is_left(c, s)


@pytest.mark.parametrize("what", ["gather", "scatter"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_client_that_gives_up(c, s, a, what):
    await c.register_plugin(Hoplite())
    firewall(c, s)
    x = hosted(c)
    await wait(x)
    began, left = asyncio.Event(), asyncio.Event()

    async def say_nothing(comm, **message):
        began.set()
        with contextlib.suppress(OSError):
            await comm.read()
        left.set()
        return Status.dont_reply

    a.handlers["hoplite_pull"] = a.handlers["hoplite_push"] = say_nothing
    doing = asyncio.create_task(c.gather(x) if what == "gather" else c.scatter(array(seed=1)))
    await began.wait()
    assert relaying()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    await left.wait()
    await nothing_is_left(c, s)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_many_at_a_time(c, s, a, b):
    await c.register_plugin(Hoplite())
    firewall(c, s)
    no_whole_objects(s)
    values = [array(500_000, seed=i) for i in range(20)]
    with windows() as sizes:
        futures = await c.scatter(values)
        for value, got in zip(values, await c.gather(futures), strict=True):
            assert np.array_equal(value, got)
    assert len(sizes) == 40
    await nothing_is_left(c, s)


BEHIND_A_FIREWALL = """
import sys
import numpy as np
import dask_hoplite as hoplite
from distributed import Client

with Client(sys.argv[1]) as client:
    client.wait_for_workers(2, timeout=60)
    client.register_plugin(hoplite.Hoplite())
    values = np.arange(2_000_000)
    x = client.scatter(values, broadcast=True)
    assert np.array_equal(client.gather(x), values)
    assert np.array_equal(client.submit(np.negative, x).result(), -values)
    print(len(client.who_has(x)[x.key]), {t["path"] for t in hoplite.transfers()})
"""


@pytest.mark.lab
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_on_a_host_from_which_only_the_schedulers_is_reached(tmp_path):
    with Laboratory(hosts=2, rate="1gbit") as lab, Cluster(lab, "hoplite", tmp_path) as cluster:
        for host in range(2):
            lab.run("client", ["ip", "route", "add", "blackhole", lab.address(host)])
        lab.run("client", ["ip", "route", "get", lab.address("scheduler")])
        python = ["env", "DASK_HOPLITE__CONNECT_TIMEOUT=500ms", sys.executable]
        said = lab.run("client", [*python, "-c", BEHIND_A_FIREWALL, cluster.scheduler])
        last = said.splitlines()[-1]
        assert last.startswith("2 ") and "'tcp stream, relayed'" in last
        entered, left = lab.counters("client")
        assert entered > 32_000_000 and left > 16_000_000
