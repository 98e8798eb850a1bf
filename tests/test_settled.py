"""Results whose history is forgotten."""

from __future__ import annotations

import pytest
from distributed import wait
from distributed.client import FutureCancelledError

from dask_hoplite import Hoplite, ObjectLostError
from tests.helpers import array, hoplite_cluster, hosted, until
from tests.test_collectives import nothing_left, same


async def chain(c, workers):
    """What depends on something that nobody else wants."""
    first = hosted(c, worker=workers[0].address)
    second = c.submit(lambda x: x + 1, first, workers=[workers[0].address])
    await wait(second)
    return first.key, second


@hoplite_cluster()
async def test_what_it_was_made_of_is_forgotten(c, s, *workers):
    await c.register_plugin(Hoplite())
    first, second = await chain(c, workers)
    assert first in s.tasks
    assert await c.scheduler.hoplite_settle(key=second.key)
    key = second.key
    await until(lambda: set(s.tasks) == {key})
    assert s.tasks[second.key].run_spec is None
    assert await c.scheduler.hoplite_settle(key=second.key), "twice does no harm"
    third = c.submit(lambda x: x + 1, second, workers=[workers[1].address])
    assert same(await third, array() + 2)
    del second, third
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_what_others_want_stays(c, s, *workers):
    await c.register_plugin(Hoplite())
    first = hosted(c)
    second, other = c.submit(lambda x: x + 1, first), c.submit(lambda x: x + 2, first)
    await wait([second, other])
    key = first.key
    del first
    assert await c.scheduler.hoplite_settle(key=second.key)
    assert key in s.tasks and same(await c.submit(lambda x: x, other), array() + 2)
    assert await c.scheduler.hoplite_settle(key=other.key)
    await until(lambda: key not in s.tasks)
    wanted = hosted(c)
    third = c.submit(lambda x: x + 1, wanted)
    await wait(third)
    assert await c.scheduler.hoplite_settle(key=third.key)
    assert same(await wanted, array())
    del second, other, third, wanted
    await nothing_left(s, workers)


@hoplite_cluster()
async def test_lost(c, s, *workers):
    """It cannot be made again, and whoever wants it learns of that."""
    await c.register_plugin(Hoplite())
    _, second = await chain(c, workers)
    assert await c.scheduler.hoplite_settle(key=second.key)
    await workers[0].close()
    with pytest.raises((ObjectLostError, FutureCancelledError)):
        await c.submit(lambda x: x, second)


@hoplite_cluster()
async def test_what_is_not_there_is_not_settled(c, s, *workers):
    await c.register_plugin(Hoplite())
    bad = c.submit(lambda: 1 / 0)
    await wait(bad)
    for key in (bad.key, "nothing"):
        assert not await c.scheduler.hoplite_settle(key=key)
