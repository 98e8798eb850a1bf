"""Installing, installing again, joining late, restarting, preloading, uninstalling."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from time import sleep

import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker
from distributed.active_memory_manager import ReduceReplicas
from distributed.client import FutureCancelledError
from distributed.utils_test import gen_test, popen

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, NotInstalledError
from dask_hoplite.scheduler import KeepWishedReplicas
from tests.helpers import array, hoplite_cluster, hosted, plugin, until


def policies(s):
    return {type(policy) for policy in s.extensions["amm"].policies}


def snapshot(s, workers):
    """All that Hoplite replaces, as it is now."""
    return (
        dict(s.handlers),
        dict(s.stream_handlers),
        {name: s.__dict__.get(name) for name in ("scatter", "replicate", "gather_on_worker")},
        s.remove_plugin,
        set(s.extensions),
        policies(s),
        [(w.gather_dep, dict(w.handlers), set(w.plugins)) for w in workers],
    )


@hoplite_cluster()
async def test_uninstalling_puts_everything_back(c, s, *workers):
    before = snapshot(s, workers)
    await c.register_plugin(Hoplite())
    assert policies(s) == {KeepWishedReplicas}
    stream, interval = c.scheduler_comm, c.scheduler_comm.interval
    x = await c.scatter(array(), broadcast=True)
    assert await c.submit(int, 7) == 7
    assert stream.interval < interval, "messages gather for shorter"
    during = snapshot(s, workers)
    assert all(a != b for a, b in zip(before[-1], during[-1], strict=True))
    await c.unregister_scheduler_plugin("hoplite")
    assert snapshot(s, workers) == before
    assert policies(s) == {ReduceReplicas}
    assert not {"_scatter", "_send_to_scheduler_safe"} & c.__dict__.keys()
    assert stream.interval == interval
    assert np.array_equal(await x, array()), "objects are Dask's and stay"
    y = await c.scatter(array(seed=1), broadcast=True)
    assert np.array_equal(await y, array(seed=1))
    with pytest.raises(NotInstalledError, match=r"register_plugin\(Hoplite\(\)\) first"):
        await hoplite.status(client=c)
    await c.register_plugin(Hoplite())
    z = hosted(c, worker=workers[0].address)
    total = c.submit(np.sum, z, workers=[workers[1].address])
    assert await total == array().sum(dtype=int)
    await until(lambda: plugin(s).directory.log())


@hoplite_cluster()
async def test_a_worker_that_breaks_off_while_it_is_installed(c, s, *workers):
    """Others take what is scattered."""

    async def break_off(comm, **kwargs):
        comm.abort()

    first = min(workers, key=lambda worker: worker.address)  # to be chosen
    plain, first.handlers["plugin-add"] = first.handlers["plugin-add"], break_off
    await c.register_plugin(Hoplite())
    first.handlers["plugin-add"] = plain
    await asyncio.wait_for(c.register_plugin(Hoplite()), 5)
    x = await c.scatter(array(), broadcast=True)
    assert np.array_equal(await x, array())
    await c.unregister_scheduler_plugin("hoplite")


@pytest.mark.parametrize("direct", [None, False])
@hoplite_cluster()
async def test_workers_that_all_have_no_hoplite(c, s, *workers, direct):
    """What is scattered goes Dask's own way."""
    await c.register_plugin(Hoplite())
    for worker in workers:
        await worker.plugin_remove(name="hoplite")
    for seed, broadcast in enumerate([True, False]):
        x = await c.scatter(array(seed=seed), broadcast=broadcast, direct=direct)
        assert np.array_equal(await x, array(seed=seed))


@hoplite_cluster()
async def test_a_worker_that_loses_it_between_a_question_and_an_object(c, s, *workers):
    """As one does that closes. Another one takes the object."""
    await c.register_plugin(Hoplite())
    first = min(workers, key=lambda worker: worker.address)
    expect, accept = (first.handlers[f"hoplite_{name}"] for name in ("expect", "push"))

    async def expect_no_more(**message):
        del first.handlers["hoplite_push"]
        return await expect(**message)

    first.handlers["hoplite_expect"] = expect_no_more
    x = await c.scatter(array())
    assert "hoplite_push" not in first.handlers
    assert np.array_equal(await x, array())
    assert x.key not in first.data
    first.handlers |= {"hoplite_expect": expect, "hoplite_push": accept}


@hoplite_cluster()
async def test_closing_the_scheduler_ends_timers_of_reductions(c, s, *workers):
    await c.register_plugin(Hoplite())
    late = c.submit(sleep, 3)
    result = hoplite.reduce([late], timeout=60, client=c)
    result = await result
    await until(lambda: plugin(s).reductions.runs)
    [run] = plugin(s).reductions.runs.values()
    plugin(s).reductions.watch(run)
    await plugin(s).close()
    assert run.watch.cancelled() and all(timer.cancelled() for timer in run.timers)


@hoplite_cluster()
async def test_uninstalling_in_the_middle_leaves_transfers_to_dask(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, 50_000_000, worker=workers[0].address)
    await x
    totals = [c.submit(np.sum, x, workers=[w.address], pure=False) for w in workers]
    await until(lambda: any(w.plugins["hoplite"].puller.incoming for w in workers))
    await c.unregister_scheduler_plugin("hoplite")
    expected = array(50_000_000).sum(dtype=int)
    assert await c.gather(totals) == [expected] * 4


