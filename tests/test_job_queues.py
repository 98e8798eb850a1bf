"""Clusters of dask-jobqueue, whose jobs come late, and end: with its local queue."""

from __future__ import annotations

import asyncio
import pathlib
import re
from contextlib import asynccontextmanager

import dask
import dask_jobqueue
import numpy as np
import pytest
from dask_jobqueue.local import LocalCluster as JobQueue
from dask_jobqueue.slurm import SLURMJob
from distributed import Client, Worker
from distributed.utils_test import gen_cluster, gen_test

import dask_hoplite as hoplite
from dask_hoplite import Hoplite
from tests.helpers import array, hoplite_cluster, plugin, until

LARGE = 1_000_000

#: Dask's tests forget what dask-jobqueue has set as it was imported.
CONFIG = {
    "jobqueue": dask.config.get("jobqueue"),
    "distributed.scheduler.preload": ["dask_hoplite"],
}


@asynccontextmanager
async def job_queue(**options):
    """A cluster without jobs, whose scheduler has read the configuration, and a client."""
    with dask.config.set(CONFIG):
        async with (
            JobQueue(
                cores=1,
                processes=1,
                memory="1GiB",
                asynchronous=True,
                scheduler_options={"dashboard_address": ":0"},
                **options,
            ) as cluster,
            Client(cluster, asynchronous=True) as c,
        ):
            yield cluster, c


@gen_test(timeout=90)
async def test_jobs_that_start_late_get_what_was_broadcast():
    async with job_queue(interface="lo") as (cluster, c):
        with pytest.raises(TimeoutError, match="none of 0 known workers"):
            await hoplite.broadcast(array(LARGE), client=c, timeout=0.1)
        waiting = asyncio.create_task(hoplite.broadcast(array(LARGE), client=c, timeout=60))
        cluster.scale(jobs=1)
        x = await waiting
        s = cluster.scheduler
        assert len(s.tasks[x.key].who_has) == 1
        cluster.scale(jobs=2)
        await until(lambda: len(s.tasks[x.key].who_has) == 2, timeout=60)
        assert all(address.startswith("tcp://127.0.0.1:") for address in [s.address, *s.workers])
        totals = [c.submit(np.sum, x, workers=[w], dtype=int, pure=False) for w in s.workers]
        assert await c.gather(totals) == [array(LARGE).sum(dtype=int)] * 2
        assert {row["status"] for row in plugin(s).directory.log()} == {"finished"}


@gen_test(timeout=90)
async def test_a_job_that_reaches_its_lifetime_hands_over():
    async with job_queue() as (cluster, c):
        s = cluster.scheduler
        cluster.scale(jobs=1)
        everywhere = await hoplite.broadcast(array(LARGE), client=c, timeout=60)
        [stays] = s.workers
        # Long enough for the job to be there, and to get its data, on a machine that is busy.
        lifetime = ["--lifetime", "8s", "--lifetime-stagger", "1s"]
        cluster.new_spec["options"]["worker_extra_args"] = lifetime
        cluster.scale(jobs=2)
        await until(lambda: len(s.workers) == 2, timeout=60)
        [ending] = s.workers.keys() - {stays}
        values = [array(LARGE, seed) for seed in range(6)]
        futures = await c.scatter(values, workers=[ending], hash=False)

        expected = [v.sum(dtype=int) + array(LARGE)[0] for v in values]
        while ending in s.workers:  # work goes on, also where it is about to end
            results = c.map(lambda v, x: v.sum(dtype=int) + x[0], futures, x=everywhere, pure=False)
            assert await c.gather(results) == expected
        assert list(s.workers) == [stays]
        assert all(map(np.array_equal, await c.gather(futures), values))
        assert np.array_equal(await everywhere, array(LARGE))


@pytest.mark.parametrize("large", [True, False])
@gen_test(timeout=90)
async def test_adapting_from_zero(large):
    n = LARGE if large else 10
    async with job_queue() as (cluster, c):
        cluster.adapt(minimum_jobs=0, maximum_jobs=1, interval="50ms")
        x = await hoplite.broadcast(array(n), client=c, timeout=60)
        assert np.array_equal(await x, array(n))
        assert len(cluster.scheduler.workers) == 1
        del x
        await until(lambda: not cluster.scheduler.workers, timeout=30)


@gen_cluster(client=True, nthreads=[])
async def test_demand_of_data_that_wait_for_a_worker(c, s):
    await c.register_plugin(Hoplite())
    puts = plugin(s).puts
    for n in (LARGE, 10):  # what is large is placed, what is small goes with the request
        assert s.adaptive_target() == 0
        waiting = asyncio.create_task(c.scatter(array(n), timeout=60))
        await until(lambda: puts.waiting)
        assert s.adaptive_target() == 1 == await c.scheduler.adaptive_target()
        async with Worker(s.address, nthreads=1):
            assert np.array_equal(await (await waiting), array(n))
            assert not puts.waiting
    await c.unregister_scheduler_plugin("hoplite")
    assert "adaptive_target" not in s.__dict__


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_that_data_are_sent_to_are_not_scaled_down(c, s, a, b):
    await c.register_plugin(Hoplite())
    assert set(s.workers_to_close(n=2)) == {a.address, b.address}
    placement = await plugin(s).puts.place(c.id, {"x": 10_000}, timeout=1)
    [(root, _)] = placement.values()
    assert set(s.workers_to_close(n=2)) == {a.address, b.address} - {root}
    plugin(s).puts.abort(["x"], "test")
    assert set(s.workers_to_close(n=2)) == {a.address, b.address}


class Slurm(JobQueue):
    """In place of a SLURM cluster: checks the options, and runs small jobs here."""

    def __init__(self, *, interface: str, **options):
        SLURMJob(scheduler="tcp://127.0.0.1:8786", name="x", interface="lo", **options)
        super().__init__(
            cores=1,
            processes=1,
            memory="1GiB",
            interface="lo",
            worker_extra_args=options["worker_extra_args"],
            scheduler_options={"dashboard_address": ":0"},
        )

    def adapt(self, minimum_jobs: int, maximum_jobs: int):
        return super().adapt(minimum_jobs=minimum_jobs, maximum_jobs=1, interval="50ms")


def test_the_example_of_the_documentation(capsys, monkeypatch):
    page = pathlib.Path(__file__).parent.parent / "docs" / "job-queues.md"
    [example] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setattr(dask_jobqueue, "SLURMCluster", Slurm)
    before = dask.config.get("distributed.scheduler.preload", [])
    with dask.config.set(CONFIG):
        exec(example, {})
        dask.config.set({"distributed.scheduler.preload": before})
    assert float(capsys.readouterr().out) == pytest.approx(0.5, abs=0.05)
