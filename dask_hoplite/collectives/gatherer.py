"""The worker's part in allgather."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
from distributed import Worker
from distributed.protocol.utils import host_array

from dask_hoplite.collectives.combine import Combination, Part
from dask_hoplite.collectives.reducer import Reducer
from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import SourceFailedError, TransferError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout
from dask_hoplite.transfer.patience import patiently
from dask_hoplite.transfer.pull import Puller, take, unpack

logger = logging.getLogger(__name__)


class Gatherer:
    """Makes lists of values that are on several workers.

    Parameters
    ----------
    worker : Worker
        Where.
    puller : Puller
        Its connections, and its shelf.
    reducer : Reducer
        Where the task of a gathering waits for its result.
    stall_timeout : float
        Seconds. After two of them without a byte, it does without the ring.
    """

    def __init__(self, worker: Worker, puller: Puller, reducer: Reducer, stall_timeout: float):
        self.worker = worker
        self.puller = puller
        self.reducer = reducer
        self.stall_timeout = stall_timeout

    async def describe(self, keys: list[Key]) -> dict[Key, dict[str, Any]]:
        """How values of this worker go over the wire."""
        found = {}
        for key in keys:
            async with self.puller.shelf.reading(key) as buffer:
                found[key] = buffer.layout.to_message()
        return found

    async def gather(
        self,
        key: Key,
        number: int,
        nbytes: dict[Key, int],
        ring: dict[str, Any] | None,
        hold: bool,
    ) -> dict[str, str]:
        """Make the list of the values of keys.

        Parameters
        ----------
        key : Key
            What it is called.
        number : int
            Of the attempt, which may have been given up by now: its recall goes another way than
            this, and nobody would ever drop what comes after it.
        nbytes : dict
            The keys and their sizes.
        ring : dict, optional
            ``members`` (workers, and the keys of each), the ``index`` of this one, ``layouts``, and
            a ``number`` that no other ring has.
        hold : bool
            Whether to hold it here. If not, the task waits for it.
        """
        try:
            if not await self.worker.scheduler.hoplite_gathers(key=key, number=number):
                return {"status": "failed", "reason": "it was recalled"}
            found = await self._round(key, **ring) if ring is not None else {}

            async def get(operand: Key) -> Any:
                if operand in found:
                    return found[operand]
                while operand not in self.worker.data:
                    begun = operand in self.puller.incoming
                    try:
                        return (await self.puller.pull(operand, nbytes[operand]))[0]
                    except TransferError:
                        if not begun:
                            raise
                        # It was begun when things were otherwise, and so it ended.
                return self.worker.data[operand]

            value = list(await asyncio.gather(*map(get, nbytes)))
        except Exception as error:
            logger.info("Hoplite: %r could not be gathered here", key, exc_info=error)
            return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        if hold:
            self.worker.update_data({key: value}, stimulus_id=f"hoplite-{uuid.uuid4()}")
        else:
            self.reducer.deliver(key, value)
        return {"status": "OK"}

    async def _round(
        self,
        key: Key,
        members: list[tuple[str, list[Key]]],
        index: int,
        layouts: dict[Key, dict[str, Any]],
        number: int,
    ) -> dict[Key, Any]:
        """Send on what comes from the one before, behind what is here; return what has come."""
        shelf = self.puller.shelf
        before = members[index - 1][0]
        name, there = ("hoplite-ring", number, index), (index - 1) % len(members)
        incoming: dict[Key, Buffer] = {}
        frames: list[memoryview] = []
        last = 0  # frames of the one behind, who has these himself
        for step in range(1, len(members)):
            last = 0
            for operand in members[index - step][1]:
                layout = Layout.from_message(layouts[operand])
                self.puller.check(operand, layout.nbytes)
                mine = [host_array(length) for length in layout.lengths]
                incoming[operand] = Buffer(layout, mine)
                frames += mine
                last += len(mine)
        async with AsyncExitStack() as stack:
            own: list[memoryview] = []
            for operand in members[index][1]:
                buffer = await stack.enter_async_context(shelf.reading(operand))
                own += buffer.frames
            coming = Buffer(_layout(frames), frames, received=0)
            going = own + frames[: len(frames) - last]
            ahead = sum(frame.nbytes for frame in own)
            out = Buffer(_layout(going), going, received=ahead)
            arrays = [np.frombuffer(frame, "u1") for frame in frames if frame.nbytes]
            parts = [Part(array, [array]) for array in arrays]
            passing = Combination([coming], parts, out, _nothing, _nothing)
            passing.follow()
            entry = shelf.promise(name)
            entry.buffer.set_result(out)

            def begin(layout: Layout, handle: Any) -> Buffer:
                if layout.lengths != coming.layout.lengths or coming.received:
                    raise SourceFailedError("what it sends is something else")
                return coming

            taking = take(
                self.puller.rpc,
                before,
                ("hoplite-ring", number, there),
                receiver=self.puller.address,
                buffer=None,
                begin=begin,
                hops=len(members),
                early=True,
                share=False,
                counts=self.puller.bytes_in,
            )
            try:
                await patiently(taking, lambda: coming.received, 2 * self.stall_timeout)
            except OSError as error:
                logger.info("Hoplite: the ring of %r is broken: %s", key, error)
                shelf.discard(name, SourceFailedError(f"the ring is broken: {error}"))
                return {}
            except asyncio.CancelledError:
                shelf.discard(name, SourceFailedError("it was recalled"))
                raise
            finally:
                passing.unfollow()
            shelf.settle(name)
        return {operand: await unpack(buffer) for operand, buffer in incoming.items()}


def _layout(frames: list[memoryview]) -> Layout:
    return Layout(uuid.uuid4().hex, b"", tuple(frame.nbytes for frame in frames))


def _nothing(*_: Any) -> None:
    """Bytes are only passed on."""
