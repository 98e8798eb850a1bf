"""Ten objects at once into a worker that has memory for three: its peak, and whether it pauses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster, wait

from benchmarks.probes import memory_growth

COUNT, HELD = 10, 3.5

#: Bytes of a worker that holds nothing.
BARE = 100 * 2**20


def run(systems: list[str], nbytes: int, shared: bool) -> Iterator[dict[str, Any]]:
    """Go through the ways with each system."""
    for how in WAYS:
        for system in systems:
            yield {"system": system, "how": how, **once(system, how, nbytes, shared)}


def once(system: str, how: str, nbytes: int, shared: bool) -> dict[str, Any]:
    """Bring the objects to the worker in one way."""
    limit = BARE + int(HELD * nbytes)
    config = {"hoplite.shared-memory": shared, "distributed.worker.memory.terminate": False}
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None}
    with (
        dask.config.set(config),
        LocalCluster(n_workers=1, memory_limit=limit, **options) as cluster,
        Client(cluster) as client,
    ):
        [receiver] = client.nthreads()
        cluster.new_spec["options"]["memory_limit"] = 2 * COUNT * nbytes
        cluster.scale(2)
        client.wait_for_workers(2)
        [source] = set(client.nthreads()) - {receiver}
        if system == "hoplite":
            from dask_hoplite import Hoplite

            client.register_plugin(Hoplite())
        [pid] = client.run(os.getpid, workers=[receiver]).values()
        client.run(count_pauses, workers=[receiver])
        if how == "scatter":
            objects: list[Any] = [make(nbytes, seed) for seed in range(COUNT)]
        else:
            seeds = range(COUNT)
            objects = [client.submit(make, nbytes, seed, workers=[source]) for seed in seeds]
            wait(objects)
        with memory_growth(pid) as samples:
            start = time.perf_counter()
            there = WAYS[how](client, objects, receiver)
            seconds = time.perf_counter() - start
        del there
        [pauses] = client.run(pauses_counted, workers=[receiver]).values()
        return {
            "nbytes": nbytes,
            "seconds": seconds,
            "growth": max(samples) - samples[0],
            "pauses": pauses,
        }


def make(nbytes: int, seed: int) -> np.ndarray:
    """An object."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype="u1")


def scatter(client: Client, objects: list[Any], receiver: str) -> Any:
    return client.scatter(objects, workers=[receiver], hash=False)


def replicate(client: Client, objects: list[Any], receiver: str) -> Any:
    return client.replicate(objects, workers=[receiver])


def tasks(client: Client, objects: list[Any], receiver: str) -> Any:
    return wait(client.map(np.sum, objects, workers=[receiver], pure=False))


WAYS: dict[str, Callable[..., Any]] = {"scatter": scatter, "replicate": replicate, "tasks": tasks}


def count_pauses(dask_worker) -> None:
    """Count how often a worker pauses."""
    manager = dask_worker.memory_manager
    plain, dask_worker.pauses = manager._maybe_pause_or_unpause, 0

    def look(worker, memory):
        before = worker.status.name
        plain(worker, memory)
        worker.pauses += before == "running" and worker.status.name == "paused"

    manager._maybe_pause_or_unpause = look


def pauses_counted(dask_worker) -> int:
    """How often it has."""
    return dask_worker.pauses