@hoplite_cluster()
async def test_other_clients_notice_that_it_was_uninstalled(c, s, *workers):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as other:
        await other.register_plugin(Hoplite())
        await c.unregister_scheduler_plugin("hoplite")
        x = await other.scatter(array(), broadcast=True)
        assert np.array_equal(await x, array())
        assert "_scatter" not in other.__dict__


@hoplite_cluster()
async def test_registering_many_times_is_a_no_op(c, s, *workers):
    async with Client(s.address, asynchronous=True) as other:
        await asyncio.gather(
            *(client.register_plugin(Hoplite()) for client in (c, other) for _ in range(5))
        )
        first = plugin(s), [w.plugins["hoplite"] for w in workers]
        x = hosted(c, 20_000_000, worker=workers[0].address)
        totals = [c.submit(np.sum, x, workers=[w.address], pure=False) for w in workers]
        await asyncio.gather(
            *(client.register_plugin(Hoplite()) for client in (c, other) for _ in range(5))
        )
        assert await c.gather(totals) == [array(20_000_000).sum(dtype=int)] * 4
        assert (plugin(s), [w.plugins["hoplite"] for w in workers]) == first
        y = await other.scatter(array(), broadcast=True)
        assert len(s.tasks[y.key].who_has) == 4


@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_late_workers_get_it_too(c, s, first):
    await c.register_plugin(Hoplite())
    async with Worker(s.address, nthreads=1) as late:
        assert "hoplite" in late.plugins
        x = hosted(c, worker=first.address)
        assert await c.submit(np.sum, x, workers=[late.address]) == array().sum(dtype=int)
        await until(lambda: plugin(s).directory.bytes_in[late.address])
        del x


@gen_test()
async def test_restart():
    async with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, asynchronous=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        await c.register_plugin(Hoplite(min_size=1000))
        x = await hoplite.broadcast(array(), client=c)
        await c.restart()
        assert x.status == "cancelled"
        with pytest.raises(FutureCancelledError, match=x.key):
            await hoplite.broadcast(x, client=c)
        status = await hoplite.status(client=c)
        assert not status["objects"]
        y = await hoplite.broadcast(array(seed=1), client=c)
        await until(lambda: len(cluster.scheduler.tasks[y.key].who_has) == 2)


@gen_test()
async def test_preload(monkeypatch):
    async with (
        Scheduler(dashboard_address=":0", preload=["dask_hoplite"], port=0) as s,
        Worker(s.address, nthreads=1) as a,
        Worker(s.address, nthreads=1) as b,
        Client(s.address, asynchronous=True) as c,
    ):
        installed = s.plugins["hoplite"]
        assert {"hoplite"} <= set(a.plugins) & set(b.plugins)
        x = hosted(c, 1_000_000, worker=a.address)
        assert await c.submit(np.sum, x, workers=[b.address]) == array(1_000_000).sum(dtype=int)
        await until(lambda: installed.directory.bytes_in[b.address] == 1_000_000)
        await c.register_plugin(Hoplite())
        assert s.plugins["hoplite"] is installed


@hoplite_cluster()
async def test_another_version_on_the_scheduler(c, s, *workers):
    await c.register_plugin(Hoplite())
    hello = s.handlers["hoplite_hello"]

    async def other():
        return {**await hello(), "version": "99.0"}

    s.handlers["hoplite_hello"] = other
    async with Client(s.address, asynchronous=True) as late:
        with pytest.warns(UserWarning, match=r"the scheduler has 99\.0"):
            await late.register_plugin(Hoplite())
        x = await late.scatter(array(), broadcast=True)
        assert np.array_equal(await x, array())
        with pytest.raises(NotInstalledError, match=r"99\.0"):
            await hoplite.status(client=late)
        del x


def test_sync_client_and_current_client():
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        for _ in range(2):  # a notebook's cell, run again
            client.register_plugin(Hoplite(min_size=1000))
        x = hoplite.broadcast(array())
        assert len(client.who_has(x)[x.key]) == 2
        assert np.array_equal(hoplite.gather([x])[0], array())
        futures = hoplite.scatter([array(seed=1), array(seed=2)])
        assert np.array_equal(futures[1].result(), array(seed=2))
        assert hoplite.transfers()
        assert set(hoplite.status()["workers"]) == set(client.nthreads())


def test_command_line_preload():
    with popen(
        [
            sys.executable,
            "-m",
            "dask",
            "scheduler",
            "--port",
            "0",
            "--no-dashboard",
            "--preload",
            "dask_hoplite",
        ],
        capture_output=True,
    ) as process:
        assert process.poll() is None
        for line in process.stdout:
            if b"Scheduler at" in line:
                address = line.decode().split()[-1]
                break
        worker = subprocess.Popen(
            [sys.executable, "-m", "dask", "worker", address, "--no-nanny", "--no-dashboard"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(address) as client:
                client.wait_for_workers(1, timeout=30)
                assert hoplite.status(client=client)["workers"]
        finally:
            worker.terminate()
            worker.wait()
