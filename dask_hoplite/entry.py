"""How objects enter the cluster, from a client or from the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dask.sizeof import sizeof
from distributed import Future
from distributed.utils import offload

from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import NotInstalledError, TransferError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import dump

#: So often workers may leave with what they are sent, before the sender is told.
ATTEMPTS = 3

Place = Callable[[dict[Key, int], list[str]], Awaitable[Mapping[Key, tuple[str, int]]]]
Push = Callable[[str, Key, Buffer, int], Awaitable[int]]
Commit = Callable[[dict[Key, int]], Awaitable[dict[str, Any]]]
Abort = Callable[[list[Key], str], Awaitable[None]]


async def lay_out(values: Mapping[Key, Any], min_size: int) -> dict[Key, Buffer]:
    """The bytes of those objects that are to be streamed."""
    large = {}
    for key, value in values.items():
        if sizeof(value) >= min_size and not isinstance(value, Future):
            buffer = Buffer(*await offload(dump, value))
            if buffer.nbytes >= min_size:
                large[key] = buffer
    return large


async def enter(
    buffers: Mapping[Key, Buffer], place: Place, push: Push, commit: Commit, abort: Abort
) -> dict[Key, dict[str, str]]:
    """Send objects to workers; what a worker leaves with is sent to another.

    Parameters
    ----------
    buffers : mapping of Key to Buffer
        The objects.
    place, commit : callable
        See :class:`~dask_hoplite.puts.Puts`. Given are the sizes on the wire, and the workers
        that were tried; and the sizes there.
    push : callable
        Sends one; see :func:`dask_hoplite.transfer.push.push`.
    abort : callable
        Gives up objects, for a reason.

    Returns
    -------
    dict
        For each key the workers that could not get a copy, and why.

    Raises
    ------
    TransferError
        If that does not end well after some attempts; or if a worker does not take an object.
    Exception
        What a callable raised. Then the caller has to give up all of these objects.
    """
    sizes: dict[Key, int] = {}  # of what has been sent
    tried: dict[str, str] = {}

    async def send(key: Key, worker: str, epoch: int) -> None:
        try:
            sizes[key] = await push(worker, key, buffers[key], epoch)
        except OSError as error:
            tried[worker] = f"{type(error).__name__}: {error}"

    for _ in range(ATTEMPTS):
        missing = {key: buffer.nbytes for key, buffer in buffers.items() if key not in sizes}
        first = next(iter(missing))
        try:
            placement = await place(missing, list(tried))
        except NotInstalledError:
            raise
        except Exception as error:
            if not tried:
                raise
            raise TransferError(first, f"could not be sent again: {error}", tried) from error
        sending = [asyncio.create_task(send(key, *where)) for key, where in placement.items()]
        try:
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
        if len(sizes) == len(buffers):
            done = await commit(sizes)
            if not done["lost"]:
                return dict(done["failed"])
            for key, worker in done["lost"].items():
                del sizes[key]
                tried[worker] = "left with it"
        lost = [key for key in buffers if key not in sizes]
        await abort(lost, f"could not be sent: {tried}")
    raise TransferError(lost[0], "could not be sent to any worker", tried)
