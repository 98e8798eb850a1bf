"""How much may be on its way to a worker at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Lets so many objects, of so many bytes together, come at a time, in the order of asking.

    One may always come, however large.

    Parameters
    ----------
    objects : int
        How many.
    nbytes : float
        How many bytes.
    """

    def __init__(self, objects: int, nbytes: float):
        self.objects = objects
        self.nbytes = nbytes
        self.taken: list[int] = []  # bytes of each that is coming
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def has(self, nbytes: int) -> bool:
        """Whether there is room for an object, and nobody who asked before waits for it."""
        return not self.waiting and self._fits(nbytes)

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for room, and have it within the block."""
        if not self.has(nbytes):
            turn = asyncio.get_running_loop().create_future()
            self.waiting.append((nbytes, turn))
            try:
                await turn
            except BaseException:
                if not turn.cancelled():  # our turn had come just before
                    self._leave(nbytes)
                else:
                    self._admit()
                raise
        else:
            self.taken.append(nbytes)
        try:
            yield
        finally:
            self._leave(nbytes)

    def _leave(self, nbytes: int) -> None:
        self.taken.remove(nbytes)
        self._admit()

    def _fits(self, nbytes: int) -> bool:
        few = len(self.taken) < self.objects
        return not self.taken or (few and sum(self.taken) + nbytes <= self.nbytes)

    def _admit(self) -> None:
        while self.waiting:
            nbytes, turn = self.waiting[0]
            if not turn.cancelled():
                if not self._fits(nbytes):
                    return
                self.taken.append(nbytes)
                turn.set_result(None)
            self.waiting.popleft()
