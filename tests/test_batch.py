"""Tasks that are submitted together."""

from __future__ import annotations

import asyncio
from operator import add

import pytest
from distributed.comm.core import CommClosedError
from distributed.utils_test import gen_cluster, gen_test

from dask_hoplite.batch import Batch
from dask_hoplite.transfer.patience import stop


@gen_cluster(client=True)
async def test_one_graph(c, s, *workers):
    """Each task has its annotations, and may take others of the batch."""
    batch = Batch(c)
    wanted = [worker.address for worker in workers]
    one = batch.submit(add, 1, 2, key="one", workers=wanted[:1], priority=3)
    two = batch.submit(add, one, [one, 3][1], key="two", workers=wanted[1:])
    assert not s.tasks
    assert await two == 6
    assert await one == 3
    assert len([e for _, e in s.get_events(c.id) if e.get("action") == "update-graph"]) == 1
    assert s.tasks["one"].annotations == {"workers": wanted[:1], "priority": 3}
    assert s.tasks["two"].worker_restrictions == set(wanted[1:])
    three = batch.submit(add, two, 1, key="three")
    del two  # before it was sent
    assert await three == 7
    del one, three
    while s.tasks:
        await asyncio.sleep(0.01)


@gen_cluster(client=True, nthreads=[])
async def test_what_cannot_be_sent(c, s):
    """Its future has the error."""
    batch = Batch(c)
    bad = batch.submit(lambda lock: lock, asyncio.get_running_loop(), key="bad")
    with pytest.raises(TypeError, match="serialize"):
        await bad
    await c.close()
    late = batch.submit(add, 1, 2, key="late")
    await late._state.wait()
    assert late.status == "error"
    assert isinstance(late._state.exception, CommClosedError)


@gen_test()
async def test_stopped_twice():
    """Who is cancelled while it stops others has cancelled all of these."""

    async def ends_late():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(ends_late()) for _ in range(3)]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(stop(*tasks))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([*tasks, stopping])
    assert all(task.cancelled() for task in tasks)
