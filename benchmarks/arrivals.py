"""Reductions that are asked for before their operands are there.

All processes of the machine have the same `time.perf_counter`, so that a moment on one emulated
host can be compared with one on another.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import ClassVar

import numpy as np
from distributed import Client, as_completed, wait

from dask_hoplite.bench.collectives import Allreduce, Collective, Reduce
from dask_hoplite.bench.operands import operand
from dask_hoplite.bench.workloads import Workload

#: When the operand of this worker was ready.
_ready = 0.0


class Arriving(Collective):
    """Base: operands become ready one by one, in an order by chance; the clock starts at the last.

    Parameters
    ----------
    interval : float
        Seconds from one to the next.
    """

    makes_copies: ClassVar[bool] = False  # they are not counted here

    def __init__(self, client: Client, nbytes: int, hoplite: bool, interval: float):
        super().__init__(client, nbytes, hoplite)
        self.interval = interval

    def prepare(self) -> None:
        """The operands are a part of it."""

    def run(self) -> None:
        first = time.perf_counter() + seconds_to_make(self.n, self.nbytes)
        places = random.sample(range(self.n), self.n)
        self.operands = [
            self.on(
                worker, arrive, self.nbytes, index, self.n, self.seed, first + self.interval * i
            )
            for index, (worker, i) in enumerate(zip(self.workers, places, strict=True))
        ]
        super().run()

    def since(self, begun: float) -> float:
        return max(self.client.run(ready).values())


class ArrivingReduce(Arriving, Reduce):
    """The sum of operands that become ready one by one, on any worker."""


class ArrivingAllreduce(Arriving, Allreduce):
    """The sum of operands that become ready one by one, on all workers."""


class ReduceHalf(Reduce):
    """The sum of those half of the operands that are there first; one may be late.

    Parameters
    ----------
    late : float
        Seconds from the start of the clock until the first operand of the list is ready; 0 if it
        is as early as the others.
    """

    def __init__(self, client: Client, nbytes: int, hoplite: bool, late: float):
        super().__init__(client, nbytes, hoplite)
        self.late = late
        self.num_objects = self.n // 2

    def prepare(self) -> None:
        start = time.perf_counter() + seconds_to_make(self.n, self.nbytes)
        moments = [start + self.late if self.late else 0.0, *[0.0] * (self.n - 1)]
        self.operands = [
            self.on(worker, arrive, self.nbytes, index, self.n, self.seed, moment)
            for index, (worker, moment) in enumerate(zip(self.workers, moments, strict=True))
        ]
        wait(self.operands[1:] if self.late else self.operands)
        time.sleep(max(0, start - time.perf_counter()))

    def post(self) -> None:
        if self.hoplite:
            import dask_hoplite

            self.result = dask_hoplite.reduce(
                self.operands, num_objects=self.num_objects, client=self.client
            )
        else:
            self.result = self.tree(
                list(itertools.islice(as_completed(self.operands), self.num_objects))
            )
        self.awaited = [self.result]


#: These operations by name.
ARRIVALS: dict[str, type[Workload]] = {
    "reduce-arrivals": ArrivingReduce,
    "allreduce-arrivals": ArrivingAllreduce,
    "reduce-half": ReduceHalf,
}


def seconds_to_make(n: int, nbytes: int) -> float:
    """Seconds within which all processes of the machine have made their operands."""
    return 0.5 + n * nbytes / 200e6


def arrive(nbytes: int, index: int, n: int, seed: int, moment: float) -> np.ndarray:
    """Make an operand, but return it only at a moment, and note when that really was."""
    global _ready
    array = operand(nbytes, index, n, seed)
    time.sleep(max(0, moment - time.perf_counter()))
    _ready = time.perf_counter()
    return array


def ready() -> float:
    """Return when the operand of this worker was ready."""
    return _ready
