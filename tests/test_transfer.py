"""The bytes: layout, buffers, the shelf, pulls."""

from __future__ import annotations

import asyncio
import gc
import os
import time

import numpy as np
import pytest
from distributed.protocol import deserialize, serialize
from distributed.utils_test import gen_test

from dask_hoplite.core.instructions import Pull
from dask_hoplite.exceptions import CancelledPullError, SourceFailedError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout, dump, load
from dask_hoplite.transfer.patience import patiently, stop
from dask_hoplite.transfer.pull import Puller
from dask_hoplite.transfer.shelf import Shelf

VALUES = {
    "array": np.arange(1000.0),
    "fortran": np.asfortranarray(np.arange(1000.0).reshape(20, 50)),
    "strided": np.arange(1000)[::2],
    "reversed": np.arange(1000)[::-1],
    "zero size": np.empty((0, 3)),
    "0-d": np.array(5.0),
    "strings": np.array(["a", "bc"]),
    "objects": np.array([{"a": 1}, None], dtype=object),
    "records": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
    "broadcast": np.broadcast_to(np.arange(3), (100, 3)),
    "nested": {"w": [np.ones(10), np.zeros((2, 2))], "b": (1, "x", b"bytes")},
    "bytes": b"x" * 1000,
    "bytearray": bytearray(b"y" * 1000),
    "memoryview": memoryview(b"z" * 1000),
    "none": None,
}


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool(np.all(a == b))
        )
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def through_buffer(value: object) -> object:
    """As if received over the wire, in pieces of 7 bytes."""
    layout, frames = dump(value)
    layout = Layout.from_message(layout.to_message())
    data = b"".join(frames)
    buffer = Buffer(layout)
    while not buffer.complete:
        piece = buffer.piece(buffer.received, buffer.received + 7)
        piece[:] = data[buffer.received : buffer.received + len(piece)]
        buffer.advance(len(piece))
    return load(layout, buffer.frames)


@pytest.mark.parametrize("name", VALUES)
def test_values_survive(name):
    assert same(through_buffer(VALUES[name]), VALUES[name])


@pytest.mark.parametrize("writeable", [True, False])
def test_flags_are_those_of_dask(writeable):
    x = np.arange(1000)
    x.flags.writeable = writeable
    header, frames = serialize(x)
    plain = deserialize(header, [bytearray(frame) for frame in frames])
    assert through_buffer(x).flags.writeable == plain.flags.writeable == writeable


def test_unserialisable():
    with pytest.raises(TypeError, match="Could not serialize"):
        dump(i for i in range(3))


def test_piece_stays_within_a_frame():
    buffer = Buffer(Layout("i", b"", (3, 0, 5)))
    assert [len(buffer.piece(o, o + 10)) for o in range(8)] == [3, 2, 1, 5, 4, 3, 2, 1]
    assert len(buffer.piece(3, 5)) == 2


def test_buffer_of_nothing_is_complete():
    assert Buffer(Layout("i", b"", ())).complete
    assert Buffer(Layout("i", b"", (0, 0))).complete


def test_readers_follow_a_growing_buffer():
    async def main():
        buffer = Buffer(Layout("i", b"", (10,)))
        readers = [asyncio.create_task(buffer.beyond(offset)) for offset in (0, 0, 4)]
        await asyncio.sleep(0)
        buffer.advance(3)
        assert await readers[0] == await readers[1] == 3
        readers[2].cancel()  # one that leaves does not disturb another
        other = asyncio.create_task(buffer.beyond(5))
        await asyncio.sleep(0)
        buffer.advance(7)
        assert await other == 10

    asyncio.run(main())


def test_readers_of_a_failed_buffer_get_what_is_there_and_then_the_error():
    async def main():
        buffer = Buffer(Layout("i", b"", (10,)))
        buffer.advance(4)
        waiting = asyncio.create_task(buffer.beyond(4))
        await asyncio.sleep(0)
        buffer.fail(ConnectionError("gone"))
        with pytest.raises(ConnectionError, match="gone"):
            await waiting
        assert await buffer.beyond(2) == 4
        with pytest.raises(ConnectionError, match="gone"):
            await buffer.beyond(4)

    asyncio.run(main())


def test_shelf_serialises_once_and_forgets_after_grace():
    async def main():
        data = {"x": np.arange(10)}
        shelf = Shelf(data, grace=0.01)
        async with shelf.reading("x") as first, shelf.reading("x") as second:
            assert first is second
            assert np.shares_memory(np.frombuffer(first.frames[-1], dtype=int), data["x"])
        async with shelf.reading("x") as third:
            assert third is first
        expired = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, expired.set)
        await expired.wait()
        assert not shelf.entries

    asyncio.run(main())


