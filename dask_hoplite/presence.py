"""Which workers there are, for clients that want to know when that changes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from distributed import Scheduler

#: Seconds after which a client that asks is answered in any case: it may be gone.
LONG = 20.0


class Presence:
    """Counts the changes.

    Parameters
    ----------
    scheduler : Scheduler
        Whose workers these are.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.number = 0
        self.changed = asyncio.Event()

    def change(self) -> None:
        """A worker has come, left, paused, or goes on."""
        self.number += 1
        self.changed.set()
        self.changed = asyncio.Event()

    async def workers(self, seen: int) -> tuple[int, list[str]]:
        """Those that run, as soon as there are others than at a time that was ``seen``."""
        if seen == self.number:
            with suppress(TimeoutError):
                async with asyncio.timeout(LONG):
                    await self.changed.wait()
        return self.number, sorted(ws.address for ws in self.scheduler.running)
