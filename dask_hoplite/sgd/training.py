"""A training, as its user sees it."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

from dask_hoplite.sgd.loop import Loop
from dask_hoplite.sgd.step import Step


class Training:
    """A training that is under way: an iterator of steps.

    Made by :func:`dask_hoplite.sgd.train`. It goes on by itself, up to three steps ahead of who
    iterates. To be iterated with ``for``, or, with an asynchronous client, ``async for``. It ends
    when it is closed, at the end of a ``with`` (``async with``), or when nobody has it any more.
    """

    def __init__(self, loop: Loop):
        self.client = loop.client
        self._loop = loop  # knows nothing of this object, or nobody would ever see that it is gone
        weakref.finalize(self, _abandon, loop)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        step = self.client.sync(self._loop.next)
        if step is None:
            raise StopIteration
        return step

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        step = await self._loop.next()
        if step is None:
            raise StopAsyncIteration
        return step

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    async def __aenter__(self) -> Training:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._loop.close()

    @property
    def parameters(self) -> Any:
        """The parameters after the last step that was told; awaitable with an asynchronous client.

        Raises
        ------
        Exception
            If they are lost.
        """
        return self.client.sync(self._loop.parameters)

    def checkpoint(self) -> Any:
        """All that is needed to go on later from the last step that was told.

        Returns
        -------
        Checkpoint
            To be given to :func:`train` as ``resume``. With an asynchronous client, an awaitable.

        Notes
        -----
        Sums that wait to be applied with later ones (:class:`Hybrid`) are not in it.
        """
        return self.client.sync(self._loop.checkpoint)

    def close(self) -> Any:
        """Stop, and leave nothing behind. Parameters can still be had."""
        return self.client.sync(self._loop.close)


def _abandon(loop: Loop) -> None:
    """Stop what nobody will look at any more."""
    if (events := loop.client.loop) is not None:
        with suppress(RuntimeError):  # it has ended before
            events.add_callback(loop.close)
