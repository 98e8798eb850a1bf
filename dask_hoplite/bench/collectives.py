"""The collectives: operations on an operand of each worker, for which plain Dask has no call.

With Hoplite, each is one call. In plain Dask it is tasks, arranged as well as a user can who does
not know when which operand comes.
"""

from __future__ import annotations

import time

import numpy as np
from distributed import Client, Future, wait

from dask_hoplite.bench import operands
from dask_hoplite.bench.operands import operand
from dask_hoplite.bench.workloads import (
    Copies,
    Workload,
    checksum,
    checksum_of_copy,
    ends,
    ends_of_each,
)


class Collective(Workload):
    """Base: there is an operand on each worker before the clock starts.

    Subclasses define ``post``, which sets ``awaited``: the futures that end it.
    """

    operands: list[Future]
    awaited: list[Future]

    def __init__(self, client: Client, nbytes: int, hoplite: bool = False):
        super().__init__(client, nbytes, hoplite)
        self.seed = time.time_ns()
        self.n = len(self.workers)

    def prepare(self) -> None:
        self.operands = [
            self.on(worker, operand, self.nbytes, index, self.n, self.seed)
            for index, worker in enumerate(self.workers)
        ]
        wait(self.operands)

    def run(self) -> None:
        self.post()
        wait(self.awaited)

    def post(self) -> None:
        """Ask for the result, which may have to wait for operands."""
        raise NotImplementedError

    def tree(self, futures: list[Future]) -> Future:
        """Plain Dask's sum: a tree of tasks that add two; the workers of a host are neighbours."""
        while len(futures) > 1:
            pairs = zip(futures[::2], futures[1::2], strict=False)
            sums = [self.client.submit(np.add, *pair, pure=False) for pair in pairs]
            futures = sums + futures[len(futures) & ~1 :]
        return futures[0]

    def blocks(self) -> list[Future]:
        """Plain Dask's sum in blocks: operands are split where they are; each worker adds up one.

        A tree of a block would have to be on its worker as well, to move no more than this.
        """
        pairs = zip(self.workers, self.operands, strict=True)
        pieces = [self.split(worker, array) for worker, array in pairs]
        columns = zip(self.workers, zip(*pieces, strict=True), strict=True)
        return [self.on(worker, add, *column) for worker, column in columns]

    def split(self, worker: str, array: Future) -> list[Future]:
        """Split an operand where it is."""
        return self.client.map(
            block,
            [array] * self.n,
            range(self.n),
            n=self.n,
            workers=[worker],
            allow_other_workers=False,
            pure=False,
        )

    def holders_of_all(self, futures: list[Future]) -> tuple[str, ...]:
        """Addresses of the workers that have copies of all of some values."""
        return tuple(set.intersection(*map(set, self.client.who_has(futures).values())))

    def correct_parts(self, futures: list[Future], arrays: list[np.ndarray]) -> bool:
        """Whether in plain Dask every worker has taken some arrays, and all copies are right."""
        expected = list(map(checksum, arrays))
        found = self.client.run(checksums_of_copies, [future.key for future in futures])
        right = all(
            value in (None, should)
            for copies in found.values()
            for value, should in zip(copies, expected, strict=True)
        )
        taken = self.client.gather(self.awaited)
        return right and taken == [ends_of_each(*arrays)] * self.n

    def total(self, indices: list[int] | None = None) -> np.ndarray:
        """The sum as it must be, of all operands or of some."""
        if indices is None:
            indices = list(range(self.n))
        return operands.total(self.nbytes, indices, self.n, self.seed)


class Reduce(Collective):
    """The sum of all operands, on any worker."""

    #: Number of operands that are to be added; None for all.
    num_objects: int | None = None

    def post(self) -> None:
        if self.hoplite:
            import dask_hoplite

            self.result = dask_hoplite.reduce(self.operands, client=self.client)
        else:
            self.result = self.tree(self.operands)
        self.awaited = [self.result]

    def correct(self) -> bool:
        told = self.client.submit(contents, self.result, self.n, pure=False)
        marks, found = told.result()
        indices = [index for index, mark in enumerate(marks) if mark]
        return len(indices) == (self.num_objects or self.n) and found == checksum(
            self.total(indices)
        )


