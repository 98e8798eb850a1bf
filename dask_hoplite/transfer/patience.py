"""How long one end waits for the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from distributed.comm.core import Comm

T = TypeVar("T")

#: If an event loop was blocked, answers are there, but timers come first.
STEPS = 4


def written(comm: Comm) -> int:
    """How many bytes a connection has taken to the system so far; 0 where we cannot know.

    Those that it was given may be more: a stream has a buffer.
    """
    return getattr(getattr(comm, "stream", None), "_total_write_done_index", 0)


async def patiently(
    doing: Coroutine[Any, Any, T], progress: Callable[[], object], timeout: float
) -> T:
    """Do something for as long as it makes progress.

    Parameters
    ----------
    doing : coroutine
        What to do.
    progress : callable
        Its value changes when there is any.
    timeout : float
        Seconds.

    Raises
    ------
    TimeoutError
        If there was none for so long. Then it is cancelled. Of a time in which we ourselves stood
        still, only a part counts: see :func:`answered`.
    """
    task = asyncio.create_task(doing)
    try:
        while True:
            before = progress()
            if await answered(task, timeout):
                return task.result()
            if progress() == before:
                raise TimeoutError(f"the other end was silent for {timeout} s")
    finally:
        await stop(task)


async def answered(asking: asyncio.Future[Any], timeout: float) -> bool:
    """Whether there is an answer in time; of a time in which we were asleep, only a part counts."""
    for _ in range(STEPS):
        if (await asyncio.wait({asking}, timeout=timeout / STEPS))[0]:
            return True
    return False


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks that have not ended, and do without what they end with."""
    for task in tasks:  # first: this may itself be cancelled while it waits
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # or asyncio complains that nobody has looked at it
