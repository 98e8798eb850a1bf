"""What several tests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic

import numpy as np
from distributed import Client, Scheduler
from distributed.utils_test import gen_cluster

from dask_hoplite import Hoplite
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.wire import Wire

#: A cluster in this process, on real sockets, whose objects above 1 kB are large.
hoplite_cluster = partial(
    gen_cluster,
    client=True,
    nthreads=[("127.0.0.1", 1)] * 4,
    config={"hoplite.min-size": 1000, "hoplite.stall-timeout": "500ms"},
)


def array(n: int = 100_000, seed: int = 0) -> np.ndarray:
    """Some bytes that are easily told from others."""
    return np.random.default_rng(seed).integers(0, 256, n, dtype="u1")


def hosted(client: Client, n: int = 100_000, worker: str | None = None, seed: int = 0):
    """The future of an array that a task makes on a worker."""
    return client.submit(array, n, seed, workers=worker and [worker], pure=False)


async def until(condition: Callable[[], object], timeout: float = 10) -> None:
    """Wait for something that is about to become true."""
    deadline = monotonic() + timeout
    while not condition():
        assert monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.005)


def plugin(s: Scheduler) -> Hoplite:
    """The plugin that is installed on a scheduler."""
    return s.plugins["hoplite"]


def first_blocks(buffer: Buffer, nbytes: int) -> bytes:
    """What goes over the wire before the block of an offset."""
    wire = Wire(buffer)
    return b"".join(wire.sealed(0, wire.position(nbytes)))


def apart(s, workers, latency=1e-6):
    """Let workers seem to be on a host each, where rings pay; return what is sent to them."""
    side = plugin(s)
    for i, w in enumerate(workers):
        side.directory.hosts[w.address] = f"host-{i}"
    side.directory.cost.latency = latency
    sent = []
    send = side.send

    def note(worker, op, **message):
        sent.append((op, message))
        send(worker, op, **message)

    side.send = note
    return sent
