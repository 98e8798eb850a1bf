"""How a client gets an object when its holders fail, or say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.core import Status
from distributed.utils_test import gen_test

from dask_hoplite import Hoplite, fetch
from dask_hoplite.client import extension
from dask_hoplite.fetch import Fetch
from dask_hoplite.transfer.layout import dump
from tests.helpers import array, first_blocks, hoplite_cluster, hosted, plugin, until

LAYOUT, FRAMES = dump(array(1000))
DATA = b"".join(FRAMES)
SIZE = len(DATA)


class World:
    """Holders of an object that do as they are told, each time somebody has waited for them."""

    def __init__(self, monkeypatch, **holders):
        #: For each holder what it does, waiting by waiting: so many bytes come, or it fails
        self.holders = {name: iter(steps) for name, steps in holders.items()}
        self.known = [list(holders)]  # what the scheduler answers, the last for ever
        self.asked = []
        self.located = 0
        self.patience = []
        self.slots = asyncio.Semaphore(1)
        self.source = None
        monkeypatch.setattr(fetch, "take", self.take)
        self.wait = asyncio.wait
        monkeypatch.setattr(fetch.asyncio, "wait", self.waiting)

    def fetch(self):
        return Fetch("x", "me", self.reach, self.locate, 1.0, self.slots)

    async def reach(self, worker):
        return None

    async def locate(self):
        self.located += 1
        return self.known.pop(0) if len(self.known) > 1 else self.known[0]

    async def take(self, rpc, source, key, *, receiver, buffer, begin):
        self.asked.append((source, buffer.received if buffer is not None else 0))
        self.steps, self.changed = [], asyncio.Event()
        self.source = source
        while buffer is None or not buffer.complete:
            await self.changed.wait()
            self.changed.clear()
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if step:
                    buffer = buffer or begin(LAYOUT, None)
                    stop = min(buffer.received + step, SIZE)
                    while buffer.received < stop:
                        piece = buffer.piece(buffer.received, stop)
                        piece[:] = DATA[buffer.received : buffer.received + len(piece)]
                        buffer.advance(len(piece))
            self.steps = []

    async def waiting(self, tasks, timeout=None):
        if timeout is None:
            return await self.wait(tasks)
        self.patience.append(timeout)
        await asyncio.sleep(0)  # let it begin
        self.steps.append(next(self.holders[self.source]))
        self.changed.set()
        for _ in range(3):
            await asyncio.sleep(0)
        return None


def got(world, holders):
    async def run():
        return await asyncio.wait_for(world.fetch().run(holders), 10)

    assert np.array_equal(asyncio.run(run()), array(1000))
    assert world.slots._value == 1


def test_slow_bytes_are_bytes(monkeypatch):
    world = World(monkeypatch, a=[1] * SIZE, b=[SIZE])
    got(world, ["a", "b"])
    assert world.asked == [("a", 0)] and not world.located
    assert set(world.patience) == {1.0}


def test_a_silent_holder_is_left_for_the_next_at_the_byte_reached(monkeypatch):
    world = World(monkeypatch, a=[300, 100, 0], b=[SIZE])
    got(world, ["a", "b"])
    assert world.asked == [("a", 0), ("b", 400)]
    assert world.located == 1 and set(world.patience) == {1.0}


def test_a_failed_holder_is_left_for_the_next_at_the_byte_reached(monkeypatch):
    world = World(monkeypatch, a=[300, ConnectionError("broken")], b=[SIZE])
    got(world, ["a", "b"])
    assert world.asked == [("a", 0), ("b", 300)] and not world.located


def test_the_only_holder_is_waited_for(monkeypatch):
    world = World(monkeypatch, a=[0] * 5 + [500] + [0] * 5 + [SIZE])
    got(world, ["a"])
    assert world.asked == [("a", 0)]
    assert world.located == 10, "each time, whether there is another one now"


def test_a_holder_that_was_not_known_at_first(monkeypatch):
    world = World(monkeypatch, a=[100, 0, 0], b=[SIZE])
    world.known = [["a"], ["a", "b"]]
    got(world, ["a"])
    assert world.asked == [("a", 0), ("b", 100)]


def test_holders_that_are_all_silent_are_asked_in_turn_and_given_more_time(monkeypatch):
    world = World(monkeypatch, a=[0, 0, SIZE], b=[0] * 10)
    got(world, ["a", "b"])
    assert [source for source, _ in world.asked] == ["a", "b", "a", "b", "a"]
    assert world.patience == [1, 1, 2, 4, 8]


def test_a_silent_holder_that_lost_it_is_not_waited_for(monkeypatch):
    world = World(monkeypatch, a=[0] * 10)
    world.known = [["a"], []]
    with pytest.raises(OSError, match="nobody can give 'x': it is not held"):
        got(world, ["a"])
    assert world.slots._value == 1


def test_it_ends_when_nobody_can_give_it(monkeypatch):
    world = World(monkeypatch, a=[ConnectionError("broken")], b=[ConnectionError("no")])
    with pytest.raises(OSError, match="nobody can give 'x': a: broken; b: no"):
        got(world, ["a", "b"])
    assert len(world.asked) == 2 and world.located == 1, "the scheduler still thinks they can"


def test_a_holder_that_breaks_in_the_middle_may_go_on(monkeypatch):
    world = World(monkeypatch, a=[300, ConnectionError("broken"), SIZE])
    got(world, ["a"])
    assert world.asked == [("a", 0), ("a", 300)] and world.located == 1


def test_who_waits_for_a_silent_holder_takes_no_slot(monkeypatch):
    world = World(monkeypatch, a=[0, 0, SIZE])

    async def run():
        found = []

        async def locate():
            assert not world.slots.locked()
            found.append(1)
            return ["a"]

        world.locate = locate
        assert np.array_equal(await world.fetch().run(["a"]), array(1000))
        assert len(found) == 2

    asyncio.run(run())
    assert world.slots._value == 1


# On clusters


def first_asked(s, worker):
    """Let the scheduler name this holder before the others; count how often it is asked."""
    asked = []
    plain = s.handlers["hoplite_locate"]

    async def locate(keys):
        asked.append(keys)
        found = await plain(keys=keys)
        return {
            key: (nbytes, sorted(holders, key=lambda holder: holder != worker))
            for key, (nbytes, holders) in found.items()
        }

    s.handlers["hoplite_locate"] = locate
    return asked


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_gather_leaves_a_silent_worker(c, s, a, b):
    await c.register_plugin(Hoplite())
    x = hosted(c, 900_000, worker=a.address)
    await wait(x)
    await c.replicate(x)
    first_asked(s, a.address)
    left, offsets = asyncio.Event(), []

    async def begin_only(comm, key, **message):
        async with a.plugins["hoplite"].shelf.reading(key) as buffer:
            await comm.write({"status": "OK", "offset": 0, **buffer.layout.to_message()})
            await comm.stream.write(first_blocks(buffer, 512 * 2**10))
            with contextlib.suppress(OSError):
                await comm.read()  # of nothing
        left.set()
        return Status.dont_reply

    plain = b.handlers["hoplite_pull"]

    async def serve(comm, offset, **message):
        offsets.append(offset)
        return await plain(comm, offset=offset, **message)

    a.handlers["hoplite_pull"], b.handlers["hoplite_pull"] = begin_only, serve
    assert np.array_equal(await c.gather(x), array(900_000))
    assert set(offsets) == {512 * 2**10}
    await left.wait()
    assert not c.rpc.active


@pytest.mark.parametrize("others", [True, False])
@gen_test(timeout=90)
async def test_gather_from_a_frozen_process(others):
    async with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, asynchronous=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        s = cluster.scheduler
        await c.register_plugin(Hoplite(min_size=1000, stall_timeout="200ms"))
        (await extension(c)).connect_timeout = 0.5
        await c.wait_for_workers(2)
        frozen = next(iter(s.workers))
        x = hosted(c, 5_000_000, worker=frozen)
        await wait(x)
        if others:
            await c.replicate(x)
        pid = (await c.run(os.getpid, workers=[frozen]))[frozen]
        asked = first_asked(s, frozen)
        os.kill(pid, signal.SIGSTOP)
        try:
            gathering = asyncio.create_task(c.gather(x))
            if not others:
                await until(lambda: len(asked) > 3, timeout=60)
                assert not gathering.done()
                os.kill(pid, signal.SIGCONT)
            assert np.array_equal(await gathering, array(5_000_000))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert len(asked) > 1


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_the_clients_patience_is_the_schedulers(c, s, a, b):
    await c.register_plugin(Hoplite(stall_timeout="7s"))
    assert (await c.scheduler.hoplite_hello())["stall_timeout"] == 7
    assert plugin(s).config.stall_timeout == 7
    assert (await extension(c)).stall_timeout == 7
