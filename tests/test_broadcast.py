"""``broadcast``: copies that come, stay, follow new workers, and go."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from distributed import Client, Event, Nanny, Worker
from distributed.client import FutureCancelledError
from distributed.utils_test import gen_cluster
from distributed.worker_state_machine import AcquireReplicasEvent

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, NotInstalledError, ObjectTooLargeError, TransferError
from tests.helpers import array, hoplite_cluster, hosted, plugin, until


def holders(s, future):
    return {ws.address for ws in s.tasks[future.key].who_has or ()}


@hoplite_cluster()
@pytest.mark.parametrize("size", [100_000, 10], ids=["large", "small"])
async def test_of_a_value(c, s, *workers, size):
    await c.register_plugin(Hoplite())
    x = await hoplite.broadcast(array(size), client=c)
    assert holders(s, x) == {w.address for w in workers}
    assert np.array_equal(await x, array(size))
    y = await hoplite.broadcast(array(size), client=c)
    assert y.key != x.key, "each value has a key of its own"
    s.extensions["amm"].run_once()
    s.extensions["amm"].run_once()
    assert len(holders(s, x)) == 4
    del x, y
    await until(lambda: not s.tasks and not any(w.data for w in workers))
    assert not plugin(s).wishes


@hoplite_cluster()
@pytest.mark.parametrize("size", [100_000, 10], ids=["large", "small"])
async def test_of_a_result_touches_neither_client_nor_scheduler(c, s, *workers, size):
    await c.register_plugin(Hoplite())
    x = hosted(c, size, worker=workers[0].address)
    assert await hoplite.broadcast(x, client=c) is x
    assert holders(s, x) == {w.address for w in workers}
    sources = {r["source"] for r in plugin(s).directory.log()}
    assert sources <= {w.address for w in workers}


def make_when_told():
    Event("go").wait()
    return array()


@hoplite_cluster()
async def test_of_a_future_that_is_not_done(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = c.submit(make_when_told)
    broadcasting = asyncio.create_task(hoplite.broadcast(x, client=c))
    await until(lambda: x.key in s.tasks)
    assert not broadcasting.done()
    await Event("go", client=c).set()
    await broadcasting
    assert len(holders(s, x)) == 4


@hoplite_cluster()
async def test_to_some_workers(c, s, *workers):
    await c.register_plugin(Hoplite())
    chosen = [workers[1].address, workers[2].address]
    x = await hoplite.broadcast(array(), workers=chosen, client=c)
    assert holders(s, x) == set(chosen)
    y = hosted(c, worker=workers[0].address)
    await hoplite.broadcast(y, workers=chosen, client=c)
    assert holders(s, y) == {*chosen, workers[0].address}
    z = await hoplite.broadcast(array(), workers=workers[3].address, client=c)
    assert holders(s, z) == {workers[3].address}
    async with Worker(s.address):
        await until(lambda: len(s.workers) == 5)
        assert holders(s, x) == set(chosen), "meant for these and no others"


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_that_join_are_fed(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = await hoplite.broadcast(array(), client=c)
    y = await c.scatter(array(seed=1), broadcast=True)
    tiny = await hoplite.broadcast(1, client=c)
    async with Worker(s.address), Worker(s.address):
        await until(lambda: all(len(holders(s, f)) == 4 for f in (x, y, tiny)))
    await until(lambda: len(s.workers) == 2)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_workers_that_join_in_the_middle_are_fed(c, s, *workers):
    await c.register_plugin(Hoplite())
    broadcasting = asyncio.create_task(hoplite.broadcast(array(60_000_000), client=c))
    await until(lambda: plugin(s).directory.trees)
    async with Worker(s.address) as late:
        x = await broadcasting
        await until(lambda: late.address in holders(s, x))


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1)] * 2,
    Worker=Nanny,
    config={"hoplite.min-size": 1000},
)
async def test_a_worker_that_is_restarted_is_fed_again(c, s, *nannies):
    await c.register_plugin(Hoplite())
    x = await hoplite.broadcast(array(), client=c)
    before = holders(s, x)
    await c.restart_workers([nannies[0].worker_address])
    await until(lambda: len(holders(s, x)) == 2, timeout=30)
    assert holders(s, x) != before
    assert np.array_equal(await x, array())


@hoplite_cluster()
async def test_a_wish_is_fulfilled_whenever_its_object_comes(c, s, *workers):
    """As after a loss, when the object is computed again."""
    await c.register_plugin(Hoplite())
    x = c.submit(make_when_told)
    await until(lambda: x.key in s.tasks)
    plugin(s).wishes.add(x.key, None)
    await Event("go", client=c).set()
    await until(lambda: len(holders(s, x)) == 4)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_wish_for_a_worker_that_has_just_left(c, s, a, b, last):
    """Dask has not noticed yet. It is nobody's error, and the others get theirs."""
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=a.address)
    await x
    plugin(s).wishes.add(x.key, None)
    s.stream_comms[b.address].comm.abort()
    plugin(s).fulfil([x.key])
    await until(lambda: last.address in holders(s, x))


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_copy_that_dask_begins_to_fetch_itself_meanwhile(c, s, a, b):
    """Of two that bring an object to a worker, Dask's state machine is the one that puts it."""
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=a.address)
    await x
    b_side = b.plugins["hoplite"]
    pull = b_side.puller.pull

    async def overtaken(key, nbytes):
        b_side.puller.pull = pull
        pulled = await pull(key, nbytes)
        b.handle_stimulus(
            AcquireReplicasEvent(
                who_has={key: [a.address]}, nbytes={key: nbytes}, stimulus_id="test"
            )
        )
        assert b.state.tasks[key].state == "flight"
        return pulled

    b_side.puller.pull = overtaken
    assert await b_side.acquire({x.key: 100_000}) == {"status": "OK"}
    assert np.array_equal(b.data[x.key], array())
    await until(lambda: len(plugin(s).directory.log()) == 1)  # received once
    assert not b_side.landing and not b_side.puller.incoming


