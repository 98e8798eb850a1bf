"""How a client gets an object, from whichever of its holders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from distributed import Client

from dask_hoplite.core.events import Key
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout
from dask_hoplite.transfer.patience import stop
from dask_hoplite.transfer.pull import take, unpack
from dask_hoplite.transfer.relay import Connections
from dask_hoplite.transfer.shared import AttachedBuffer


class Fetch:
    """One object on its way to a client.

    It goes on with the next holder, at the byte reached, when one fails or is silent. A holder that
    failed without a byte is not asked again. One that was silent may only be frozen, or busy: it is
    asked again in its turn, and if there is no other it is waited for. It ends when the scheduler
    knows nobody else.

    Parameters
    ----------
    key : Key
        The object.
    receiver : str
        Who asks.
    reach : callable
        Given a worker, tells where connections to it are had.
    locate : callable
        Asks the scheduler who has the object.
    patience : float
        Seconds without a byte after which a holder is silent.
    slots : Semaphore
        Of those who receive. A silent holder takes none.
    """

    def __init__(
        self,
        key: Key,
        receiver: str,
        reach: Callable[[str], Awaitable[Connections]],
        locate: Callable[[], Awaitable[Collection[str]]],
        patience: float,
        slots: asyncio.Semaphore,
    ):
        self.key = key
        self.receiver = receiver
        self.reach = reach
        self.locate = locate
        self.patience = patience
        self.slots = slots
        self.has_slot = False
        self.buffer: Buffer | None = None
        self.holders: Collection[str] = ()
        self.asked: dict[str, int] = {}  # each by when, in the order of asking
        self.failed: dict[str, OSError] = {}

    @property
    def received(self) -> int:
        """Bytes that are there."""
        return self.buffer.received if self.buffer is not None else 0

    @property
    def arrived(self) -> int:
        """The same, or more, with what is not yet checked."""
        return self.buffer.arrived if self.buffer is not None else 0

    @property
    def candidates(self) -> list[str]:
        """Who may be asked; last the one who was asked last."""
        willing = [worker for worker in self.holders if worker not in self.failed]
        return sorted(willing, key=lambda worker: self.asked.get(worker, 0))

    async def run(self, holders: Collection[str]) -> Any:
        """Get the object, if these are its holders, as far as is known.

        Raises
        ------
        OSError
            If nobody can give it.
        Exception
            Whatever its serialisation there, or deserialisation here, raised.
        """
        self.holders = holders
        await self.slots.acquire()
        self.has_slot = True
        try:
            while not await self._take_from_next():
                pass
        finally:
            self._leave_slot()
        assert self.buffer is not None
        return await unpack(self.buffer)

    async def _take_from_next(self) -> bool:
        """Take what the next holder gives; return whether that is all."""
        if not any(worker not in self.asked for worker in self.candidates):
            self.holders = await self.locate()
        if not self.candidates:
            reasons = "; ".join(f"{worker}: {error}" for worker, error in self.failed.items())
            raise ConnectionError(f"nobody can give {self.key!r}: {reasons or 'it is not held'}")
        source = self.candidates[0]
        self.asked[source] = max(self.asked.values(), default=0) + 1
        before = self.received
        try:
            return await self._follow(source, await self.reach(source))
        except OSError as error:
            if self.received == before:
                self.failed[source] = error
            return False

    async def _follow(self, source: str, rpc: Connections) -> bool:
        """Take from one holder; return False if another one may be better."""
        taking = asyncio.create_task(
            take(
                rpc,
                source,
                self.key,
                receiver=self.receiver,
                buffer=self.buffer,
                begin=self._begin,
            )
        )
        try:
            while True:
                before = self.buffer, self.arrived
                await asyncio.wait({taking}, timeout=self.patience)
                if taking.done():
                    taking.result()
                    return True
                if before == (self.buffer, self.arrived):
                    self._leave_slot()
                    self.holders = await self.locate()
                    if not taking.done() and self.candidates != [source]:
                        if self.asked.keys() >= set(self.candidates):
                            self.patience *= 2  # nobody is that fast
                        return False
        finally:
            await stop(taking)  # we may have left just as it failed

    def _begin(self, layout: Layout, handle: dict[str, Any] | None) -> Buffer:
        self.buffer = Buffer(layout) if handle is None else AttachedBuffer(layout, handle)
        return self.buffer

    def _leave_slot(self) -> None:
        if self.has_slot:
            self.has_slot = False
            self.slots.release()


class Asking:
    """A client as Dask's gather sees it, with keys of its own to ask for.

    Those that wait in the client itself are another call's, which will come for them.
    """

    def __init__(self, client: Client, keys: Collection[Key]):
        self._client = client
        self._gather_keys: set[Key] | None = set(keys)
        self._gather_future = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
