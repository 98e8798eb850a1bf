"""What this process can serve: objects on their way in, and serialisations of those it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from dask.sizeof import sizeof
from distributed.utils import offload

from dask_hoplite.core.events import Key
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import dump
from dask_hoplite.transfer.shared import SHARE_MIN, AttachedBuffer, SharedBuffer, affinity

#: Above this many bytes, (de)serialising happens off the event loop. The same bound as Dask's own.
OFFLOAD = 10_000_000


@dataclass
class Entry:
    """One object's buffer: promised, growing or whole."""

    buffer: asyncio.Future[Buffer]
    readers: int = 0
    expiry: asyncio.TimerHandle | None = None
    shared: SharedBuffer | None = None  #: a copy for other processes of this host
    spilled: bool = False  #: the value is on disk by now, so that this keeps memory


class Shelf:
    """Buffers by key.

    A whole object's buffer is kept for ``grace`` seconds after its last reader, so that those who
    come one after another, or come back to go on, find the same serialisation. For arrays it is the
    array's own memory and costs nothing.

    Parameters
    ----------
    data : mapping
        The worker's values by key.
    grace : float
        Seconds.
    """

    def __init__(self, data: Mapping[Key, object], grace: float = 5.0):
        self.data = data
        self.grace = grace
        self.entries: dict[Key, Entry] = {}
        self.awaited: dict[Key, set[asyncio.Event]] = {}

    def promise(self, key: Key) -> Entry:
        """Announce an object that is about to come in; readers wait for its buffer."""
        self.discard(key)
        entry = self.entries[key] = Entry(asyncio.get_running_loop().create_future())
        self.announce(key)
        # If nobody ever reads it, its failure is nobody's loss.
        entry.buffer.add_done_callback(lambda f: f.cancelled() or f.exception())
        return entry

    def announce(self, key: Key) -> None:
        """Wake those who wait to hear whether an object will come here."""
        for event in self.awaited.pop(key, ()):
            event.set()

    async def announced(self, key: Key, timeout: float) -> None:
        """Wait until it is known whether an object will come here; at most ``timeout`` seconds."""
        if key not in self.entries and key not in self.data:
            event = asyncio.Event()
            self.awaited.setdefault(key, set()).add(event)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await event.wait()
            finally:
                if event in (events := self.awaited.get(key, set())):
                    events.remove(event)
                    if not events:
                        del self.awaited[key]

    def discard(self, key: Key, error: BaseException | None = None) -> None:
        """Serve this object no longer. Readers of a whole one may finish; others get ``error``."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            if entry.expiry is not None:
                entry.expiry.cancel()
            self.fail(entry, error or KeyError(key))

    @staticmethod
    def fail(entry: Entry, error: BaseException) -> None:
        """Tell the readers of an entry that no more will come."""
        if not entry.buffer.done():
            entry.buffer.set_exception(error)
        elif not entry.buffer.cancelled() and entry.buffer.exception() is None:
            entry.buffer.result().fail(error)

    def close(self, error: BaseException) -> None:
        """Discard everything."""
        for key in list(self.entries):
            self.discard(key, error)

    @asynccontextmanager
    async def reading(self, key: Key) -> AsyncIterator[Buffer]:
        """The buffer of an object, for as long as it is being read.

        Raises
        ------
        KeyError
            If the object is not here.
        TypeError
            If it cannot be serialised.
        """
        entry = self.entries.get(key)
        if entry is None:
            value = self.data[key]
            entry = self.promise(key)
            try:
                big = sizeof(value) > OFFLOAD
                layout, frames = await offload(dump, value) if big else dump(value)
                if not entry.buffer.done():
                    entry.buffer.set_result(Buffer(layout, frames))
            except BaseException as error:
                if self.entries.get(key) is entry:
                    self.discard(key, error)
                raise
            finally:
                del value
        entry.readers += 1
        try:
            yield await asyncio.shield(entry.buffer)
        finally:
            entry.readers -= 1
            self.settle(key)

    def share(self, key: Key, buffer: Buffer, with_whom: str) -> Buffer | None:
        """A form of a buffer that a process of the given affinity can map, if it can any."""
        if not with_whom or with_whom != affinity() or buffer.nbytes < SHARE_MIN:
            return None
        if isinstance(buffer, SharedBuffer | AttachedBuffer):
            return buffer
        entry = self.entries.get(key)
        if entry is None or not buffer.complete:
            return None
        if entry.shared is None:
            try:
                entry.shared = SharedBuffer.copy_of(buffer)
            except OSError:
                return None  # no memory for it: bytes go over the connection
        return entry.shared

    def spilled(self, key: Key) -> None:
        """The value has gone to disk: its memory goes with the last who reads it now."""
        if (entry := self.entries.get(key)) is not None:
            entry.spilled = True
            self.settle(key)

    def settle(self, key: Key) -> None:
        """Start the period of grace of a whole object that nobody reads."""
        entry = self.entries.get(key)
        if entry is None or entry.readers or not entry.buffer.done():
            return
        if entry.buffer.cancelled() or entry.buffer.exception() is not None:
            return
        if entry.buffer.result().complete:
            if entry.expiry is not None:
                entry.expiry.cancel()
            if entry.spilled:  # at once: Dask goes on spilling until it sees free memory
                self._expire(key, entry)
                return
            loop = asyncio.get_running_loop()
            entry.expiry = loop.call_later(self.grace, self._expire, key, entry)

    def _expire(self, key: Key, entry: Entry) -> None:
        if self.entries.get(key) is entry and not entry.readers:
            del self.entries[key]
