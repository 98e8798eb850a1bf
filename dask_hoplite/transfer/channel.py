"""Bytes over an established Dask connection.

After the request and its answer, two ordinary Dask messages, the object's bytes follow with no
framing on the connection's own stream, and afterwards the connection is an ordinary Dask connection
again. A receiver takes whatever has arrived and makes it available at once: there is no chunk size.
On TCP, a thread moves them; with TLS, the event loop, since only the stream has the key. On other
transports, whose streams we do not have, bytes go in messages.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distributed.comm.core import Comm, CommClosedError
from distributed.comm.tcp import TCP, TLS, convert_stream_closed_error
from tornado.iostream import IOStream, StreamClosedError

from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.pump import PIECE, PUMP, Move, Receive, Send
from dask_hoplite.transfer.wire import Wire

#: Bytes that are taken at once where they cannot be received in their place.
WINDOW = 2**20


def path(comm: Comm, address: str) -> str:
    """How bytes go over a connection to or at this address, for people to read."""
    kind = "stream" if isinstance(comm, TCP) else "messages"
    return f"{address.split('://')[0]} {kind}"


def by_pump(comm: Comm) -> bool:
    """Whether a thread can move bytes over this connection."""
    return isinstance(comm, TCP) and not isinstance(comm, TLS)


def _ignore(nbytes: int) -> None:
    """Nobody wants to know how many bytes were sent."""


async def send(
    comm: Comm, buffer: Buffer, offset: int, sent: Callable[[int], None] = _ignore
) -> None:
    """Send all bytes from ``offset`` on, as they become available.

    Parameters
    ----------
    comm : Comm
        Where they go.
    buffer : Buffer
        Where they come from.
    offset : int
        The first one.
    sent : callable
        Is told, in the end, how many went, in whole blocks.

    Raises
    ------
    OSError
        If the connection breaks. It is unusable after any error, and closed.
    """
    wire = Wire(buffer)
    position = first = wire.position(offset)
    try:
        if by_pump(comm):
            stream = _stream(comm)  # type: ignore[arg-type]
            await stream.write(b"")  # what is still in its buffer, first
            if offset < buffer.nbytes:
                move = Send(stream.socket, buffer, offset)
                try:
                    await _pumped(stream, move)
                finally:
                    position = move.position
            return
        while position < wire.nbytes:
            block = min(wire.offset(position) + wire.block, buffer.nbytes)
            have = wire.position(await buffer.beyond(block - 1))
            data = b"".join(wire.sealed(position, min(have, position + PIECE)))
            if isinstance(comm, TCP):
                await _stream(comm).write(data)
            else:
                await comm.write({"bytes": data})
            position += len(data)
    except StreamClosedError as error:
        comm.abort()
        convert_stream_closed_error(comm, error)
    except BaseException:
        comm.abort()
        raise
    finally:
        sent(wire.offset(position) - wire.offset(first))


async def receive(comm: Comm, buffer: Buffer, hops: int = 1) -> None:
    """Take all bytes that are still missing.

    Parameters
    ----------
    comm : Comm
        Where they come from.
    buffer : Buffer
        Where they go.
    hops : int
        How many receivers there may be in a row, of which this is one.

    Raises
    ------
    OSError
        If the connection breaks. It is unusable after any error, and closed.
    """
    try:
        if by_pump(comm):
            await _receive_socket(comm, buffer, hops)  # type: ignore[arg-type]
        elif isinstance(comm, TCP):
            await _receive_stream(comm, buffer)
        else:
            await _receive_messages(comm, buffer)
    except StreamClosedError as error:
        comm.abort()
        convert_stream_closed_error(comm, error)
    except BaseException:
        comm.abort()
        raise


@contextmanager
def counted(counts: Counter[str] | None, how: str, buffer: Buffer) -> Iterator[None]:
    """Count the bytes that come into a buffer within the block."""
    before = buffer.received
    try:
        yield
    finally:
        if counts is not None:
            counts[how] += buffer.received - before


async def _receive_stream(comm: TCP, buffer: Buffer) -> None:
    """Take bytes by the event loop."""
    wire = Wire(buffer)
    position = wire.position(buffer.received)
    window = memoryview(bytearray(min(WINDOW, wire.nbytes - position)))
    while position < wire.nbytes:
        read = _stream(comm).read_into(window[: wire.nbytes - position], partial=True)  # type: ignore[arg-type]
        more = read.done()  # type: ignore[attr-defined]
        position = _take(wire, position, window[: await read])
        if more:
            # A fast sender always has more: let those run who send it on.
            await asyncio.sleep(0)


async def _receive_socket(comm: TCP, buffer: Buffer, hops: int) -> None:
    """Take bytes by the pump."""
    stream, wire = _stream(comm), Wire(buffer)
    position = wire.position(buffer.received)
    if came := min(stream._read_buffer_size, wire.nbytes - position):  # with the answer
        window = memoryview(bytearray(came))
        await stream.read_into(window)  # type: ignore[arg-type]
        position = _take(wire, position, window)
    if position < wire.nbytes:
        await _pumped(stream, Receive(stream.socket, buffer, hops, position))


async def _pumped(stream: IOStream, move: Move) -> None:
    """Make a move with the socket of a stream, which does not touch it meanwhile.

    Tornado has no public way to lend a socket. This is what its own ``start_tls`` does to exchange
    one, and ``set_close_callback`` makes it listen again.
    """
    told = stream._close_callback

    def closed() -> None:
        move.finish(StreamClosedError())
        if told is not None:
            told()

    stream.set_close_callback(closed)
    if stream._state is not None:
        stream.io_loop.remove_handler(stream.socket)
        stream._state = None
    try:
        await PUMP.make(move)
    finally:
        if not stream.closed():
            stream.set_close_callback(told)


async def send_marks(comm: Comm, buffer: Buffer, sent: Callable[[int], None] = _ignore) -> None:
    """Tell how many bytes there are of a buffer that the receiver sees itself.

    Parameters
    ----------
    comm, buffer, sent
        As for :func:`send`.

    Raises
    ------
    OSError
        If the connection breaks. It is unusable after any error, and closed.
    """
    step = max(buffer.nbytes // 64, 2**20)
    told = 0
    try:
        while told < buffer.nbytes:
            told = await buffer.beyond(min(told + step, buffer.nbytes) - 1)
            await comm.write({"received": told})
    except BaseException:
        comm.abort()
        raise
    finally:
        sent(told)


async def receive_marks(comm: Comm, buffer: Buffer) -> None:
    """Note how many bytes there are of a buffer that another process fills.

    Raises
    ------
    OSError
        If the connection breaks. It is unusable after any error, and closed.
    """
    try:
        while not buffer.complete:
            message = await comm.read()
            buffer.advance(message["received"] - buffer.received)
    except BaseException:
        comm.abort()
        raise


async def _receive_messages(comm: Comm, buffer: Buffer) -> None:
    """Take bytes that come in messages."""
    wire = Wire(buffer)
    position = wire.position(buffer.received)
    while position < wire.nbytes:
        position = _take(wire, position, memoryview((await comm.read())["bytes"]))


def _take(wire: Wire, position: int, data: memoryview) -> int:
    """Put what came where it belongs, and check it; return up to where all is there."""
    wire.put(position, data)
    position += len(data)
    wire.check(position)
    return position


def _stream(comm: TCP) -> IOStream:
    if comm.stream is None:
        raise CommClosedError("connection closed")
    return comm.stream
