"""What a link can do: one raw TCP stream from a worker to another one."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from contextlib import suppress

from distributed import Client
from distributed.comm import get_address_host

#: Seconds that a stream lasts.
SECONDS = 1.0

#: Seconds after which a stream is given up that does not begin, or does not go on.
PATIENCE = 5.0

#: How often it is measured. The best one counts: others may have used the link meanwhile.
TIMES = 3

#: What the receiver tells at the end: bytes per second.
RATE = struct.Struct("!d")

CHUNK = 2**18


def goodput(client: Client, sender: str, receiver: str) -> float:
    """Payload bytes per second from a worker to another one.

    Parameters
    ----------
    client : Client
        A client of their cluster.
    sender, receiver : str
        Addresses of the workers.

    Returns
    -------
    float
        Bytes per second, the best of three streams of a second each.

    Raises
    ------
    OSError
        If there is no connection between ports of their own, as a firewall may have it.
    """
    return max(_once(client, sender, receiver) for _ in range(TIMES))


def _once(client: Client, sender: str, receiver: str) -> float:
    host = get_address_host(receiver)
    port = client.run(drain, host, workers=[receiver])[receiver]
    return float(client.run(fill, host, port, workers=[sender])[sender])


def drain(host: str) -> int:
    """Receive a stream, beside whatever else this process does; return the port."""
    server = socket.create_server((host, 0))
    threading.Thread(target=_drain, args=[server], name="hoplite-bench", daemon=True).start()
    return int(server.getsockname()[1])


def _drain(server: socket.socket) -> None:
    server.settimeout(PATIENCE)
    with server, suppress(OSError):  # the sender tells
        stream, _ = server.accept()
        with stream:
            stream.settimeout(PATIENCE)
            buffer = bytearray(CHUNK)
            # The clock starts behind the first bytes: connecting is not the link's rate.
            first = received = stream.recv_into(buffer)
            start = time.perf_counter()
            while n := stream.recv_into(buffer):
                received += n
            seconds = time.perf_counter() - start
            stream.sendall(RATE.pack((received - first) / seconds))


async def fill(host: str, port: int) -> float:
    """Send a stream for a while; return bytes per second as its receiver saw them."""
    return await asyncio.to_thread(_fill, host, port)


def _fill(host: str, port: int) -> float:
    chunk = bytes(CHUNK)
    with socket.create_connection((host, port), timeout=PATIENCE) as stream:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            stream.sendall(chunk)
        stream.shutdown(socket.SHUT_WR)
        answer = stream.recv(RATE.size, socket.MSG_WAITALL)
    if len(answer) < RATE.size:
        raise ConnectionError("the receiver has ended the stream")
    return float(RATE.unpack(answer)[0])
