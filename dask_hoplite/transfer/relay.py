"""Pulls and pushes by way of the scheduler, for clients that do not reach the workers themselves.

The client asks as it would ask the worker, after a message that names it. The scheduler passes on
request, answer and bytes, these through one window: of an object, however large, it holds no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Coroutine
from typing import Any, TypeVar

from distributed.comm.core import Comm, CommClosedError
from distributed.comm.tcp import TCP
from distributed.core import ConnectionPool, Status
from distributed.protocol.utils import host_array

from dask_hoplite.transfer.layout import Layout
from dask_hoplite.transfer.patience import patiently, stop, written
from dask_hoplite.transfer.serve import NoReply
from dask_hoplite.transfer.shared import RELAYED

#: The most that is held of one transfer, in bytes: about what the sockets on both sides hold too.
WINDOW = 2**20

#: Seconds after which it is seen that one end has left while nothing comes from the other.
LOOK = 0.5

T = TypeVar("T")

OPERATIONS = ("hoplite_pull", "hoplite_push")


class Relay:
    """Connections to workers by way of the scheduler, as a client's pool gives direct ones.

    Parameters
    ----------
    rpc : ConnectionPool
        The client's.
    scheduler : str
        Address of the scheduler.
    """

    def __init__(self, rpc: ConnectionPool, scheduler: str):
        self.rpc = rpc
        self.scheduler = scheduler

    async def connect(self, worker: str) -> Comm:
        """A connection on which one request to a worker is to follow.

        Raises
        ------
        OSError
            If the scheduler cannot be reached.
        """
        comm = await self.rpc.connect(self.scheduler)
        try:
            await comm.write({"op": "hoplite_relay", "worker": worker, "reply": False})
        except BaseException:
            comm.abort()
            self.reuse(worker, comm)
            raise
        return comm

    def reuse(self, worker: str, comm: Comm) -> None:
        """Take a connection back: after the end of the exchange, or closed."""
        self.rpc.reuse(self.scheduler, comm)


#: Where connections to workers are had.
Connections = ConnectionPool | Relay


async def relay(
    comm: Comm, rpc: ConnectionPool, worker: str, workers: Container[str], timeout: float
) -> NoReply:
    """Pass on what a client asks a worker, the answer, and the bytes.

    Parameters
    ----------
    comm : Comm
        The client's connection.
    rpc : ConnectionPool
        The scheduler's connections.
    worker : str
        The worker's address.
    workers : container of str
        Addresses of those that are in the cluster.
    timeout : float
        Seconds after which a worker that takes no byte is given up.

    Raises
    ------
    CommClosedError
        If either connection breaks. Then both are closed, so that each end sees it.
    """
    request = await _request(comm)
    try:
        if worker not in workers:
            raise ConnectionError("it has left")
        there = await _watched(rpc.connect(worker), comm)
    except OSError as error:
        reason = f"the scheduler cannot reach {worker}: {type(error).__name__}: {error}"
        await comm.write({"status": "gone", "reason": reason})
        return Status.dont_reply
    try:
        await _watched(_exchange(comm, there, request, timeout), comm, there)
    except BaseException as error:
        comm.abort()
        there.abort()
        if isinstance(error, OSError):
            raise CommClosedError(f"relay to {worker}: {error}") from error
        raise
    finally:
        rpc.reuse(worker, there)
    return Status.dont_reply


async def _exchange(comm: Comm, there: Comm, request: dict[str, Any], timeout: float) -> None:
    while True:
        # The two are not known to see each other's memory, and to go round us is not what is asked.
        await there.write({**request, "affinity": RELAYED})
        status: str | None = "wait"
        while status == "wait":
            answer = await there.read()
            await comm.write(answer)
            status = answer["status"] if isinstance(answer, dict) else None
        if status != "other":
            break
        request = await _request(comm)
    if status != "OK":
        return
    if request["op"] == "hoplite_pull":
        await Carrier(there, comm, _length(answer, answer["offset"])).run()
    else:
        carrier = Carrier(comm, there, _length(request["layout"], 0))
        # A client that gives up is not seen to leave, behind bytes that nobody takes.
        await patiently(carrier.run(), lambda: carrier.progress, timeout)
        await comm.write(await there.read())


def _length(layout: dict[str, Any], offset: int) -> int:
    return Layout.from_message(layout).stream_length(offset)


async def _request(comm: Comm) -> dict[str, Any]:
    request = await comm.read()
    if not isinstance(request, dict) or request.get("op") not in OPERATIONS:
        raise CommClosedError("a relay is for pulls and pushes only")
    return request


class Carrier:
    """Takes bytes from one connection to another, a window at a time.

    The next are read when these are gone: a slow target slows the source, by way of TCP.

    Parameters
    ----------
    source, target : Comm
        The connections.
    nbytes : int
        How many there are.
    """

    def __init__(self, source: Comm, target: Comm, nbytes: int):
        self.source = source
        self.target = target
        self.left = nbytes
        self.window = host_array(min(nbytes, WINDOW))

    @property
    def progress(self) -> tuple[int, int]:
        """Changes when the target takes bytes."""
        return self.left, written(self.target)

    async def run(self) -> None:
        """Take all of them.

        Raises
        ------
        OSError
            If either connection breaks.
        """
        while self.left:
            view = await self._read()
            if isinstance(self.target, TCP):
                await _stream(self.target).write(view)
            else:
                await self.target.write({"bytes": bytes(view)})
            self.left -= len(view)
            await asyncio.sleep(0)  # the scheduler has other things to do

    async def _read(self) -> memoryview:
        if not isinstance(self.source, TCP):
            return memoryview((await self.source.read())["bytes"])
        view = self.window[: self.left]
        return view[: await _stream(self.source).read_into(view, partial=True)]


async def _watched(doing: Coroutine[Any, Any, T], *ends: Comm) -> T:
    """Do something for as long as nobody leaves, also while it waits for another."""
    task = asyncio.create_task(doing, name="hoplite-relay")
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK)
            if not task.done() and any(end.closed() for end in ends):
                raise CommClosedError("one end left")
        return task.result()
    finally:
        await stop(task)


def _stream(comm: TCP) -> Any:
    if comm.stream is None:
        raise CommClosedError("connection closed")
    return comm.stream
