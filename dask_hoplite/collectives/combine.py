"""Combining what comes with what is here, block by block, in whichever thread brings it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dask_hoplite.collectives.operands import as_bytes
from dask_hoplite.transfer.buffer import Buffer

#: The most bytes that are combined before they are passed on. What stays in a processor's cache
PIECE = 256 * 2**10


@dataclass
class Part:
    """One frame of the sum.

    Parameters
    ----------
    into : numpy.ndarray
        Where the sum goes, one-dimensional.
    operands : list of numpy.ndarray
        What is combined, as long and of the same dtype: first what comes from each source. The
        first may come to where the sum goes.
    finish : bool
        Whether this is the last that happens to it.
    write : callable, optional
        Puts bytes at an offset of ``into``. In memory that is shared, to write costs less than to
        have the pages mapped one by one.
    """

    into: np.ndarray
    operands: list[np.ndarray] = field(default_factory=list)
    finish: bool = False
    write: Callable[[int, memoryview], None] | None = None


class Combination:
    """Forms a sum of what comes from any number of sources, as far as all of them have come.

    The outgoing byte ``p`` follows the incoming byte ``p`` at once; in a ring, it is ahead by one
    share.

    Parameters
    ----------
    inputs : list of Buffer
        What comes, by source.
    parts : list of Part
        The frames.
    out : Buffer
        Its frames have been filled up to ``out.received``; what is made is counted there.
    combine : callable
        Given two arrays and one for the result, which may be the first.
    finish : callable
        Makes the result of a sum, in place.
    """

    def __init__(
        self,
        inputs: Sequence[Buffer],
        parts: Sequence[Part],
        out: Buffer,
        combine: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
        finish: Callable[[np.ndarray], None],
    ):
        self.inputs = list(inputs)
        self.parts = [part for part in parts if part.into.size]
        self.out = out
        self.combine = combine
        self.finish = finish
        self.nbytes = sum(part.into.nbytes for part in self.parts)
        self.made = 0  #: bytes, in whole elements
        self.index = self.start = 0  # the part that it is in, and where that begins
        self.error: BaseException | None = None
        self._following: list[tuple[Buffer, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Go on whenever bytes come, in the thread that brings them."""
        for buffer in self.inputs:
            self._follow(buffer, self.advance)
        self.advance()

    def _follow(self, buffer: Buffer, call: Callable[[], None]) -> None:
        buffer.follow(call)
        self._following.append((buffer, call))

    def unfollow(self) -> None:
        """Stop to do so."""
        for buffer, call in self._following:
            buffer.unfollow(call)
        self._following.clear()

    def replace(
        self,
        index: int,
        buffer: Buffer,
        arrays: Sequence[np.ndarray],
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        """Take from other memory what comes from a source of which nothing has come yet.

        Parameters
        ----------
        index : int
            Which source.
        buffer : Buffer
            Where its bytes come instead.
        arrays : sequence of numpy.ndarray
            The memory of that, part by part.
        run : callable
            Gets something that takes its time, since bytes come there in an event loop's thread.
        """
        with self._lock:
            self.inputs[index] = buffer
            for part, array in zip(self.parts, (a for a in arrays if a.size), strict=True):
                part.operands[index] = array
        self._follow(buffer, partial(run, self.advance))

    @property
    def complete(self) -> bool:
        """Whether all is combined."""
        return self.made == self.nbytes

    def advance(self) -> None:
        """Combine what is there.

        Raises
        ------
        Exception
            What the operation raised.
        """
        with self._lock:
            have = min((buffer.received for buffer in self.inputs), default=self.nbytes)
            while self.error is None and self.made < have:
                try:
                    with np.errstate(all="ignore"):
                        count = self._advance(min(have, self.made + PIECE))
                except BaseException as error:
                    self.error = error
                    raise
                if not count:
                    return
                self.made += count
                self.out.advance(min(count, self.out.nbytes - self.out.received))

    def _advance(self, stop: int) -> int:
        """Combine up to a position, in one part; return the number of bytes."""
        if self.index == len(self.parts):
            return 0
        part = self.parts[self.index]
        size = part.into.itemsize
        begin = (self.made - self.start) // size
        end = min((stop - self.start) // size, part.into.size)
        if end <= begin:
            return 0
        into = part.into[begin:end]
        first, *others = (operand[begin:end] for operand in part.operands)
        is_there = part.operands[0] is part.into
        to = np.empty_like(into) if part.write is not None and not is_there else into
        if not others and not is_there:
            to[:] = first
        for other in others:
            self.combine(first, other, to)
            first = to
        if part.finish:
            self.finish(to)
        if to is not into:
            assert part.write is not None
            part.write(begin * size, as_bytes(to))
        if end == part.into.size:
            self.index += 1
            self.start += part.into.nbytes
        return (end - begin) * size


class Mirror:
    """Another layout of the same memory, which fills as a sum does.

    Parameters
    ----------
    source : Buffer
        The sum.
    buffer : Buffer
        The other layout: some of its frames lie in those of the sum, the others are complete.
    """

    def __init__(self, source: Buffer, buffer: Buffer):
        self.source = source
        self.buffer = buffer
        bases = [(address(frame), frame.nbytes) for frame in source.frames]
        self.ends: list[tuple[int, int]] = []  # offset behind each frame, and where the sum is then
        offset = 0
        for frame in buffer.frames:
            offset += frame.nbytes
            self.ends.append((offset, self._end(frame, bases)))

    def _end(self, frame: memoryview, bases: list[tuple[int, int]]) -> int:
        """Up to where the sum must be for a frame to be there."""
        start, offset = address(frame), 0
        for base, nbytes in bases:
            if frame.nbytes and base <= start and start + frame.nbytes <= base + nbytes:
                return offset + start - base + frame.nbytes
            offset += nbytes
        return 0

    def follow(self) -> None:
        """Go on whenever the sum does."""
        self.source.follow(self.advance)
        self.advance()

    def advance(self) -> None:
        """Count what is there."""
        made, buffer = self.source.received, self.buffer
        have = 0
        for offset, end in self.ends:
            if end > made:
                length = offset - have
                have += max(length - (end - made), 0)
                break
            have = offset
        if have > buffer.received:
            buffer.advance(have - buffer.received)


def address(frame: memoryview) -> int:
    """Where memory is; 0 if it is none."""
    return (
        int(np.frombuffer(frame, dtype="u1").__array_interface__["data"][0]) if frame.nbytes else 0
    )
