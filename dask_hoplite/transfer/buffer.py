"""The bytes of one object in this process: whole, or growing while others already read them."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from itertools import accumulate

from distributed.protocol.utils import host_array

from dask_hoplite.transfer.layout import Layout


class Buffer:
    """Frames that are filled from front to back by one writer and followed by any number of readers.

    Offsets count bytes from the start of the first frame through to the end of the last.

    Parameters
    ----------
    layout : Layout
        Sizes of the frames.
    frames : list of memoryview, optional
        The frames, complete. Without them, memory is allocated and the buffer starts empty.
    """

    def __init__(self, layout: Layout, frames: list[memoryview] | None = None):
        self.layout = layout
        self.frames = frames or [host_array(n) for n in layout.lengths]
        self.nbytes = layout.nbytes
        self.received = self.nbytes if frames is not None else 0
        self._ends = list(accumulate(layout.lengths))
        self._error: BaseException | None = None
        self._changed: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Buffer {self.received} of {self.nbytes} bytes>"

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self.received == self.nbytes

    def piece(self, offset: int, stop: int) -> memoryview:
        """As much of ``[offset, stop)`` as lies in one frame."""
        index = bisect_right(self._ends, offset)
        start = self._ends[index] - self.layout.lengths[index]
        return self.frames[index][offset - start : stop - start]

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written behind those that are there."""
        self.received += nbytes
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Tell all readers that no more bytes will come."""
        if self._error is None and not self.complete:
            self._error = error
            self._wake()

    async def beyond(self, offset: int) -> int:
        """Wait for bytes behind ``offset``; return how many bytes there are.

        Raises
        ------
        Exception
            The one given to :meth:`fail`, if no more will come.
        """
        while self.received <= offset:
            if self._error is not None:
                raise self._error
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            # Several readers share the future: one that is cancelled must not take it with it.
            await asyncio.shield(self._changed)
        return self.received

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
