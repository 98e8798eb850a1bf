"""The thread that moves bytes."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time

import pytest

from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout
from dask_hoplite.transfer.pump import Pump, Receive, Send
from dask_hoplite.transfer.wire import Wire

#: What receivers of a small object see all of, or nothing
BLOCK = 16 * 2**10
BLOCKS = [bytes([65 + i]) * BLOCK for i in range(3)]


def layout(*lengths: int) -> Layout:
    return Layout("i", b"", lengths)


def whole(*frames: bytes) -> Buffer:
    return Buffer(layout(*map(len, frames)), [memoryview(frame) for frame in frames])


def pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    return a, b


def on_the_wire(data: bytes) -> bytes:
    wire = Wire(whole(data))
    return b"".join(wire.sealed(0, wire.nbytes))


def content(buffer: Buffer) -> bytes:
    return b"".join(buffer.frames)


def ended(pump: Pump) -> bool:
    deadline = time.monotonic() + 5
    while pump._thread is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return pump._thread is None


@pytest.fixture
def pump():
    """A pump that leaves neither its thread nor a descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    pump = Pump()
    yield pump
    assert ended(pump)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name == "hoplite-pump"]


FRAMES = [(b"abc",), (b"x" * 3_000_000, b"", b"y" * 5, b"z" * 1_000_000), (os.urandom(9_000_000),)]


@pytest.mark.parametrize("frames", FRAMES, ids=["small", "frames", "large"])
@pytest.mark.parametrize("relays", [0, 1, 5])
def test_bytes_arrive_through_relays(pump, frames, relays):
    async def main():
        source = whole(*frames)
        moves, buffers, ends = [], [source], []
        for _ in range(relays + 1):
            a, b = pair()
            ends += [a, b]
            moves.append(pump.make(Send(a, buffers[-1], 0)))
            buffers.append(Buffer(source.layout))
            moves.append(pump.make(Receive(b, buffers[-1], relays + 1)))
        await asyncio.gather(*moves)
        for buffer in buffers:
            assert content(buffer) == b"".join(frames)
        for end in ends:
            assert not end.getblocking()
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            end.close()

    asyncio.run(main())


def test_sending_goes_on_from_an_offset(pump):
    async def main():
        a, b = pair()
        source, target = whole(BLOCKS[0][1:], BLOCKS[1]), Buffer(layout(BLOCK - 1, BLOCK))
        target.frames[0][:], target.frames[1][:1] = BLOCKS[0][1:], BLOCKS[1][:1]
        target.advance(BLOCK)
        sending = pump.make(Send(a, source, BLOCK))
        await asyncio.gather(sending, pump.make(Receive(b, target, 1)))
        assert content(target) == content(source)
        a.close(), b.close()

    asyncio.run(main())


def test_what_follows_an_object_is_left_in_the_socket(pump):
    async def main():
        a, b = pair()
        target = Buffer(layout(5))
        a.send(on_the_wire(b"hello") + b", next")
        await pump.make(Receive(b, target, 1))
        assert content(target) == b"hello"
        assert b.recv(100) == b", next"
        a.close(), b.close()

    asyncio.run(main())


def test_a_writer_elsewhere_is_followed(pump):
    """As when bytes come by TLS, which the event loop reads."""

    async def main():
        a, b = pair()
        source, target = Buffer(layout(3 * BLOCK)), Buffer(layout(3 * BLOCK))
        sending = asyncio.create_task(pump.make(Send(a, source, 0)))
        receiving = asyncio.create_task(pump.make(Receive(b, target, 1)))
        for i, block in enumerate(BLOCKS):
            source.piece(i * BLOCK, (i + 1) * BLOCK)[:] = block
            source.advance(1)
            source.advance(BLOCK - 1)
            assert await target.beyond(i * BLOCK) == (i + 1) * BLOCK
        await asyncio.gather(sending, receiving)
        assert content(target) == b"".join(BLOCKS)
        a.close(), b.close()

    asyncio.run(main())


def test_receiver_hears_that_the_sender_is_gone(pump):
    async def main():
        a, b = pair()
        target = Buffer(layout(2 * BLOCK))
        receiving = asyncio.create_task(pump.make(Receive(b, target, 1)))
        a.send(on_the_wire(b"".join(BLOCKS[:2]))[:-1])
        assert await target.beyond(0) == BLOCK
        a.close()
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            await receiving
        b.close()

    asyncio.run(main())