class Allreduce(Collective, Copies):
    """The sum of all operands, on all workers."""

    @staticmethod
    def crossings(workers: int, per_host: int) -> float:
        hosts = workers // per_host
        return 2 * (hosts - 1) / hosts

    def post(self) -> None:
        if self.hoplite:
            import dask_hoplite

            self.array = dask_hoplite.allreduce(self.operands, client=self.client)
            self.awaited = [self.array]
        else:
            self.array = self.tree(self.operands)
            self.awaited = [self.on(worker, ends, self.array) for worker in self.workers]

    def correct(self) -> bool:
        total = self.total()
        found = self.client.run(checksum_of_copy, self.array.key).values()
        if self.hoplite:
            return set(found) == {checksum(total)}
        taken = self.client.gather(self.awaited)
        return taken == [ends(total)] * self.n and set(found) <= {checksum(total), None}


class AllreduceBlocks(Allreduce):
    """The same. In plain Dask the sum is made, and taken, in blocks, and never put together."""

    def post(self) -> None:
        if self.hoplite:
            super().post()
        else:
            self.parts = self.blocks()
            self.awaited = [self.on(worker, ends_of_each, *self.parts) for worker in self.workers]

    def holders(self) -> tuple[str, ...]:
        return super().holders() if self.hoplite else self.holders_of_all(self.parts)

    def correct(self) -> bool:
        if self.hoplite:
            return super().correct()
        return self.correct_parts(self.parts, np.array_split(self.total(), self.n))


class Allgather(Collective, Copies):
    """All operands, on all workers."""

    @staticmethod
    def crossings(workers: int, per_host: int) -> int:
        return workers - per_host

    def post(self) -> None:
        if self.hoplite:
            import dask_hoplite

            self.array = dask_hoplite.allgather(self.operands, client=self.client)
            self.awaited = [self.array]
        else:
            self.awaited = [
                self.on(worker, ends_of_each, *self.operands) for worker in self.workers
            ]

    def holders(self) -> tuple[str, ...]:
        return super().holders() if self.hoplite else self.holders_of_all(self.operands)

    def correct(self) -> bool:
        arrays = [operand(self.nbytes, index, self.n, self.seed) for index in range(self.n)]
        if self.hoplite:
            expected = list(map(checksum, arrays))
            found = self.client.run(checksums_in_copy, self.array.key).values()
            return list(found) == [expected] * self.n
        return self.correct_parts(self.operands, arrays)


class ReduceScatter(Collective):
    """The sum of all operands, a block of it on each worker."""

    @staticmethod
    def crossings(workers: int, per_host: int) -> float:
        hosts = workers // per_host
        return (hosts - 1) / hosts

    def post(self) -> None:
        if self.hoplite:
            import dask_hoplite

            self.awaited = dask_hoplite.reduce_scatter(self.operands, client=self.client)
        else:
            self.awaited = self.blocks()

    def correct(self) -> bool:
        expected = list(map(checksum, np.array_split(self.total(), self.n)))
        holders = self.client.who_has(self.awaited).values()
        found = [self.client.submit(checksum, future, pure=False) for future in self.awaited]
        return len(set().union(*holders)) == self.n and self.client.gather(found) == expected


#: The collectives by name.
COLLECTIVES: dict[str, type[Workload]] = {
    "reduce": Reduce,
    "allreduce": Allreduce,
    "allreduce-blocks": AllreduceBlocks,
    "allgather": Allgather,
    "reduce-scatter": ReduceScatter,
}


def contents(array: np.ndarray, n: int) -> tuple[list[float], int]:
    """What is in a sum by its marks, and its checksum."""
    return array[:n].tolist(), checksum(array)


def block(array: np.ndarray, index: int, n: int) -> np.ndarray:
    """One of `n` parts of an array."""
    return np.array_split(array, n)[index]


def add(first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Add arrays."""
    result = first.copy()
    for array in others:
        result += array
    return result


def checksums_in_copy(key: str, dask_worker) -> list[int] | None:
    """Read the arrays in the list of which a worker has a copy."""
    arrays = dask_worker.data.get(key)
    return None if arrays is None else list(map(checksum, arrays))


def checksums_of_copies(keys: list[str], dask_worker) -> list[int | None]:
    """Read the copies of several arrays that a worker has."""
    return [checksum_of_copy(key, dask_worker) for key in keys]
