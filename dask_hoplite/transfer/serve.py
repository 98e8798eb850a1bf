"""The serving half of pulls, and the taking half of pushes: what runs when a peer calls."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from distributed.comm.core import Comm, CommClosedError
from distributed.core import Status
from distributed.utils import offload

from dask_hoplite.core.events import Key
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.channel import (
    counted,
    path,
    receive,
    receive_marks,
    send,
    send_marks,
)
from dask_hoplite.transfer.layout import Layout
from dask_hoplite.transfer.patience import patiently
from dask_hoplite.transfer.shared import RELAYED, SHARE_MIN, affinity
from dask_hoplite.transfer.shelf import Shelf

NoReply = Literal[Status.dont_reply]


async def serve(
    comm: Comm,
    shelf: Shelf,
    key: Key,
    offset: int,
    identity: str,
    whose: str,
    fingerprint: bytes | None,
    sent: Callable[[str, int], None] = lambda how, nbytes: None,
) -> dict[str, Any] | NoReply:
    """Send an object, or the rest of it, to the worker that asked for it.

    Parameters
    ----------
    comm : Comm
        The connection that the request came on; afterwards it is free for others.
    shelf : Shelf
        Where the object is looked for.
    key : Key
        The object.
    offset : int
        What the receiver has already, in bytes.
    identity : str
        The serialisation that these are of. If ours is another one, we ask for ...
    fingerprint : bytes or None
        ... the :meth:`~dask_hoplite.transfer.buffer.Buffer.fingerprint` of what it has. If ours
        begins otherwise, all of it is sent.
    whose : str
        The receiver's :func:`~dask_hoplite.transfer.shared.affinity`.
    sent : callable, optional
        Is told how bytes went, and how many, also if the rest could not be sent.
    """
    try:
        async with shelf.reading(key) as buffer:
            if offset and buffer.layout.identity != identity:
                if fingerprint is None:
                    return {"status": "other"}
                await buffer.beyond(offset - 1)
                if await offload(buffer.fingerprint, offset) != fingerprint:
                    offset = 0
            answer = {"status": "OK", "offset": offset, **buffer.layout.to_message()}
            shared = shelf.share(key, buffer, whose) if offset == 0 else None
            try:
                if shared is not None:
                    await comm.write({**answer, "shared": shared.handle})  # type: ignore[attr-defined]
                    if (await comm.read())["attached"]:
                        await send_marks(comm, shared, partial(sent, "shared memory"))
                        return Status.dont_reply
                else:
                    await comm.write(answer)
                await send(comm, buffer, offset, partial(sent, path(comm, comm.local_address)))
            except CommClosedError:
                raise
            except Exception as error:
                # What we were to pass on will not come. Only a broken connection tells the
                # receiver so, since it expects nothing but bytes.
                raise CommClosedError(f"{key!r}: {error}") from error
            return Status.dont_reply
    except CommClosedError:
        raise
    except (KeyError, OSError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        reason = "does not have it" if isinstance(error, KeyError) else str(error)
        return {"status": "gone", "reason": reason}
    except Exception as error:
        return {"status": "error", "exception": pickle.dumps(error)}


async def accept(
    comm: Comm,
    address: str,
    layout: Layout,
    whose: str,
    begin: Callable[[Layout, dict[str, Any] | None], Buffer],
    timeout: float,
    counts: Counter[str] | None = None,
) -> str:
    """Take all bytes of a push.

    Parameters
    ----------
    comm : Comm
        The connection that it comes on.
    address : str
        This worker's.
    layout : Layout
        What comes.
    whose : str
        The sender's :func:`~dask_hoplite.transfer.shared.affinity`.
    begin : callable
        As for :func:`dask_hoplite.transfer.pull.take`.
    timeout : float
        Seconds.
    counts : Counter, optional
        As for :func:`dask_hoplite.transfer.pull.take`.

    Returns
    -------
    str
        How the bytes went.

    Raises
    ------
    OSError
        If the connection breaks, or no byte comes for ``timeout`` seconds.
    """
    share = bool(whose) and whose == affinity() and layout.nbytes >= SHARE_MIN
    await comm.write({"status": "OK", "share": share})
    handle = (await comm.read())["shared"] if share else None
    buffer = None
    if handle is not None:
        try:
            buffer = begin(layout, handle)
        except OSError:
            handle = None
        await comm.write({"attached": handle is not None})
    if buffer is None:
        buffer = begin(layout, None)
    how = path(comm, address) if handle is None else "shared memory"
    if whose == RELAYED:
        how += ", relayed"
    taking = receive(comm, buffer) if handle is None else receive_marks(comm, buffer)
    with counted(counts, how, buffer):
        await patiently(taking, lambda: buffer.arrived, timeout)
    return how