@pytest.mark.parametrize("idle", [True, False])
def test_sender_hears_that_the_receiver_is_gone(pump, idle):
    async def main():
        a, b = pair()
        source = Buffer(layout(5)) if idle else whole(b"x" * 50_000_000)
        sending = asyncio.create_task(pump.make(Send(a, source, 0)))
        await asyncio.sleep(0)
        b.close()
        with pytest.raises(ConnectionError):
            await sending
        a.close()

    asyncio.run(main())


def test_sender_notices_a_peer_that_speaks_out_of_turn(pump):
    async def main():
        a, b = pair()
        sending = asyncio.create_task(pump.make(Send(a, Buffer(layout(5)), 0)))
        b.send(b"!")
        with pytest.raises(ConnectionResetError, match="out of turn"):
            await sending
        assert a.recv(1) == b"!"  # it was only looked at
        a.close(), b.close()

    asyncio.run(main())


def test_failure_of_what_is_relayed_comes_after_what_there_is(pump):
    async def main():
        a, b = pair()
        source, target = Buffer(layout(2 * BLOCK)), Buffer(layout(2 * BLOCK))
        sending = asyncio.create_task(pump.make(Send(a, source, 0)))
        receiving = asyncio.create_task(pump.make(Receive(b, target, 1)))
        source.piece(0, BLOCK)[:] = BLOCKS[0]
        source.advance(BLOCK + 1)
        source.fail(ValueError("no more"))
        with pytest.raises(ValueError, match="no more"):
            await sending
        assert await target.beyond(1) == BLOCK
        receiving.cancel()
        await asyncio.wait({receiving})
        a.close(), b.close()

    asyncio.run(main())


def test_a_cancelled_move_touches_nothing_any_more(pump):
    async def main():
        a, b = pair()
        target = Buffer(layout(2 * BLOCK))
        receiving = asyncio.create_task(pump.make(Receive(b, target, 1)))
        a.send(on_the_wire(BLOCKS[0]))
        await target.beyond(0)
        receiving.cancel()
        await asyncio.wait({receiving})
        a.send(on_the_wire(b"hello"))
        other = Buffer(layout(5))
        await pump.make(Receive(b, other, 1))  # another one finds all that the first left
        assert target.received == BLOCK
        assert content(other) == b"hello"
        a.close(), b.close()

    asyncio.run(main())


def test_a_relay_does_not_wait_for_its_slowest_reader(pump):
    async def main():
        a, b = pair()
        c, never_read = pair()
        d, e = pair()
        data = os.urandom(5_000_000)
        relay, target = Buffer(layout(len(data))), Buffer(layout(len(data)))
        stuck = asyncio.create_task(pump.make(Send(c, relay, 0)))
        await asyncio.gather(
            pump.make(Send(a, whole(data), 0)),
            pump.make(Receive(b, relay, 1)),
            pump.make(Send(d, relay, 0)),
            pump.make(Receive(e, target, 1)),
        )
        assert content(target) == data
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait({stuck})
        for end in (a, b, c, d, e, never_read):
            end.close()

    asyncio.run(main())


def test_many_moves_that_come_and_go(pump):
    """Threads and descriptors are used again while others still end."""

    async def one(i: int) -> None:
        a, b = pair()
        data = os.urandom(1 + 7919 * i % 100_000)
        target = Buffer(layout(len(data)))
        receiving = asyncio.create_task(pump.make(Receive(b, target, 1)))
        if i % 3 == 0:
            await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait({receiving})
            receiving = asyncio.create_task(pump.make(Receive(b, target, 1)))
        await asyncio.gather(pump.make(Send(a, whole(data), 0)), receiving)
        assert content(target) == data
        a.close(), b.close()

    async def main():
        for start in range(0, 400, 20):
            await asyncio.gather(*(one(i) for i in range(start, start + 20)))

    asyncio.run(main())


def test_the_loop_ends_in_the_middle(pump):
    a, b = pair()

    async def main():
        moving = asyncio.create_task(pump.make(Receive(b, Buffer(layout(5)), 1)))
        await asyncio.sleep(0)
        assert not moving.done()

    asyncio.run(main())
    a.close(), b.close()
