"""The same data again and again, without a pause; and that nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import numpy as np
import pytest
from distributed import Client

import dask_hoplite as hoplite
from benchmarks.churn import CASES, Churn
from dask_hoplite import Hoplite
from tests.helpers import array, hoplite_cluster, plugin, until


def left(s, workers):
    """What is left of any object: in Dask, and in Hoplite."""
    hoplite = plugin(s)
    found = {"tasks": s.tasks, "puts": hoplite.puts.pending, "trees": hoplite.directory.trees}
    found["wishes"] = hoplite.wishes._wishes
    for worker in workers:
        extension = worker.plugins["hoplite"]
        things = {"data": worker.data, "tasks": worker.state.tasks}
        things |= {"incoming": extension.puller.incoming, "expected": extension.arrivals.expected}
        things |= {"shelf": extension.shelf.entries, "awaited": extension.shelf.awaited}
        found |= {f"{name} of {worker.address}": keys for name, keys in things.items()}
    return {name: list(keys) for name, keys in found.items() if keys}


@pytest.mark.parametrize("case", CASES)
@hoplite_cluster(timeout=100)
async def test_without_a_pause(c, s, *workers, case):
    rounds = 200 if case == "scatter to all, use, drop" else 40
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        for client in (c, other):
            await client.register_plugin(Hoplite())
        churn = Churn([c, other], array(), timeout=30)
        assert await churn.rounds(case, rounds) == rounds
        assert not churn.errors
        gc.collect()  # errors refer to futures
        with suppress(AssertionError):
            await until(lambda: not left(s, workers))
        assert left(s, workers) == {}


@hoplite_cluster()
async def test_failures_are_counted(c, s, *workers):
    churn = Churn([c, c], array(), timeout=0.2)
    c.submit = None  # type: ignore[method-assign]
    assert await churn.rounds("scatter, use, drop", 2) == 2
    assert churn.errors == {"TypeError": 2}
    c.submit = lambda *args, **kwargs: asyncio.Event().wait()
    assert await churn.rounds("scatter, use, drop", 10) == 3, "given up"
    assert churn.errors == {"TypeError": 2, "TimeoutError": 3}


@hoplite_cluster()
async def test_drop_during_a_broadcast_and_the_same_again(c, s, *workers):
    """What comes of the first must not touch the second, which is another generation."""
    await c.register_plugin(Hoplite())
    value = array(20_000_000)
    for n in range(10):
        [x] = await c.scatter([value])
        copying = asyncio.create_task(hoplite.broadcast(x, client=c))
        if n % 2:
            await until(lambda: any(w.plugins["hoplite"].puller.incoming for w in workers))
        x.release()
        [again] = await c.scatter([value], broadcast=True)
        assert len(s.tasks[again.key].who_has) == 4
        assert await c.submit(np.sum, again, pure=False) == value.sum(dtype=int)
        await asyncio.wait({copying})
        copying.exception()
        del x, again, copying
    await until(lambda: not s.tasks and not any(w.data for w in workers))
    assert not plugin(s).wishes and not plugin(s).puts.pending
