"""Tasks that are submitted together."""

from __future__ import annotations

import asyncio
from operator import add

import pytest
from distributed.comm.core import CommClosedError
from distributed.utils_test import gen_cluster

from dask_hoplite.batch import Batch
from tests.helpers import until


@gen_cluster(client=True)
async def test_one_graph(c, s, *workers):
    """Each task has its annotations, and may take others of the batch."""
    batch = Batch(c)
    wanted = [worker.address for worker in workers]
    one = batch.submit(add, 1, 2, key="one", workers=wanted[:1], priority=3)
    two = batch.submit(add, one, 3, key="two", workers=wanted[1:])
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
    await until(lambda: not s.tasks)


@gen_cluster(client=True, nthreads=[])
async def test_what_cannot_be_sent(c, s):
    """Its future has the error."""
    batch = Batch(c)
    bad = batch.submit(id, asyncio.get_running_loop(), key="bad")
    with pytest.raises(TypeError, match="serialize"):
        await bad
    await c.close()
    late = batch.submit(add, 1, 2, key="late")
    await late._state.wait()
    assert late.status == "error"
    assert isinstance(late._state.exception, CommClosedError)
