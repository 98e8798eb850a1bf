"""The serving half of pulls, and the taking half of pushes: what runs when a peer calls."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, Literal

from distributed.comm.core import Comm, CommClosedError
from distributed.core import Status

from dask_hoplite.core.events import Key
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.channel import receive, send
from dask_hoplite.transfer.shelf import Shelf

NoReply = Literal[Status.dont_reply]


async def serve(
    comm: Comm, shelf: Shelf, key: Key, offset: int, identity: str
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
        What the receiver has already, in bytes, of the serialisation ``identity``. If ours is
        another one, all of it is sent.
    """
    try:
        async with shelf.reading(key) as buffer:
            if buffer.layout.identity != identity:
                offset = 0
            await comm.write({"status": "OK", **buffer.layout.to_message()})
            try:
                await send(comm, buffer, offset)
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


async def accept(comm: Comm, buffer: Buffer, timeout: float) -> None:
    """Take all bytes of a push.

    Raises
    ------
    OSError
        If the connection breaks, or no byte comes for ``timeout`` seconds.
    """
    await comm.write({"status": "OK"})
    receiving = asyncio.create_task(receive(comm, buffer))
    try:
        while True:
            before = buffer.received
            done, _ = await asyncio.wait({receiving}, timeout=timeout)
            if done:
                return receiving.result()
            if buffer.received == before:
                raise TimeoutError(f"the sender was silent for {timeout} s")
    finally:
        if not receiving.done():
            receiving.cancel()
            await asyncio.wait({receiving})