@hoplite_cluster()
async def test_release_in_the_middle(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, 80_000_000, worker=workers[0].address)
    await x
    broadcasting = asyncio.create_task(hoplite.broadcast(x, client=c))
    await until(lambda: any(w.plugins["hoplite"].puller.incoming for w in workers))
    key = x.key
    c._send_to_scheduler({"op": "client-releases-keys", "keys": [key], "client": c.id})
    with pytest.raises(TransferError, match=f"{key}.*released"):
        await asyncio.wait_for(broadcasting, 10)
    await until(lambda: not any(w.plugins["hoplite"].puller.incoming for w in workers))
    await until(lambda: not any(key in w.data for w in workers))
    await until(lambda: not any(w.plugins["hoplite"].shelf.entries for w in workers))
    assert key not in plugin(s).directory.trees
    assert key not in plugin(s).wishes


@pytest.mark.parametrize("size", [10, 100_000])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_release_before_a_copy_is_known(c, s, a, b, size):
    await c.register_plugin(Hoplite())
    x = hosted(c, size, worker=a.address)
    await x
    copied, go_on = asyncio.Event(), asyncio.Event()

    def pause(plain):
        async def get_and_pause(**message):
            answer = await plain(**message)
            copied.set()
            await go_on.wait()
            return answer

        return get_and_pause

    for name in ("gather", "hoplite_acquire"):
        b.handlers[name] = pause(b.handlers[name])
    broadcasting = asyncio.create_task(hoplite.broadcast(x, client=c))
    await copied.wait()
    assert b.data
    c._send_to_scheduler({"op": "client-releases-keys", "keys": [x.key], "client": c.id})
    await until(lambda: not s.tasks)
    go_on.set()
    with pytest.raises(TransferError, match="released"):
        await broadcasting
    await until(lambda: not a.data and not b.data)


@hoplite_cluster()
async def test_two_clients(c, s, *workers):
    await c.register_plugin(Hoplite())
    async with Client(s.address, asynchronous=True) as other:
        await other.register_plugin(Hoplite())
        x = await hoplite.broadcast(array(), client=c)
        with pytest.raises(ValueError, match=f"{x.key}.*{c.id}"):
            await hoplite.broadcast(x, client=other)
        with pytest.raises(ValueError, match=x.key):
            await hoplite.gather([x], client=other)
        expected = array().sum(dtype=int)

        async def antiphase(client):
            for _ in range(20):
                [y] = await client.scatter([array(seed=9)], broadcast=True)
                assert len(holders(s, y)) == 4
                await client.submit(np.sum, y, pure=False)
                del y

        await asyncio.gather(antiphase(c), antiphase(other))
        assert await other.submit(np.sum, await other.scatter(array())) == expected


# Bad input


@hoplite_cluster()
async def test_without_the_plugin(c, s, *workers):
    for call in (
        lambda: hoplite.broadcast(1, client=c),
        lambda: hoplite.scatter([1], client=c),
        lambda: hoplite.gather([], client=c),
        lambda: hoplite.transfers(client=c),
        lambda: hoplite.status(client=c),
    ):
        with pytest.raises(NotInstalledError, match="register_plugin"):
            await call()


@hoplite_cluster()
async def test_unknown_worker(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c)
    for value in (x, array()):
        with pytest.raises(ValueError, match=r"tcp://10\.9\.8\.7:65"):
            await hoplite.broadcast(value, workers=["tcp://10.9.8.7:65"], client=c)
    with pytest.raises(ValueError, match=r"tcp://10\.9\.8\.7:65"):
        await c.scatter(array(), workers=["tcp://10.9.8.7:65"], broadcast=True)
    assert not plugin(s).puts.pending and not plugin(s).wishes


@hoplite_cluster()
async def test_released_and_erred_futures(c, s, *workers):
    await c.register_plugin(Hoplite())

    def fail():
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await hoplite.broadcast(c.submit(fail), client=c)
    x = hosted(c)
    await x
    x.release()
    with pytest.raises((FutureCancelledError, TransferError), match=x.key):
        await hoplite.broadcast(x, client=c)
    y = c.submit(asyncio.sleep, 100)
    broadcasting = asyncio.create_task(hoplite.broadcast(y, client=c))
    await until(lambda: y.key in s.tasks)
    await y.cancel()
    with pytest.raises((FutureCancelledError, TransferError), match=y.key):
        await asyncio.wait_for(broadcasting, 10)


