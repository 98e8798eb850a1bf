"""Bytes over an established Dask connection.

After the request and its answer, two ordinary Dask messages, the object's bytes follow with no
framing on the connection's own stream (TCP and TLS), and afterwards the connection is an ordinary
Dask connection again. A receiver takes whatever has arrived and makes it available at once: there
is no chunk size. On other transports, whose streams we do not have, bytes go in messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from time import monotonic

from distributed.comm.core import Comm, CommClosedError
from distributed.comm.tcp import TCP, TLS, convert_stream_closed_error
from tornado.iostream import IOStream, StreamClosedError

from dask_hoplite.transfer.buffer import Buffer

#: The most that is read or written at once, in bytes: bounds the time in which the event loop does
#: nothing else (a copy of 4 MiB takes about 1 ms), and is far more than a socket holds.
PIECE = 4 * 2**20

#: Each wake-up costs some 0.1 ms of a core, whatever it brings, and so it pays to let bytes gather.
#: All hops together may be late by this share of the whole transfer; one by so many seconds.
GATHER_SHARE, GATHER_MOST = 1 / 100, 0.002


def path(comm: Comm, address: str) -> str:
    """How bytes go over a connection to or at this address, for people to read."""
    kind = "stream" if isinstance(comm, TCP) else "messages"
    return f"{address.split('://')[0]} {kind}"


async def send(comm: Comm, buffer: Buffer, offset: int) -> None:
    """Send all bytes from ``offset`` on, as they become available.

    Raises
    ------
    OSError
        If the connection breaks. It is unusable after any error, and closed.
    """
    try:
        while offset < buffer.nbytes:
            have = await buffer.beyond(offset)
            piece = buffer.piece(offset, min(have, offset + PIECE))
            if isinstance(comm, TCP):
                await _stream(comm).write(piece)
            else:
                await comm.write({"bytes": bytes(piece)})
            offset += len(piece)
    except StreamClosedError as error:
        comm.abort()
        convert_stream_closed_error(comm, error)
    except BaseException:
        comm.abort()
        raise


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
        if isinstance(comm, TCP):
            await _receive_stream(comm, buffer, hops)
        else:
            while not buffer.complete:
                buffer.advance(await _read_message(comm, buffer))
    except StreamClosedError as error:
        comm.abort()
        convert_stream_closed_error(comm, error)
    except BaseException:
        comm.abort()
        raise


async def _receive_stream(comm: TCP, buffer: Buffer, hops: int) -> None:
    gathering = None if isinstance(comm, TLS) else Gathering(_stream(comm), buffer, hops)
    try:
        while not buffer.complete:
            view = buffer.piece(buffer.received, buffer.received + PIECE)
            read = _stream(comm).read_into(view, partial=True)  # type: ignore[arg-type]
            more = read.done()  # type: ignore[attr-defined]
            buffer.advance(await read)
            if more:
                # A fast sender always has more: let those run who send it on.
                await asyncio.sleep(0)
            if gathering is not None:
                gathering.adjust()
    finally:
        if gathering is not None:
            gathering.stop()


async def send_marks(comm: Comm, buffer: Buffer) -> None:
    """Tell how many bytes there are of a buffer that the receiver sees itself.

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


class Gathering:
    """Lets bytes gather in the socket for as long as that delays nobody noticeably.

    The kernel wakes us only when so many bytes are there as come, at the present rate, in a small
    part of the time that the whole object takes (``SO_RCVLOWAT``). Not for TLS, where the bytes on
    the wire are not those that we count.
    """

    def __init__(self, stream: IOStream, buffer: Buffer, hops: int):
        self.socket: socket.socket = stream.socket
        self.share = GATHER_SHARE / hops
        self.buffer = buffer
        self.start = monotonic()
        self.first = buffer.received
        self.mark = 1

    def adjust(self) -> None:
        """Set the mark for what comes next."""
        missing = self.buffer.nbytes - self.buffer.received
        elapsed = monotonic() - self.start
        rate = (self.buffer.received - self.first) / max(elapsed, 1e-6)
        delay = min(self.buffer.nbytes / rate * self.share, GATHER_MOST)
        mark = max(min(int(rate * delay), missing, PIECE), 1)
        if self.mark > missing or not self.mark / 2 < mark < self.mark * 2:
            self._set(mark)

    def stop(self) -> None:
        """Put the socket back into its ordinary state."""
        if self.mark != 1:
            self._set(1)

    def _set(self, mark: int) -> None:
        self.mark = mark
        with contextlib.suppress(OSError):  # closed meanwhile: whoever reads next finds out
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)


async def _read_message(comm: Comm, buffer: Buffer) -> int:
    data = (await comm.read())["bytes"]
    offset = buffer.received
    done = 0
    while done < len(data):
        piece = buffer.piece(offset + done, offset + len(data))
        piece[:] = data[done : done + len(piece)]
        done += len(piece)
    return done


def _stream(comm: TCP) -> IOStream:
    if comm.stream is None:
        raise CommClosedError("connection closed")
    return comm.stream
