"""Memory: what is held, one object more, and no more; and what is too large is refused."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed import wait
from distributed.core import Status

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, ObjectTooLargeError, arrivals
from dask_hoplite.transfer import pull
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.room import Room
from tests.helpers import array, hoplite_cluster, hosted, plugin, until

MB = 10**6


# Room


async def entered(room: Room, nbytes: int, log: list[int]) -> tuple[asyncio.Task, asyncio.Event]:
    """Somebody who wants room, and what lets them go again."""
    leave = asyncio.Event()

    async def stay() -> None:
        async with room.take(nbytes):
            log.append(nbytes)
            await leave.wait()

    task = asyncio.create_task(stay())
    await asyncio.sleep(0)
    return task, leave


def test_room_is_given_in_order():
    async def test():
        room, log = Room(3, 10), []
        everybody = [await entered(room, n, log) for n in (4, 5, 2, 1)]
        assert log == [4, 5], "the third waits, and so does the fourth, which would fit"
        assert not room.has(1)
        for task, leave in everybody:
            leave.set()
            await task
        assert log == [4, 5, 2, 1] and not room.taken and not room.waiting

    asyncio.run(test())


def test_one_may_always_come():
    async def test():
        room, log = Room(3, 10), []
        first, leave = await entered(room, 100, log)
        second, _ = await entered(room, 200, log)
        assert log == [100]
        leave.set()
        await first
        await until(lambda: log == [100, 200])
        second.cancel()

    asyncio.run(test())


def test_room_is_for_so_many():
    async def test():
        room, log = Room(2, 10), []
        tasks = [(await entered(room, 1, log))[0] for _ in range(3)]
        assert log == [1, 1]
        for task in tasks:
            task.cancel()

    asyncio.run(test())


def test_who_stops_waiting_for_room_leaves_it_to_others():
    async def test():
        room, log = Room(3, 10), []
        first, leave = await entered(room, 8, log)
        second, _ = await entered(room, 5, log)
        third, _ = await entered(room, 2, log)
        second.cancel()
        await until(lambda: log == [8, 2])
        fourth, _ = await entered(room, 9, log)
        third.cancel()
        leave.set()
        await first
        fourth.cancel()  # just when its turn has come
        await asyncio.wait({second, third, fourth})
        assert not room.taken and not room.waiting and room.has(10)

    asyncio.run(test())


# What workers hold


class Watch:
    """Counts bytes of buffers that are made to receive, for as long as they live."""

    def __init__(self, monkeypatch):
        self.alive = 0
        self.peak = 0

        def make_room(layout, _):
            buffer = Buffer(layout)
            self.alive += buffer.nbytes
            self.peak = max(self.peak, self.alive)
            # Objects live in the frames, and these in what allocated them.
            for frame in buffer.frames:
                weakref.finalize(frame.obj, self.gone, frame.nbytes)
            return buffer

        for module in (pull, arrivals):
            monkeypatch.setattr(module, "make_room", make_room)

    def gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def fast(worker) -> int:
    return sum(sizeof(value) for value in worker.data.fast.values())


@pytest.mark.parametrize("how", ["replicate", "tasks", "broadcast", "scatter"])
def test_ten_at_once_where_there_is_memory_for_three(how, monkeypatch):
    @hoplite_cluster(
        nthreads=[("127.0.0.1", 1)] * 2,
        worker_kwargs={"memory_limit": 35 * MB},
        config={
            "hoplite.min-size": 1000,
            "hoplite.shared-memory": False,
            # By what Dask counts, not by what this process has.
            "distributed.worker.memory.spill": False,
            "distributed.worker.memory.pause": False,
        },
    )
    async def test(c, s, a, b):
        await c.register_plugin(Hoplite())
        watch = Watch(monkeypatch)
        if how == "scatter":
            values = [array(10 * MB, seed=i) for i in range(10)]
            objects = await c.scatter(values, workers=[b.address])
        else:
            objects = [hosted(c, 10 * MB, worker=a.address, seed=i) for i in range(10)]
            await wait(objects)
        if how == "replicate":
            await c.replicate(objects, workers=[b.address], n=1)
        elif how == "broadcast":
            await asyncio.gather(*(hoplite.broadcast(x, client=c) for x in objects))
        elif how == "tasks":
            sums = [c.submit(np.sum, x, workers=[b.address], pure=False) for x in objects]
            assert await c.gather(sums) == [
                array(10 * MB, seed=i).sum(dtype=int) for i in range(10)
            ]
        # Two in memory by Dask's target, one that comes, and one that Dask is writing.
        assert watch.peak <= 40 * MB
        gc.collect()
        assert fast(b) <= 0.6 * 35 * MB
        assert watch.alive <= fast(b), "nothing else keeps what was spilled"
        if how != "tasks":  # whose copies Dask's memory manager may drop again
            for seed, x in enumerate(objects):
                np.testing.assert_array_equal(b.data[x.key], array(10 * MB, seed=seed))

    test()


@hoplite_cluster(config={"hoplite.min-size": 1000, "hoplite.shared-memory": False})
async def test_what_is_dropped_is_freed(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch)
        objects = [hosted(c, MB, worker=a.address, seed=i) for i in range(10)]
        await c.replicate(objects, workers=[b.address])
        assert watch.alive == len(b.data) * MB == 10 * MB
        kept = objects[4]
        del objects
        await until(lambda: list(b.data) == [kept.key])
        gc.collect()
        assert watch.alive == MB, "each has memory of its own"


# Too large


@pytest.mark.parametrize("call", ["task", "replicate", "broadcast", "scatter"])
@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_what_cannot_be_held_is_refused_before_a_byte_moves(c, s, a, b, small, call):
    await c.register_plugin(Hoplite())
    small.plugins["hoplite"].puller.memory_limit = 50_000
    if call != "task":  # of dependencies that look too large, Dask takes care itself; see below
        s.workers[small.address].memory_limit = 50_000
    x = hosted(c, worker=a.address)
    await x
    with pytest.raises(ObjectTooLargeError, match=r"of 100000 bytes.*50000") as caught:
        if call == "task":
            await c.submit(np.sum, x, workers=[small.address], pure=False)
        elif call == "replicate":
            await c.replicate(x, workers=[b.address, small.address])
        elif call == "broadcast":
            await hoplite.broadcast(x, workers=[b.address, small.address], client=c)
        else:
            await c.scatter(array(), workers=[small.address])
    assert small.address in str(caught.value) and caught.value.key
    rows = [row for row in plugin(s).directory.log() if row["receiver"] == small.address]
    assert not any(row["received"] for row in rows)
    s.workers[small.address].memory_limit = 50_000
    with pytest.raises(MemoryError, match=rf"{small.address} has memory_limit set to 48.83 kiB"):
        await c.submit(np.sum, x, workers=[small.address], pure=False)
    # The others are served, by the same calls without names.
    assert await c.submit(np.sum, x, workers=[b.address], pure=False) == array().sum(dtype=int)
    await asyncio.wait_for(c.replicate(x), 10)
    assert {ws.address for ws in s.tasks[x.key].who_has} == {a.address, b.address}
    y = await c.scatter(array(seed=1), broadcast=True)
    assert {ws.address for ws in s.tasks[y.key].who_has} == {a.address, b.address}
    assert not small.data


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_turns_out_to_be_too_large_is_refused(c, s, a, small):
    """Its size in memory, which is all that Dask knows, may be far from that on the wire."""
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=a.address)
    await x
    small.plugins["hoplite"].puller.memory_limit = 50_000
    answer = await small.plugins["hoplite"].acquire({x.key: 2000})
    assert "ObjectTooLargeError" in answer["reasons"][x.key]
    assert not small.data and not small.plugins["hoplite"].shelf.entries


# Sources on disk, and those that are paused


@hoplite_cluster(
    nthreads=[("127.0.0.1", 1)] * 3,
    worker_kwargs={"memory_limit": 20 * MB},
    config={
        "hoplite.min-size": 1000,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
    },
)
async def test_broadcast_of_what_is_on_disk(c, s, a, *others):
    await c.register_plugin(Hoplite())
    objects = [hosted(c, 5 * MB, worker=a.address, seed=i) for i in range(4)]
    await wait(objects)
    for _ in range(len(a.data.fast)):
        a.data.evict()
    assert not a.data.fast and not a.plugins["hoplite"].shelf.entries
    x = objects[2]
    await hoplite.broadcast(x, client=c)
    assert list(a.data.fast) == [x.key], "nothing else came back"
    for other in others:
        np.testing.assert_array_equal(other.data[x.key], array(5 * MB, seed=2))
    a.data.evict()
    await until(lambda: not a.plugins["hoplite"].shelf.entries)


@hoplite_cluster(config={"hoplite.min-size": 1000, "distributed.worker.memory.pause": False})
async def test_a_paused_worker_serves_but_gets_nothing_new(c, s, a, b, *workers):
    await c.register_plugin(Hoplite())
    x = hosted(c, worker=a.address)
    await x
    for paused in (a, b):
        paused.status = Status.paused
        await until(lambda w=paused: s.workers[w.address].status == Status.paused)
    await asyncio.wait_for(hoplite.broadcast(x, client=c), 10)
    y = await c.scatter(array(seed=1), broadcast=True)
    await c.replicate(x)
    running = {w.address for w in workers}
    assert {ws.address for ws in s.tasks[x.key].who_has} == running | {a.address}
    assert {ws.address for ws in s.tasks[y.key].who_has} == running
    assert not b.data and list(a.data) == [x.key]
    b.status = Status.running
    await until(lambda: set(b.data) == {x.key, y.key})
    a.status = Status.running


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_pushes_come_one_after_the_other_where_room_is_short(c, s, a, b):
    """Copies follow, and nothing waits in a circle."""
    await c.register_plugin(Hoplite())
    for w in (a, b):
        extension = w.plugins["hoplite"]
        extension.arrivals.room.nbytes = extension.puller.room.nbytes = 150_000
    values = [array(seed=i) for i in range(12)]
    futures = await asyncio.wait_for(c.scatter(values, broadcast=True), 20)
    for future, value in zip(futures, values, strict=True):
        assert len(s.tasks[future.key].who_has) == 2
        np.testing.assert_array_equal(a.data[future.key], value)
    for w in (a, b):
        extension = w.plugins["hoplite"]
        for room in (extension.arrivals.room, extension.puller.room):
            assert not room.taken and not room.waiting


class Boastful:
    """An object that Dask takes to be larger than any worker."""

    def __sizeof__(self):
        return 2**60


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_only_looks_too_large_is_not_refused(c, s, a, b):
    await c.register_plugin(Hoplite())
    for w in (a, b):
        s.workers[w.address].memory_limit = 0
    x = c.submit(Boastful, workers=[a.address])
    assert await c.submit(isinstance, x, Boastful, workers=[b.address])
    rows = plugin(s).directory.log()
    assert [row["key"] for row in rows] == [x.key]
