"""The worker's part in reductions: makes sums, serves them, and gives the result to its task."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Reschedule, Worker, get_worker
from distributed.protocol.pickle import loads
from distributed.worker_state_machine import SecedeEvent

from dask_hoplite.collectives.ring import Ring
from dask_hoplite.collectives.sums import Sum, Terms
from dask_hoplite.core.events import (
    Event,
    Key,
    ReductionEvent,
)
from dask_hoplite.core.instructions import Combine
from dask_hoplite.exceptions import NotInstalledError
from dask_hoplite.messages import decode
from dask_hoplite.transfer.pull import Puller

logger = logging.getLogger(__name__)


async def result_of(key: Key) -> Any:
    """What a reduction's task runs: it waits, without a thread or a slot, for its result."""
    plugin = get_worker().plugins.get("hoplite")
    if plugin is None or not plugin.installed:  # type: ignore[attr-defined]
        raise NotInstalledError("Hoplite is not on this worker any more")
    return await plugin.reducer.wait(key)  # type: ignore[attr-defined]


@dataclass
class Result:
    """What this worker is to have of a reduction."""

    value: asyncio.Future[Any]
    #: It counts, and all others have theirs, too
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Reducer:
    """All sums that are made on this worker.

    Parameters
    ----------
    worker : Worker
        Whose values are combined.
    puller : Puller
        Its connections, and its shelf.
    report : callable
        Tells the scheduler of an event.
    stall_timeout : float
        Seconds after which each sum says how far it is.
    """

    def __init__(
        self,
        worker: Worker,
        puller: Puller,
        report: Callable[[Event | ReductionEvent], None],
        stall_timeout: float,
    ):
        self.worker = worker
        self.puller = puller
        self.shelf = puller.shelf
        self.address = puller.address
        self.report = report
        self.stall_timeout = stall_timeout
        self.sums: dict[int, Sum] = {}
        self.results: dict[Key, Result] = {}
        self._pool: ThreadPoolExecutor | None = None

    # What the scheduler tells

    def combine(self, combine: dict[str, Any], terms: dict[str, Any]) -> None:
        """Make a sum.

        Parameters
        ----------
        combine : dict
            A :class:`~dask_hoplite.core.instructions.Combine`.
        terms : dict
            The fields of :class:`~dask_hoplite.collectives.sums.Terms`.
        """
        told: Combine = decode(combine)
        sources = tuple((worker, node) for worker, node in told.sources)
        told = replace(told, operands=tuple(told.operands), sources=sources)
        kind = Ring if told.ring else Sum
        sum = self.sums[told.node] = kind(self, told, Terms(**terms))
        if told.count:
            self._renew(sum.terms.result)

    def forget(self, key: Key, node: int | None = None) -> None:
        """Drop a sum, or all sums and the result of a reduction."""
        for number in [n for n, s in self.sums.items() if s.key == key and node in (None, n)]:
            self.sums.pop(number).close()
        if node is None:
            self.drop(key)

    def release(self, key: Key) -> None:
        """A result is what it is to be, and all who are to have it have it."""
        self.result(key).released.set()  # perhaps before it is made, if nobody else is to have it

    def fail(self, key: Key, error: bytes | Exception) -> None:
        """There can be no result."""
        if (earlier := self.results.get(key)) is not None and earlier.value.done():
            del self.results[key]  # others could not have theirs
            earlier.released.set()
        result = self.result(key)
        result.released.set()
        result.value.set_exception(loads(error) if isinstance(error, bytes) else error)

    # Results

    def result(self, key: Key) -> Result:
        """Where a result is, or will be."""
        if key not in self.results:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda f: f.cancelled() or f.exception())
            self.results[key] = Result(future)
        return self.results[key]

    def _renew(self, key: Key) -> None:
        """What there is of a result came to nothing: who waits, waits for another one."""
        earlier = self.results.get(key)
        if earlier is not None and earlier.value.done():
            del self.results[key]
            self.result(key)
            earlier.released.set()

    def deliver(self, key: Key, value: Any) -> None:
        """A result is made here. It waits until it is released."""
        self._renew(key)
        self.result(key).value.set_result(value)

    def drop(self, key: Key) -> None:
        """Nobody here has use for a result any more; who waits for it lets Dask decide."""
        result = self.results.pop(key, None)
        if result is not None:
            if not result.value.done():
                result.value.set_exception(Reschedule())
            result.released.set()

    async def wait(self, key: Key) -> Any:
        """The result, for the task that is it, once all who are to have it do."""
        ts = self.worker.state.tasks.get(key)
        if ts is None or ts.state == "cancelled":  # before it began here
            raise Reschedule
        result = self.result(key)
        if not (result.value.done() and result.released.is_set()):
            # Neither a thread nor a slot: those whom this waits for may need them.
            event = SecedeEvent(
                key=key, compute_duration=0.001, stimulus_id=f"secede-{uuid.uuid4()}"
            )
            self.worker.handle_stimulus(event)
        try:
            while True:
                value = await asyncio.shield(result.value)
                await result.released.wait()
                now = self.results.get(key)
                if now is None or now is result:
                    return value
                result = now  # the first one came to nothing
        finally:
            if self.results.get(key) is result:
                del self.results[key]

    def have(self, key: Key) -> Any:
        """A result that was made here, for others than its task, or None."""
        result = self.results.get(key)
        if result is None or not result.value.done() or result.value.exception() is not None:
            return None
        return result.value.result()

    def submit(self, function: Callable[..., Any]) -> None:
        """Run something that takes long, whenever there is time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="hoplite-combine")
        self._pool.submit(function)

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something that takes long, and is not Dask's to wait for."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="hoplite-combine")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def close(self) -> None:
        """Stop all."""
        tasks = [sum.task for sum in self.sums.values()]
        for sum in self.sums.values():
            sum.close()
        self.sums.clear()
        for key in list(self.results):
            self.drop(key)
        if tasks:
            await asyncio.wait(tasks)
        if self._pool is not None:
            self._pool.shutdown(wait=False)
