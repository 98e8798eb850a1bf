"""What is left in a process when nothing should be. Sent to, and run in, all of them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import Mapping
from time import monotonic
from typing import Any

import psutil

from dask_hoplite.core.events import Released
from dask_hoplite.transfer.buffer import Buffer

#: By how much a process may exceed what it was before, and why it may at all:
TOLERANCE = {
    #: Idle pooled connections are closed before counting; the peers' halves may close a little
    #: later, and heartbeats open one now and then.
    "descriptors": 10,
    #: Dask's executors make threads as they first need them, and keep them.
    "threads": 10,
    #: What malloc has given out. Fragments, and logs that have a limit; lost objects would be more,
    #: as there are hundreds. (Memory that is mapped from a memory file is looked for by name.)
    "mib in use": 32,
    #: malloc keeps what was given back, in holes between what was not.
    "mib resident": 300,
}

#: Threads that end when there is nothing to do. Others are made once, and kept.
TRANSIENT = "hoplite-pump"


def of_process() -> dict[str, list[str]]:
    """Tasks, threads, files and mappings of Hoplite in this process."""
    gc.collect()
    return {
        "asyncio tasks": [where(task) for task in _tasks() if _is_hoplites(task)],
        "threads": [t.name for t in threading.enumerate() if t.name.startswith(TRANSIENT)],
        "memory files": _links("/memfd:hoplite"),
        "mappings": _mappings("/memfd:hoplite"),
        "buffers": [repr(item) for item in gc.get_objects() if isinstance(item, Buffer)],
    }


def of_scheduler(dask_scheduler: Any) -> dict[str, list[str]]:
    """What a scheduler has left."""
    plugin = dask_scheduler.plugins["hoplite"]
    plugin.directory.handle(
        Released("no such key"), monotonic()
    )  # rows that wait for their time to go
    return {
        "Dask's tasks": [
            f"{key}: {ts.state}, wanted by {ts.who_wants} and {ts.dependents}"
            for key, ts in dask_scheduler.tasks.items()
        ],
        "trees": [repr(tree) for tree in plugin.directory.trees.values()],
        "wishes": list(map(str, plugin.wishes._wishes)),
        "puts": list(map(str, plugin.puts.pending)),
        "planned": list(map(str, plugin.copies.planned)),
        "reductions": list(map(str, plugin.reductions.runs)),
        "operands": list(map(str, plugin.reductions.users)),
        "groups": list(map(str, plugin.reductions.groups)),
        "gatherings": list(map(str, plugin.reductions.gatherings.gatherings)),
        "contributors": list(map(str, plugin.reductions.contributors)),
        "plugin's tasks": list(map(str, plugin.tasks)),
        **of_process(),
    }


def of_worker(dask_worker: Any) -> dict[str, list[str]]:
    """What a worker has left."""
    plugin = dask_worker.plugins["hoplite"]
    return {
        "values": list(map(str, dask_worker.data)),
        "Dask's tasks": [f"{key}: {ts.state}" for key, ts in dask_worker.state.tasks.items()],
        "shelf": [f"{key}: {entry}" for key, entry in plugin.shelf.entries.items()],
        "awaited": list(map(str, plugin.shelf.awaited)),
        "incoming": list(map(str, plugin.puller.incoming)),
        "expected": list(map(str, plugin.arrivals.expected)),
        "landing": list(map(str, plugin.landing)),
        "coming": list(map(str, plugin.coming)),
        "sums": [str(sum.told) for sum in plugin.reducer.sums.values()],
        "results": list(map(str, plugin.reducer.results)),
        "sending": ["x"] * dask_worker.transfer_outgoing_count,
        **of_process(),
    }


class _Mallinfo(ctypes.Structure):
    """What glibc says of its heaps."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


async def figures(node: Any) -> dict[str, int]:
    """Numbers of descriptors and threads, and memory, with all that is idle let go of."""
    node.rpc.collect()
    await asyncio.sleep(1)
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo
    heap = libc.mallinfo2()
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "mib in use": (heap.uordblks + heap.hblkhd) // 2**20,
        "mib resident": process.memory_info().rss // 2**20,
    }


async def figures_of_scheduler(dask_scheduler: Any) -> dict[str, int]:
    """See :func:`figures`."""
    return await figures(dask_scheduler)


async def figures_of_worker(dask_worker: Any) -> dict[str, int]:
    """See :func:`figures`."""
    return await figures(dask_worker)


def excess(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str]:
    """Figures that have grown by more than the tolerance."""
    return {
        name: f"{before[name]} before, {after[name]} now"
        for name, more in TOLERANCE.items()
        if after[name] > before[name] + more
    }


def where(task: asyncio.Task[Any]) -> str:
    """What a task waits for, and for what that waits, and so on."""
    steps = [task.get_name()]
    waiting = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            steps.append(repr(waiting)[:200])
            break
        name, line = os.path.basename(frame.f_code.co_filename), frame.f_lineno
        steps.append(f"{name}:{line} {frame.f_code.co_name}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return " > ".join(steps)


def _tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return set()


def _is_hoplites(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    ours = code is not None and f"{os.sep}dask_hoplite{os.sep}" in code.co_filename
    return ours or task.get_name().startswith("hoplite-")


def _links(start: str) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith(start):
            found.append(link)
    return found


def _mappings(name: str) -> list[str]:
    with open("/proc/self/maps") as file:
        return [line.strip() for line in file if name in line]
