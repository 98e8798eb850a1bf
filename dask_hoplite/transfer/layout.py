"""An object as it goes over the wire: one header and any number of frames."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import dataclass
from math import isqrt
from typing import Any

from distributed.metrics import context_meter
from distributed.protocol.serialize import merge_and_deserialize, serialize
from distributed.utils import ensure_memoryview

#: Bytes of the digest that follows each block on the wire
DIGEST = 8

#: Bytes of the least and of the largest block
SMALLEST, LARGEST = 16 * 2**10, 256 * 2**10


@dataclass(frozen=True, slots=True)
class Layout:
    """What a receiver must know before the first byte.

    Parameters
    ----------
    identity : str
        Names this one serialisation. Two serialisations of the same value may differ in their
        bytes, so a transfer can only go on where another one ended if both have the same identity.
    header : bytes
        Dask's header, pickled; relays pass it on unread.
    lengths : tuple of int
        Bytes of each frame.
    """

    identity: str
    header: bytes
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all frames together."""
        return sum(self.lengths)

    @property
    def block(self) -> int:
        """Bytes that get a digest, of which receivers see all or nothing. A power of two.

        Each block costs some time, and a hop is behind by one: in a pipeline, the best size grows
        like the square root of the whole.
        """
        share = min(max(8 * isqrt(self.nbytes), SMALLEST), LARGEST)
        return 1 << share.bit_length() - 1

    def stream_length(self, offset: int) -> int:
        """Bytes that go over the wire from the block of an offset on."""
        nbytes, block = self.nbytes, self.block
        offset = offset if offset == nbytes else offset // block * block
        return nbytes - offset + DIGEST * -(-(nbytes - offset) // block)

    def to_message(self) -> dict[str, Any]:
        """As a part of a Dask message."""
        return {"identity": self.identity, "header": self.header, "lengths": self.lengths}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Layout:
        """The inverse of :meth:`to_message`."""
        return cls(message["identity"], message["header"], tuple(message["lengths"]))


@context_meter.meter("serialize")
def dump(value: object) -> tuple[Layout, list[memoryview]]:
    """Serialise an object by Dask's own serialisers, without compression.

    Raises
    ------
    TypeError
        If no serialiser can.
    """
    return pack(*serialize(value, on_error="raise"))


def pack(header: dict[str, Any], frames: list[Any]) -> tuple[Layout, list[memoryview]]:
    """Lay out what Dask has serialised already."""
    views = [_bytes_of(frame) for frame in frames]
    lengths = tuple(view.nbytes for view in views)
    return Layout(uuid.uuid4().hex, pickle.dumps(header), lengths), views


def _bytes_of(frame: Any) -> memoryview:
    """The memory of a frame.

    A view of a view, as Dask makes it of anything but bytes, would crash Python 3.11 if it were
    ever collected with a cycle that it is in.
    """
    view = memoryview(frame)
    return view.cast("B") if view.nbytes and view.c_contiguous else ensure_memoryview(frame)


def load(layout: Layout, frames: list[memoryview]) -> Any:
    """Make the object from its frames. Arrays use the frames' memory and do not copy it."""
    return merge_and_deserialize(pickle.loads(layout.header), frames)
