"""An object's bytes as they go over the wire: blocks, each followed by its digest.

TCP's sixteen bits let damage pass now and then, and know nothing of a relay's memory. So the first
source makes a digest of each block, relays pass it on as it came, and whoever receives a block
looks at it before the block counts as received: before it is served on, and before it is used.

The digest is XXH3 of 64 bits (Y. Collet, https://xxhash.com), seeded with the number of the block,
so that one in a wrong place is found too. It helps against mishaps; against attackers, TLS does.
"""

from __future__ import annotations

from xxhash import xxh3_64, xxh3_64_digest

from dask_hoplite.exceptions import CorruptedError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import DIGEST

#: The most pieces in one list. Less than what one system call takes.
MOST = 512


class Wire:
    """A buffer, as the stream of blocks and digests that goes over the wire.

    Positions count bytes of that stream, offsets those of the object. A receiver always goes on at
    the beginning of a block.

    Parameters
    ----------
    buffer : Buffer
        The object's bytes.
    """

    def __init__(self, buffer: Buffer):
        self.buffer = buffer
        self.block = buffer.layout.block
        self.unit = self.block + DIGEST
        self.digests = memoryview(buffer.digests)
        self.nbytes = buffer.nbytes + len(self.digests)
        self.only = buffer.frames[0] if len(buffer.frames) == 1 else None

    def position(self, offset: int) -> int:
        """Where the block of an offset begins: up to there, blocks before it are complete."""
        if offset == self.buffer.nbytes:
            return self.nbytes
        return offset // self.block * self.unit

    def offset(self, position: int) -> int:
        """How much of the object is in complete blocks before a position."""
        if position == self.nbytes:
            return self.buffer.nbytes
        return position // self.unit * self.block

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """The memory of ``[start, stop)``, or of the first part of it, to receive into."""
        found: list[memoryview] = []
        while start < stop and len(found) < MOST:
            index, inside = divmod(start, self.unit)
            begin = index * self.block
            length = min(self.block, self.buffer.nbytes - begin)
            end = min(inside + stop - start, length + DIGEST)
            last = min(end, length)
            while inside < last and len(found) < MOST:
                piece = self._piece(begin + inside, begin + last)
                found.append(piece)
                inside += len(piece)
            if inside < end and len(found) < MOST:
                digest = index * DIGEST - length
                found.append(self.digests[digest + inside : digest + end])
            start = index * self.unit + end
        return found

    def sealed(self, start: int, stop: int) -> list[memoryview]:
        """The same, to be sent: with the digests. The blocks must be complete."""
        self.buffer.sent = start
        sealed = self.buffer.sealed
        for index in range(start // self.unit, -(-stop // self.unit)):
            if not sealed[index]:
                self.digests[index * DIGEST : (index + 1) * DIGEST] = self._digest(index)
                sealed[index] = True
        return self.pieces(start, stop)

    def put(self, position: int, data: memoryview) -> None:
        """Copy what came at a position to where it belongs."""
        while data:
            for piece in self.pieces(position, position + len(data)):
                piece[:] = data[: len(piece)]
                position += len(piece)
                data = data[len(piece) :]

    def check(self, position: int) -> None:
        """Count what has come up to a position as received, if it is what was sent.

        Raises
        ------
        CorruptedError
            If a block is not. It is not counted, and must come again.
        """
        buffer = self.buffer
        start = buffer.received
        offset = start // self.block * self.block  # a part of a block comes again
        stop = self.offset(position)
        buffer.arrived = position
        try:
            while offset < stop:
                index = offset // self.block
                if self._digest(index) != self.digests[index * DIGEST : (index + 1) * DIGEST]:
                    raise CorruptedError(f"bytes from {offset} on are not those that were sent")
                buffer.sealed[index] = True
                offset = min(offset + self.block, buffer.nbytes)
        finally:
            if offset > start:
                buffer.advance(offset - start)

    def _digest(self, index: int) -> bytes:
        offset = index * self.block
        stop = min(offset + self.block, self.buffer.nbytes)
        piece = self._piece(offset, stop)
        if len(piece) == stop - offset:
            return xxh3_64_digest(piece, seed=index)
        digest = xxh3_64(seed=index)
        while offset < stop:
            piece = self._piece(offset, stop)
            digest.update(piece)
            offset += len(piece)
        return digest.digest()

    def _piece(self, offset: int, stop: int) -> memoryview:
        if self.only is not None:  # it is done for each block
            return self.only[offset:stop]
        return self.buffer.piece(offset, stop)
