"""The bytes of one object in this process: whole, or growing while others already read them."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate

from distributed.protocol.utils import host_array

from dask_hoplite.transfer.layout import DIGEST, Layout


class Buffer:
    """Frames that one writer fills from front to back, and any number of readers follow.

    Offsets count bytes from the start of the first frame through to the end of the last. Writer and
    readers may be in different threads: the writer changes what there is and then calls those who
    follow; these enlist first and then look.

    Parameters
    ----------
    layout : Layout
        Sizes of the frames.
    frames : list of memoryview, optional
        The frames. Without them, memory is allocated and the buffer starts empty.
    received : int, optional
        How many bytes there are in the frames given. Default: all.
    """

    def __init__(
        self,
        layout: Layout,
        frames: list[memoryview] | None = None,
        received: int | None = None,
    ):
        self.layout = layout
        self.frames = [host_array(n) for n in layout.lengths] if frames is None else frames
        self.nbytes = layout.nbytes
        whole = self.nbytes if frames is not None else 0
        self.received = whole if received is None else received
        self.arrived = self.received  #: the same, or more, with what is not yet checked
        self.sent = 0  #: position on the wire up to which it was sent by whoever sent it last
        blocks = -(-self.nbytes // layout.block)
        self.digests = bytearray(DIGEST * blocks)  #: see :mod:`~dask_hoplite.transfer.wire`
        self.sealed = bytearray(blocks)  #: which of them are there
        self._ends = list(accumulate(layout.lengths))
        self.error: BaseException | None = None  #: why no more bytes will come
        self._followers: dict[Callable[[], None], None] = {}

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

    def fingerprint(self, nbytes: int) -> bytes:
        """A digest of the layout and of the first bytes, which must be there.

        Bytes that follow an equal beginning of an equally laid out serialisation complete the one
        like the other. Takes as long as a copy or two: not for event loops, if there are many.
        """
        digest = sha256(self.layout.header)
        digest.update(repr(self.layout.lengths).encode())
        offset = 0
        while offset < nbytes:
            piece = self.piece(offset, nbytes)
            digest.update(piece)
            offset += len(piece)
        return digest.digest()

    def own_frames(self) -> list[memoryview]:
        """Frames for an object to live in."""
        return self.frames

    def copy_from(self, other: Buffer) -> int:
        """Copy what there is of an equally laid out buffer; return its length, uncounted."""
        nbytes, offset = other.received, 0
        while offset < nbytes:
            piece = other.piece(offset, nbytes)
            self.piece(offset, nbytes)[:] = piece
            offset += len(piece)
        return nbytes

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written behind those that are there."""
        self.received += nbytes
        self.arrived = max(self.arrived, self.received)
        self._call()

    def fail(self, error: BaseException) -> None:
        """Tell all readers that no more bytes will come."""
        if self.error is None and not self.complete:
            self.error = error
            self._call()

    def follow(self, call: Callable[[], None]) -> None:
        """Have something called, by the writer, at more bytes, or when no more will come."""
        self._followers[call] = None
        self._let_go()

    def unfollow(self, call: Callable[[], None]) -> None:
        """Have it called no longer."""
        self._followers.pop(call, None)

    async def beyond(self, offset: int) -> int:
        """Wait for bytes behind ``offset``; return how many bytes there are.

        Raises
        ------
        Exception
            The one given to :meth:`fail`, if no more will come.
        """
        if self.received <= offset:
            loop, more = asyncio.get_running_loop(), asyncio.Event()

            def call() -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(more.set)

            self.follow(call)
            try:
                while self.received <= offset:
                    if self.error is not None:
                        raise self.error
                    await more.wait()
                    more.clear()
            finally:
                self.unfollow(call)
        return self.received

    def _call(self) -> None:
        for call in tuple(self._followers):
            call()
        self._let_go()

    def _let_go(self) -> None:
        """Know nobody any more whom there will be nothing to tell."""
        if self.complete or self.error is not None:
            self._followers.clear()
