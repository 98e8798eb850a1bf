"""Objects that are pushed to a worker from outside: by a client, or by the scheduler."""

from __future__ import annotations

import asyncio
import time as clock
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from distributed import Worker
from distributed.comm.core import Comm, CommClosedError

from dask_hoplite.core.events import Abandoned, Event, Finished, Key
from dask_hoplite.exceptions import HopliteError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout
from dask_hoplite.transfer.patience import stop
from dask_hoplite.transfer.pull import SLOTS, Puller, unpack
from dask_hoplite.transfer.room import Room
from dask_hoplite.transfer.serve import accept
from dask_hoplite.transfer.shared import AttachedBuffer, make_room
from dask_hoplite.transfer.shelf import Entry


@dataclass
class Expected:
    """A push that is about to come, or coming."""

    epoch: int
    entry: Entry
    timer: asyncio.TimerHandle
    shares_host: bool
    coming: bool = False


class Arrivals:
    """What a worker is told to expect, until it is there.

    Parameters
    ----------
    worker : Worker
        The worker, which holds what has come.
    puller : Puller
        What comes to it otherwise, and its shelf.
    report : callable
        Tells the directory of an event.
    timeout : float
        Seconds without a byte after which a push is given up.
    bytes_limit : float
        What may come at a time.
    """

    def __init__(
        self,
        worker: Worker,
        puller: Puller,
        report: Callable[[Event], None],
        timeout: float,
        bytes_limit: float,
    ):
        self.worker = worker
        self.puller = puller
        self.shelf = puller.shelf
        self.address = puller.address
        self.report = report
        self.timeout = timeout
        self.room = Room(SLOTS, bytes_limit)
        self.expected: dict[Key, Expected] = {}

    async def expect(self, key: Key, epoch: int, shares_host: bool) -> dict[str, str]:
        """Be ready for a push, and for readers of what it will bring."""
        if key in self.expected and self.expected[key].epoch < epoch:
            self.unexpect(key)  # it was given up
        if key in self.worker.data or key in self.puller.incoming or key in self.expected:
            return {"status": "held", "reason": f"{key!r} is here or on its way already"}
        entry = self.shelf.promise(key)
        self.expected[key] = Expected(epoch, entry, self._timer(key), shares_host)
        return {"status": "OK"}

    def _timer(self, key: Key) -> asyncio.TimerHandle:
        loop, later = asyncio.get_running_loop(), self.worker._ongoing_background_tasks.call_soon
        return loop.call_later(self.timeout, later, self._is_overdue, key)

    async def _is_overdue(self, key: Key) -> None:
        """Find out whether an object is still to come: its client may have others to send first."""
        expected = self.expected.get(key)
        if expected is None or expected.coming:
            return
        try:
            comes = await self.worker.scheduler.hoplite_comes(key=key, epoch=expected.epoch)
        except OSError:
            comes = None
        if self.expected.get(key) is expected and not expected.coming:
            if comes:
                expected.timer = self._timer(key)
            else:
                self.unexpect(key)

    def unexpect(self, key: Key) -> None:
        """Give up a push."""
        self.expected.pop(key).timer.cancel()
        self.shelf.discard(key, ConnectionError("the push did not come"))

    async def accept(
        self, comm: Comm, key: Key, epoch: int, layout: dict[str, Any], affinity: str = ""
    ) -> dict[str, Any]:
        """Take an object that a client or the scheduler pushes, when there is room for it.

        It waits for other pushes only: what is pulled here may wait for a push itself.
        """
        expected = self.expected.get(key)
        if expected is None or expected.epoch != epoch or expected.coming:
            return {"status": "refused", "reason": "it was not expected, or no longer"}
        expected.coming = True
        expected.timer.cancel()
        async with AsyncExitStack() as stack:
            room = self.room.take(sum(layout["lengths"]))
            entering = asyncio.create_task(stack.enter_async_context(room))
            try:
                while not (await asyncio.wait({entering}, timeout=self.timeout / 3))[0]:
                    await comm.write({"status": "wait"})  # or we would be taken to be frozen
            finally:
                await stop(entering)
            return await self._accept(comm, key, expected, layout, affinity)

    async def _accept(
        self, comm: Comm, key: Key, expected: Expected, layout: dict[str, Any], affinity: str
    ) -> dict[str, Any]:
        asked = clock.monotonic()
        buffer: Buffer | None = None

        def begin(layout: Layout, handle: dict[str, Any] | None) -> Buffer:
            nonlocal buffer
            if expected.entry.buffer.done():
                raise CommClosedError(f"{key!r} was given up")
            buffer = (
                AttachedBuffer(layout, handle)
                if handle is not None
                else make_room(layout, expected.shares_host)
            )
            expected.entry.buffer.set_result(buffer)
            return buffer

        try:
            how = await accept(
                comm,
                self.address,
                Layout.from_message(layout),
                affinity,
                begin,
                self.timeout,
                self.puller.bytes_in,
            )
            assert buffer is not None
            stop = clock.monotonic()
            value = await unpack(buffer)
            if self.shelf.entries.get(key) is not expected.entry:
                raise HopliteError("it was released meanwhile")
            held = self.worker.update_data({key: value}, stimulus_id=f"hoplite-push-{clock.time()}")
        except BaseException as error:
            if self.shelf.entries.get(key) is expected.entry:
                self.shelf.discard(key, ConnectionError(f"the push failed: {error}"))
            self.report(
                Abandoned(
                    key,
                    self.address,
                    expected.epoch,
                    buffer.received if buffer else 0,
                    f"push: {error}",
                )
            )
            if isinstance(error, OSError) or not isinstance(error, Exception):
                raise
            return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        finally:
            if self.expected.get(key) is expected:
                del self.expected[key]
        self.shelf.settle(key)
        self.report(Finished(key, self.address, expected.epoch, 0.0, stop - asked, how))
        return {"status": "OK", "nbytes": held["nbytes"][key]}

    def cancel(self, key: Key, epoch: int) -> None:
        """Give up a push, if it is that of the epoch."""
        if key in self.expected and self.expected[key].epoch == epoch:
            self.unexpect(key)

    def close(self) -> None:
        """Give up all."""
        for key in list(self.expected):
            self.unexpect(key)
