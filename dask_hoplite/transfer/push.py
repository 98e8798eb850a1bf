"""Giving an object to a worker from outside the cluster: from a client, or from the scheduler."""

from __future__ import annotations

from distributed.comm.core import Comm
from distributed.core import send_recv

from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import TransferError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.channel import send, send_marks
from dask_hoplite.transfer.patience import patiently, written
from dask_hoplite.transfer.relay import Connections
from dask_hoplite.transfer.shared import SharedBuffer, affinity


async def push(
    rpc: Connections, worker: str, key: Key, buffer: Buffer, epoch: int, timeout: float
) -> int:
    """Send an object to a worker that was told to expect it; return when it is held there.

    Parameters
    ----------
    rpc : ConnectionPool or Relay
        Where the connection is taken from, and goes back to.
    worker : str
        Address of the worker.
    key : Key
        The object.
    buffer : Buffer
        Its bytes, all of them.
    epoch : int
        What the worker was told with the key.
    timeout : float
        Seconds after which a worker that takes no byte is given up.

    Returns
    -------
    int
        Its size there, as Dask measures it.

    Raises
    ------
    OSError
        If the worker cannot be reached, leaves, or takes no more.
    TransferError
        If it does not take it.
    """
    comm = await rpc.connect(worker)
    try:
        share = await _ask(comm, worker, key, buffer, epoch, timeout)
        sending = _send(comm, buffer, share)
        await patiently(sending, lambda: (buffer.sent, written(comm)), timeout)
        answer = await comm.read()  # it may have much to unpack
        if answer["status"] != "OK":
            raise TransferError(key, f"{worker}: {answer['reason']}")
        return int(answer["nbytes"])
    except BaseException:
        comm.abort()  # what may still come on it is nobody's
        raise
    finally:
        rpc.reuse(worker, comm)


async def _ask(
    comm: Comm, worker: str, key: Key, buffer: Buffer, epoch: int, timeout: float
) -> bool:
    """Wait until the worker is ready; return whether it can see our memory."""
    asking = send_recv(
        comm,
        op="hoplite_push",
        key=key,
        epoch=epoch,
        layout=buffer.layout.to_message(),
        affinity=affinity(),
    )
    answer = await patiently(asking, lambda: None, timeout)
    while answer is not None and answer["status"] == "wait":  # until there is room for it
        answer = await patiently(comm.read(), lambda: None, timeout)
    if answer is None:  # it is closing, perhaps
        raise ConnectionError("it has no Hoplite")
    if answer["status"] == "gone":
        raise ConnectionError(answer["reason"])
    if answer["status"] != "OK":
        raise TransferError(key, f"{worker} does not take it: {answer['reason']}")
    return bool(answer["share"])


async def _send(comm: Comm, buffer: Buffer, share: bool) -> None:
    shared = _share(buffer) if share else None
    if share:
        await comm.write({"shared": shared.handle if shared is not None else None})
    if shared is not None and (await comm.read())["attached"]:
        await send_marks(comm, shared)
    else:
        await send(comm, buffer, 0)


def _share(buffer: Buffer) -> SharedBuffer | None:
    try:
        return SharedBuffer.copy_of(buffer)
    except OSError:
        return None
