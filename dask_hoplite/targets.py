"""Workers that may get an object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from dask.utils import parse_timedelta
from distributed.core import Status
from distributed.utils import TimeoutError as DaskTimeoutError

from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import ObjectTooLargeError

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState


async def running(
    scheduler: Scheduler, workers: Collection[str] | None, timeout: float | str | None
) -> list[WorkerState]:
    """The running ones among the workers that are meant; wait for a first one."""
    if workers is not None and not workers:
        raise ValueError("No workers are named: the list is empty")
    timeout = parse_timedelta(timeout)
    deadline = time.monotonic() + (timeout or 0)
    while True:
        if workers is None:
            found = list(scheduler.running)
        else:
            found = [worker_named(scheduler, worker) for worker in workers]
            found = [ws for ws in found if ws.status == Status.running]
        if found:
            return found
        if time.monotonic() >= deadline:
            known = len(scheduler.workers)
            raise DaskTimeoutError(
                f"No valid workers found: none of {known} known workers is running"
                + ("" if workers is None else f" and among {list(workers)}")
                + (f" after {timeout} s" if timeout else "")
            )
        await asyncio.sleep(0.05)


def worker_named(scheduler: Scheduler, worker: object) -> WorkerState:
    """The worker of an address or a name, which may be a number.

    Raises
    ------
    ValueError
        If there is none.
    """
    address = scheduler.coerce_address(str(scheduler.aliases.get(worker, worker)))
    if address not in scheduler.workers:
        raise ValueError(f"no such worker: {worker!r}")
    return scheduler.workers[address]


def fitting(key: Key, nbytes: int, workers: Collection[WorkerState]) -> list[WorkerState]:
    """Those of the workers whose memory limit allows for an object at all."""
    able = [ws for ws in workers if fits(nbytes, ws)]
    if workers and not able:
        raise too_large(key, nbytes, workers)
    return able


def fits(nbytes: int, ws: WorkerState) -> bool:
    """Whether a worker's memory limit allows for an object."""
    return not ws.memory_limit or ws.memory_limit >= nbytes


def too_large(key: Key, nbytes: int, workers: Collection[WorkerState]) -> ObjectTooLargeError:
    """The error that says that it does not."""
    limits = {ws.address: f"memory limit of {ws.memory_limit} bytes" for ws in workers}
    return ObjectTooLargeError(key, f"an object of {nbytes} bytes fits no worker asked for", limits)