class Unpicklable:
    def __init__(self):
        self.payload = array()

    def __sizeof__(self):
        return 100_000

    def __reduce__(self):
        raise RuntimeError("not to be pickled")


@hoplite_cluster()
async def test_objects_that_cannot_be_pickled(c, s, *workers):
    await c.register_plugin(Hoplite())
    with pytest.raises(Exception, match=r"not to be pickled|Could not serialize|pickle"):
        await hoplite.broadcast(Unpicklable(), client=c)
    assert not s.tasks
    x = c.submit(Unpicklable, workers=[workers[0].address])
    y = c.submit(lambda x: 1, x, workers=[workers[1].address])
    with pytest.raises(Exception, match=r"not to be pickled|Could not serialize|pickle"):
        await asyncio.wait_for(y, 20)  # plain Dask waits for ever
    z = c.submit(lambda: 2, workers=[workers[1].address])
    assert await z == 2


class Poison:
    def __init__(self):
        self.payload = array()

    def __reduce__(self):
        return _explode, (self.payload,)

    def __sizeof__(self):
        return 100_000


def _explode(payload):
    raise ZeroDivisionError("poison")


@hoplite_cluster()
async def test_objects_that_cannot_be_unpickled(c, s, *workers):
    await c.register_plugin(Hoplite())
    x = c.submit(Poison, workers=[workers[0].address])
    y = c.submit(lambda x: 1, x, workers=[workers[1].address])
    with pytest.raises(ZeroDivisionError, match="poison"):
        await asyncio.wait_for(y, 20)
    with pytest.raises(ZeroDivisionError, match="poison"):
        await asyncio.wait_for(c.gather(x), 20)
    assert not workers[1].plugins["hoplite"].puller.incoming
    await until(lambda: x.key not in plugin(s).directory.trees)


@hoplite_cluster(worker_kwargs={"memory_limit": "1 GiB"}, nthreads=[("127.0.0.1", 1)] * 2)
async def test_objects_larger_than_a_limit(c, s, a, b):
    await c.register_plugin(Hoplite())
    small = s.workers[b.address]
    small.memory_limit = 50_000
    with pytest.raises(ObjectTooLargeError, match=rf"100000 bytes.*{b.address}.*50000"):
        await hoplite.broadcast(array(), workers=[b.address], client=c)
    x = hosted(c, worker=a.address)
    with pytest.raises(ObjectTooLargeError, match=rf"{b.address}.*50000"):
        await hoplite.broadcast(x, workers=[b.address], client=c)
    y = await hoplite.broadcast(array(), client=c)
    assert holders(s, y) == {a.address}, "the others are served"
    assert not plugin(s).puts.pending


@hoplite_cluster(nthreads=[])
async def test_no_worker(c, s):
    await c.register_plugin(Hoplite())
    with pytest.raises(TimeoutError, match="none of 0 known workers"):
        await hoplite.broadcast(array(), client=c, timeout=0.1)
    with pytest.raises(TimeoutError, match="none of 0 known workers"):
        await c.scatter(array(), timeout="100ms")
    waiting = asyncio.create_task(hoplite.broadcast(array(), client=c, timeout=30))
    async with Worker(s.address), Worker(s.address):
        await waiting
        await until(lambda: len(holders(s, waiting.result())) == 2)
        waiting = None
        await until(lambda: not s.tasks)


@hoplite_cluster()
@pytest.mark.parametrize(
    "x",
    [
        np.empty((0, 3)),
        np.array(5.0),
        np.arange(100_000)[::2],
        np.asfortranarray(np.ones((300, 9))),
    ],
    ids=["zero size", "0-d", "strided", "fortran"],
)
async def test_odd_arrays(c, s, *workers, x):
    await c.register_plugin(Hoplite())
    f = await hoplite.broadcast(x, client=c)
    assert len(holders(s, f)) == 4
    futures = [c.submit(lambda v: v, f, workers=[w.address], pure=False) for w in workers]
    for got in await c.gather(futures):
        assert got.dtype == x.dtype and got.shape == x.shape and np.array_equal(got, x)


@hoplite_cluster()
@pytest.mark.parametrize("size", [100_000, 5_000_000], ids=["stream", "shared memory"])
async def test_copies_are_isolated_and_keep_their_flags(c, s, *workers, size):
    await c.register_plugin(Hoplite())
    x = await hoplite.broadcast(array(size), client=c)

    def spoil(v):
        assert v.flags.writeable
        v[:] = 0

    await c.submit(spoil, x, workers=[workers[0].address])
    for w in workers[1:]:
        assert np.array_equal(w.data[x.key], array(size))
    frozen = array(size)
    frozen.flags.writeable = False
    y = await hoplite.broadcast(frozen, client=c)
    assert not any(w.data[y.key].flags.writeable for w in workers)
