"""Results that several workers are to have by the time that they are given to Dask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from dask_hoplite.core.events import Key

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from dask_hoplite.scheduler import Hoplite


class Spread:
    """Copies of one result, beside the one that its task gives to Dask.

    They are made before Dask has the result, and counted in as soon as it has. So whoever is told
    that it is there finds all of them.

    Parameters
    ----------
    hoplite : Hoplite
        The scheduler's plugin.
    key : Key
        The result.
    """

    def __init__(self, hoplite: Hoplite, key: Key):
        self.hoplite = hoplite
        self.key = key
        self.copies: set[str] = set()
        self.task: asyncio.Task[None] | None = None

    def begin(
        self,
        workers: Collection[str],
        bring: Callable[[str], Awaitable[bool]],
        then: Callable[[], None],
    ) -> None:
        """Let workers have copies, in place of what was begun before.

        Parameters
        ----------
        workers : collection of str
            Who is to have one.
        bring : callable
            Lets one have it; gives whether that has.
        then : callable
            Called when all have it that can.
        """
        self.stop()

        async def one(worker: str) -> None:
            if await bring(worker):
                self.copies.add(worker)

        async def run() -> None:
            await asyncio.gather(*map(one, workers))
            then()

        self.task = asyncio.create_task(run())
        self.hoplite.tasks.add(self.task)
        self.task.add_done_callback(self.hoplite.tasks.discard)

    def stop(self) -> None:
        """Bring no more."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def keep(self, ts: TaskState, wished: Collection[str]) -> None:
        """Dask has the result: now it learns of the copies, which are to stay."""
        scheduler = self.hoplite.scheduler
        for worker in self.copies:
            if (ws := scheduler.workers.get(worker)) is not None:
                scheduler.add_replica(ts, ws)
        self.hoplite.wishes.add(self.key, {*self.copies, *wished})
        self.copies = set()

    def drop(self) -> None:
        """Dask will not have the result: the copies are of no use."""
        self.stop()
        copies, self.copies = self.copies, set()
        # Not now: Dask is in the middle of something.
        asyncio.get_running_loop().call_soon(self._free, copies)

    def _free(self, copies: set[str]) -> None:
        for worker in copies:
            self.hoplite.copies.free(worker, self.key)
