"""One copy in memory for all processes of a host.

The bytes stand in a memory file (``memfd``) that belongs to the process that made it. Others open
it through ``/proc``, map it privately, and are told by messages how far it is filled. So nothing is
copied for them; whoever writes into its object gets pages of its own; and the memory is gone with
the last process that maps it, however that ends. Where this is not possible (other systems, other
users, containers), bytes go over the connection.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from functools import cache
from itertools import accumulate
from typing import Any

from distributed.utils import offload

from dask_hoplite.config import setting
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout

#: Below this many bytes, sending them is as fast.
SHARE_MIN = 2**20

#: Bytes that are copied into a memory file before others are told.
COPY = 16 * 2**20

#: In place of the affinity of who asks by way of the scheduler. Nobody has it.
RELAYED = "relayed"

#: Up to so many frames, each is mapped for itself, and so can be freed for itself.
MAPPINGS = 64


@cache
def affinity() -> str:
    """Equal for two processes if one can open the other's memory; empty if none can.

    The network is a part of it: hosts that are only emulated must use theirs.
    """
    if not setting("shared-memory"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts = [file.read().strip(), str(os.getuid())]
        parts += [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "user")]
        os.close(os.memfd_create("hoplite", os.MFD_CLOEXEC))
    except (OSError, AttributeError):
        return ""
    return ":".join(parts)


class SharedBuffer(Buffer):
    """A buffer that other processes of this host can map while it grows."""

    def __init__(self, layout: Layout):
        self.offsets, self.size = _offsets(layout)
        self.name = f"hoplite-{layout.identity}"
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size)
            # Written through a shared mapping, which only this process has.
            super().__init__(
                layout, _map(self.fd, layout, self.offsets, self.size, mmap.MAP_SHARED)
            )
        except BaseException:
            os.close(self.fd)
            raise
        self.received = 0
        self.filling: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    @classmethod
    def copy_of(cls, whole: Buffer) -> SharedBuffer:
        """A shared copy of a complete buffer, filled from now on by a thread."""
        copy = cls(whole.layout)
        copy.filling = asyncio.create_task(copy._fill(whole))
        return copy

    async def _fill(self, whole: Buffer) -> None:
        try:
            while not self.complete:
                piece = whole.piece(self.received, self.received + COPY)
                await offload(self.write, self.received, piece)
                self.advance(len(piece))
        except Exception as error:
            self.fail(error)

    @property
    def handle(self) -> dict[str, Any]:
        """What another process needs for :func:`attach`."""
        return {"pid": os.getpid(), "fd": self.fd, "name": self.name}

    def own_frames(self) -> list[memoryview]:
        """Frames for an object of this process: what it writes there, nobody else sees."""
        return _map(self.fd, self.layout, self.offsets, self.size, mmap.MAP_PRIVATE)

    def write(self, offset: int, piece: memoryview) -> None:
        """Fill in bytes of one frame. Allocates their memory, without holding the GIL."""
        index = self.frame_at(offset)
        position = self.offsets[index] + offset - self.start_of(index)
        done = 0
        while done < len(piece):
            done += os.pwrite(self.fd, piece[done:], position + done)


class AttachedBuffer(Buffer):
    """A buffer in another process's memory file. Bytes appear there; only their count is sent."""

    def __init__(self, layout: Layout, handle: dict[str, Any]):
        offsets, size = _offsets(layout)
        self.handle = handle
        path = f"/proc/{handle['pid']}/fd/{handle['fd']}"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The number may mean another process, or another file, by now.
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith(f"/memfd:{handle['name']}") or os.fstat(fd).st_size != size:
                raise FileNotFoundError(f"{path} is not {handle['name']}")
            super().__init__(layout, _map(fd, layout, offsets, size, mmap.MAP_PRIVATE))
        finally:
            os.close(fd)
        self.received = 0


def make_room(layout: Layout, shares_host: bool) -> Buffer:
    """An empty buffer; one that can be mapped by others if there are any on this host."""
    if shares_host and layout.nbytes >= SHARE_MIN and affinity():
        try:
            return SharedBuffer(layout)
        except OSError:
            pass
    return Buffer(layout)


def _offsets(layout: Layout) -> tuple[list[int], int]:
    """Where each frame starts in the file, on a page of its own; and the file's size."""
    page = mmap.ALLOCATIONGRANULARITY
    padded = [-(-length // page) * page for length in layout.lengths]
    ends = list(accumulate(padded))
    return [end - length for end, length in zip(ends, padded, strict=True)], ends[-1]


def _map(fd: int, layout: Layout, offsets: list[int], size: int, flags: int) -> list[memoryview]:
    if len(offsets) > MAPPINGS:
        whole = memoryview(mmap.mmap(fd, size, flags))
        return [
            whole[offset : offset + length]
            for offset, length in zip(offsets, layout.lengths, strict=True)
        ]
    return [
        memoryview(mmap.mmap(fd, length, flags, offset=offset) if length else b"")
        for offset, length in zip(offsets, layout.lengths, strict=True)
    ]
