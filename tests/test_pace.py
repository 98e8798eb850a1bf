"""For how long a client's messages to the scheduler gather."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from distributed import Client
from distributed.batched import BatchedSend
from distributed.utils_test import gen_test

from dask_hoplite import Hoplite
from dask_hoplite.pace import FIRST, STEPS, Pace
from tests.helpers import hoplite_cluster, until


@gen_test()
async def test_each_batch_of_a_row_gathers_for_longer():
    stream, pace = BatchedSend(interval="10 ms"), Pace()
    seen = []
    for stream.batch_count in range(40, 48):
        stream.next_deadline = None if stream.batch_count == 40 else 1.0
        pace.follow(stream)
        pace.follow(stream)  # of the same batch
        seen.append(stream.interval)
    assert seen == pytest.approx([FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, *[0.01] * 4])
    stream.next_deadline = None
    pace.follow(stream)
    assert stream.interval == FIRST, "after a silence"
    other = BatchedSend(interval="2 ms")
    other.batch_count, other.next_deadline = STEPS + 1, 1.0
    pace.follow(other)
    assert stream.interval == 0.01, "the former one is as it was"
    assert other.interval == 0.002
    other.next_deadline = None
    pace.follow(other)
    pace.stop()
    assert other.interval == 0.002


@hoplite_cluster()
async def test_a_client_that_comes_back_has_another_stream(c, s, *workers):
    await c.register_plugin(Hoplite())
    former = c.scheduler_comm
    former.abort()
    await until(lambda: c.status == "running" and c.scheduler_comm not in (None, former))
    assert await c.submit(int, 7) == 7
    assert c.scheduler_comm.interval < former.interval


@gen_test()
async def test_a_client_is_not_kept():
    async with await Client(n_workers=0, processes=False, asynchronous=True) as c:
        await c.register_plugin(Hoplite())
        ref = weakref.ref(c)
    del c
    await asyncio.sleep(0)
    await until(lambda: gc.collect() >= 0 and ref() is None)
