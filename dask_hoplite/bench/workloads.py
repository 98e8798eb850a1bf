"""The operations that are measured, as a user of Dask would write them.

A workload is used in steps, of which only `run` is timed: ``prepare``, ``run``, ``correct``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import dask
import numpy as np
from distributed import Client, Future, Scheduler, wait

from dask_hoplite.bench.operands import checksum


class Workload:
    """An operation on a cluster.

    Parameters
    ----------
    client : Client
        A client of the cluster.
    nbytes : int
        Size of each array.
    hoplite : bool
        Whether the client has registered Hoplite.
    """

    #: Whether the copies that it leaves on the workers are its purpose, and thus counted.
    makes_copies: ClassVar[bool] = False

    def __init__(self, client: Client, nbytes: int, hoplite: bool = False):
        self.client = client
        self.nbytes = nbytes
        self.hoplite = hoplite
        self.workers = in_order(workers_of(client))

    @staticmethod
    def crossings(workers: int, per_host: int) -> float:
        """Number of arrays that the busiest link has to carry at least."""
        return 1

    def prepare(self) -> None:
        """Do what comes before the clock starts."""
        raise NotImplementedError

    def run(self) -> None:
        """Do what is timed."""
        raise NotImplementedError

    def since(self, begun: float) -> float:
        """When the clock started, by `time.perf_counter`, if ``run`` was called at a moment."""
        return begun

    def figures(self) -> dict[str, object]:
        """What else is to be noted of a run."""
        return {}

    def correct(self) -> bool:
        """Whether the values have arrived where they should, unchanged."""
        raise NotImplementedError

    def on(self, worker: str, function, *args) -> Future:
        """Run a task on one worker and nowhere else."""
        return self.client.submit(
            function, *args, workers=[worker], allow_other_workers=False, pure=False
        )

    def make_on(self, workers: list[str]) -> list[Future]:
        """Make a fresh array on each of some workers, and note what is in it."""
        arrays = [self.on(worker, make, self.nbytes) for worker in workers]
        wait(arrays)
        pairs = zip(workers, arrays, strict=True)
        self.expected = self.client.gather([self.on(worker, ends, x) for worker, x in pairs])
        pairs = zip(workers, arrays, strict=True)
        self.checksums = self.client.gather([self.on(worker, checksum, x) for worker, x in pairs])
        return arrays


class Tasks(Workload):
    """One task on each worker takes the same array."""

    def prepare(self) -> None:
        [self.array] = self.make_on(self.workers[:1])

    def run(self) -> None:
        self.results = [self.on(worker, ends, self.array) for worker in self.workers]
        wait(self.results)

    def correct(self) -> bool:
        return self.client.gather(self.results) == self.expected * len(self.workers)


class Graph(Tasks):
    """The same, but the tasks come to the scheduler together, in one graph."""

    def run(self) -> None:
        tasks = []
        for worker in self.workers:
            with dask.annotate(workers=[worker], allow_other_workers=False):
                name = f"ends-{uuid.uuid4().hex}"
                tasks.append(dask.delayed(ends)(self.array, dask_key_name=name))
        self.results = self.client.compute(tasks, optimize_graph=False)
        wait(self.results)


class GatherTask(Workload):
    """One task on worker 0 takes an array from each worker."""

    @staticmethod
    def crossings(workers: int, per_host: int) -> int:
        return workers - per_host

    def prepare(self) -> None:
        self.arrays = self.make_on(self.workers)

    def run(self) -> None:
        self.result = self.on(self.workers[0], ends_of_each, *self.arrays)
        wait(self.result)

    def correct(self) -> bool:
        return self.result.result() == self.expected


class GatherClient(GatherTask):
    """The client gathers an array from each worker."""

    @staticmethod
    def crossings(workers: int, per_host: int) -> int:
        return workers

    def run(self) -> None:
        self.values = self.client.gather(self.arrays)

    def correct(self) -> bool:
        return [checksum(value) for value in self.values] == self.checksums


class Copies(Workload):
    """Base of the operations that are meant to leave a copy on each worker."""

    makes_copies: ClassVar[bool] = True
    array: Future

    def copies(self) -> int:
        """Number of workers that have a copy at this moment."""
        return len(self.holders())

    def holders(self) -> tuple[str, ...]:
        """Addresses of the workers that have a copy at this moment."""
        return self.client.who_has([self.array])[self.array.key]

    def correct(self) -> bool:
        # Every copy there is now. A task per worker would make the copies that it looks for.
        found = self.client.run(checksum_of_copy, self.array.key, workers=list(self.holders()))
        return {value for value in found.values() if value is not None} == set(self.checksums)


class Replicate(Copies):
    """The client asks for copies of a worker's array on all workers."""

    def prepare(self) -> None:
        [self.array] = self.make_on(self.workers[:1])

    def run(self) -> None:
        self.client.replicate(self.array)


class Scatter(Copies):
    """The client sends an array of its own to all workers."""

    def prepare(self) -> None:
        self.value = make(self.nbytes)
        self.checksums = [checksum(self.value)]

    def run(self) -> None:
        self.array = self.client.scatter(self.value, broadcast=True)


#: These operations by name. In "scatter-plain-client" the client has not registered Hoplite.
MOVES: dict[str, type[Workload]] = {
    "tasks": Tasks,
    "graph": Graph,
    "scatter": Scatter,
    "scatter-plain-client": Scatter,
    "replicate": Replicate,
    "gather-task": GatherTask,
    "gather-client": GatherClient,
}


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """What the scheduler knows of its workers: by address ``name``, ``host`` and ``memory_limit``.

    `Client.scheduler_info` may have none of them: every other second the client itself asks for
    less, and the answer to that may come between.
    """
    found: dict[str, dict[str, Any]] = client.run_on_scheduler(_known_workers)
    return found


def _known_workers(dask_scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    told = ("name", "host", "memory_limit")
    return {
        address: {what: getattr(worker, what) for what in told}
        for address, worker in dask_scheduler.workers.items()
    }


def in_order(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Addresses of workers as their names count them; those of a host are neighbours.

    Parameters
    ----------
    workers : mapping
        By address ``name`` and ``host``, as the scheduler tells them.

    Returns
    -------
    list of str
        Worker 0 first.
    """

    def numbers(address: str) -> tuple[list[int], str]:
        name = str(workers[address]["name"])
        return [int(digits) for digits in re.findall(r"\d+", name)], name

    named = sorted(workers, key=numbers)
    hosts = list(dict.fromkeys(workers[address]["host"] for address in named))
    return sorted(named, key=lambda address: hosts.index(workers[address]["host"]))


def make(nbytes: int, seed: int | None = None) -> np.ndarray:
    """Make an array that no earlier one is equal to, unless it was of the same seed."""
    return np.random.default_rng(seed).random(nbytes // 4, dtype="f4")


def ends(array: np.ndarray) -> float:
    """Look at an array without reading all of it."""
    return float(array[0]) + float(array[-1])


def ends_of_each(*arrays: np.ndarray) -> list[float]:
    """Look at several arrays."""
    return [ends(array) for array in arrays]


def checksum_of_copy(key: str, dask_worker) -> int | None:
    """Read the copy of an array that a worker has, if it still has one."""
    array = dask_worker.data.get(key)
    return None if array is None else checksum(array)
