"""What is observed in other processes while an operation runs there.

The state is in this module's globals: one probe of each kind per process, started and stopped by
functions that a client sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import psutil


class Timer:
    """A callback on the running event loop every few milliseconds."""

    def __init__(self, period: float):
        self.period = period
        self._loop = asyncio.get_running_loop()
        self._schedule()

    def _schedule(self) -> None:
        self._due = self._loop.time() + self.period
        self._handle = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.look()
        self._schedule()

    def look(self) -> None:
        """Observe something."""
        raise NotImplementedError

    def stop(self) -> None:
        """Observe it for the last time."""
        self.look()
        self._handle.cancel()


class Lateness(Timer):
    """How late the loop calls back: the longest time for which something blocked it."""

    def __init__(self) -> None:
        self.largest = 0.0
        super().__init__(period=0.005)

    def look(self) -> None:
        self.largest = max(self.largest, self._loop.time() - self._due)


class Silence(Timer):
    """How long ago the scheduler has heard from the worker that was silent for longest."""

    def __init__(self, scheduler) -> None:
        self._scheduler = scheduler
        self.largest = 0.0
        super().__init__(period=0.02)

    def look(self) -> None:
        oldest = min(worker.last_seen for worker in self._scheduler.workers.values())
        self.largest = max(self.largest, time.time() - oldest)


_lateness: Lateness
_silence: Silence
_spinning = threading.Event()


async def start_lateness() -> None:
    """Start to observe the event loop of this process."""
    global _lateness
    _lateness = Lateness()


async def stop_lateness() -> float:
    """Stop to observe it: the largest lateness in seconds."""
    _lateness.stop()
    return _lateness.largest


async def start_silence(dask_scheduler) -> None:
    """Start to observe the heartbeats that reach the scheduler."""
    global _silence
    _silence = Silence(dask_scheduler)


async def stop_silence() -> float:
    """Stop to observe them: the longest silence of a worker in seconds."""
    _silence.stop()
    return _silence.largest


def start_spinning(dask_worker) -> None:
    """Keep the interpreter of a worker busy, by as many threads as it has for tasks."""

    def spin() -> None:
        while _spinning.is_set():
            pass

    _spinning.set()
    for _ in range(dask_worker.state.nthreads):
        threading.Thread(target=spin, name="spin", daemon=True).start()


def stop_spinning() -> None:
    """Let the worker rest."""
    _spinning.clear()


@contextlib.contextmanager
def memory_growth(pid: int, period: float = 0.02) -> Iterator[list[int]]:
    """Observe the resident memory of another process on this machine.

    Yields
    ------
    list of int
        Samples in bytes, the first from before the block.
    """
    process = psutil.Process(pid)
    samples = [process.memory_info().rss]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(period):
            samples.append(process.memory_info().rss)

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
