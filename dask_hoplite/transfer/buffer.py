"""The bytes of one object in this process: whole, or growing while others already read them."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from itertools import accumulate

from distributed.protocol.utils import host_array

from dask_hoplite.transfer.layout import Layout


class Buffer:
    """Frames that one writer fills from front to back, and any number of readers follow.

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
        self.frames = [host_array(n) for n in layout.lengths] if frames is None else frames
        self.nbytes = layout.nbytes
        self.received = self.nbytes if frames is not None else 0
        self._ends = list(accumulate(layout.lengths))
        self._error: BaseException | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<Buffer {self.received} of {self.nbytes} bytes>"

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self.received == self.nbytes

    def piece(self, offset: int, stop: int) -> memoryview:
        """As much of ``[offset, stop)`` as lies in one frame."""
        index = self.frame_at(offset)
        start = self.start_of(index)
        return self.frames[index][offset - start : stop - start]

    def frame_at(self, offset: int) -> int:
        """The index of the frame that a byte is in."""
        return bisect_right(self._ends, offset)

    def start_of(self, index: int) -> int:
        """The offset of the first byte of a frame."""
        return self._ends[index] - self.layout.lengths[index]

    def own_frames(self) -> list[memoryview]:
        """Frames for an object to live in."""
        return self.frames

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
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        return self.received

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