def test_shelf_without_the_object():
    async def main():
        shelf = Shelf({})
        with pytest.raises(KeyError):
            async with shelf.reading("x"):
                pass
        assert not shelf.entries

    asyncio.run(main())


def test_shelf_with_an_object_that_cannot_be_serialised():
    async def main():
        shelf = Shelf({"x": (i for i in range(3))})
        for _ in range(2):
            with pytest.raises(TypeError, match="Could not serialize"):
                async with shelf.reading("x"):
                    pass
        assert not shelf.entries

    asyncio.run(main())


def test_discarding_fails_those_who_wait_for_a_promise():
    async def main():
        shelf = Shelf({})
        shelf.promise("x")

        async def read():
            async with shelf.reading("x"):
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        shelf.discard("x", ConnectionError("no"))
        with pytest.raises(ConnectionError, match="no"):
            await reader
        assert not shelf.entries

    asyncio.run(main())


def test_shelf_waits_for_what_is_about_to_be_announced():
    async def main():
        shelf = Shelf({"there": 1})
        await shelf.announced("there", 10)
        waiting = [asyncio.create_task(shelf.announced("x", 10)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one that leaves does not disturb the others
        await asyncio.wait({waiting[0]})
        assert not waiting[1].done()
        shelf.promise("x")
        await asyncio.gather(*waiting[1:])
        await shelf.announced("x", 10)
        await shelf.announced("never", 0.01)
        assert not shelf.awaited

    asyncio.run(main())


# Pulls


def test_a_source_that_fails_while_it_is_left_is_nobodys_loss():
    """asyncio complains of exceptions that nobody has seen."""

    asked = asyncio.Event()

    class Pool:
        async def connect(self, address):
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise SourceFailedError("does not have it") from None

    async def run():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda _, why: complaints.append(why))

        async def tell(event):
            return Pull(event.key, event.receiver, "tcp://source", 1, "")

        shelf = Shelf({})
        puller = Puller("tcp://me", Pool(), tell, lambda event: None, shelf, stall_timeout=10)
        pulling = asyncio.create_task(puller.pull("x", 1000))
        await asked.wait()
        puller.cancel("x")
        await asyncio.wait({pulling})
        assert isinstance(pulling.exception(), CancelledPullError)
        del pulling
        gc.collect()
        await asyncio.sleep(0)
        assert not complaints and not puller.incoming and not shelf.entries

    asyncio.run(run())


def test_copying_what_there_is():
    layout = Layout("i", b"", (3, 0, 40_000))
    one, other = Buffer(layout), Buffer(layout)
    data = os.urandom(40_003)
    one.frames[0][:], one.frames[2][:] = data[:3], data[3:]
    one.advance(40_000)
    assert other.copy_from(one) == 40_000
    assert other.received == 0
    assert bytes(other.frames[0]) + bytes(other.frames[2][:39_997]) == data[:40_000]


@pytest.mark.parametrize(
    "value",
    [np.ones(10), np.ones((3, 4), "f4", order="F"), np.arange(20, dtype="i2")[::2], [np.ones(9)]],
    ids=["array", "Fortran", "strided", "list"],
)
def test_frames_are_views_of_memory_not_of_views(value):
    # Python 3.11 crashes when it collects a view of which there is another view's view.
    _, frames = dump(value)
    assert not any(isinstance(frame.obj, memoryview) for frame in frames)


def test_a_buffer_that_has_ended_holds_nobody():
    whole, lost = (Buffer(Layout("x", b"", (4,))) for _ in range(2))
    for buffer in (whole, lost):
        buffer.follow(lambda: None)
    whole.advance(4)
    lost.fail(OSError("left"))
    for buffer in (whole, lost):
        assert not buffer._followers
        buffer.follow(lambda: None)
        assert not buffer._followers


@gen_test()
async def test_who_stood_still_does_not_blame_the_other():
    """As a process that was suspended: what had come meanwhile has still to be read."""

    async def doing():
        await asyncio.sleep(0)
        time.sleep(0.3)
        for _ in range(20):
            await asyncio.sleep(0)
        return "done"

    assert await patiently(doing(), lambda: 0, timeout=0.2) == "done"
    with pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
        await patiently(asyncio.Event().wait(), lambda: 0, timeout=0.2)


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
