"""Bytes over an established Dask connection.

After the request and its answer, two ordinary Dask messages, the object's bytes follow with no
framing on the connection's own stream (TCP and TLS), and afterwards the connection is an ordinary
Dask connection again. A receiver takes whatever has arrived and makes it available at once: there
is no chunk size. On other transports, whose streams we do not have, bytes go in messages.
"""

from __future__ import annotations

import asyncio

from distributed.comm.core import Comm, CommClosedError
from distributed.comm.tcp import TCP, convert_stream_closed_error
from tornado.iostream import StreamClosedError

from dask_hoplite.transfer.buffer import Buffer

#: The most that is read or written at once, in bytes: bounds the time in which the event loop does
#: nothing else (a copy of 4 MiB takes about 1 ms), and is far more than a socket holds.
PIECE = 4 * 2**20


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
                if comm.stream is None:
                    raise CommClosedError("connection closed")
                await comm.stream.write(piece)
            else:
                await comm.write({"bytes": bytes(piece)})
            offset += len(piece)
    except StreamClosedError as error:
        comm.abort()
        convert_stream_closed_error(comm, error)
    except BaseException:
        comm.abort()
        raise


async def receive(comm: Comm, buffer: Buffer) -> None:
    """Take all bytes that are still missing.

    Raises
    ------
    OSError
        If the connection breaks. It is unusable after any error, and closed.
    """
    try:
        while not buffer.complete:
            offset = buffer.received
            if isinstance(comm, TCP):
                if comm.stream is None:
                    raise CommClosedError("connection closed")
                view = buffer.piece(offset, offset + PIECE)
                buffer.advance(await comm.stream.read_into(view, partial=True))  # type: ignore[arg-type]
            else:
                buffer.advance(await _read_message(comm, buffer))
            # A fast sender always has more: let those run who send it on.
            await asyncio.sleep(0)
    except StreamClosedError as error:
        comm.abort()
        convert_stream_closed_error(comm, error)
    except BaseException:
        comm.abort()
        raise


async def _read_message(comm: Comm, buffer: Buffer) -> int:
    data = (await comm.read())["bytes"]
    offset = buffer.received
    done = 0
    while done < len(data):
        piece = buffer.piece(offset + done, offset + len(data))
        piece[:] = data[done : done + len(piece)]
        done += len(piece)
    return done
