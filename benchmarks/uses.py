"""What collectives are for: asynchronous SGD, reinforcement learning, and serving an ensemble.

The definitions are those of Hoplite's paper (SIGCOMM 2021, sections 5.2 to 5.4): of n hosts one is
the server, the others compute; a step takes the first ``k = (n-1) // 2`` that are ready.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
from distributed import Client, Future, as_completed, wait

from benchmarks.workloads import Workload

#: Steps before the clock starts, and those that are timed.
WARM_UP, STEPS = 4, 12

#: Seconds that a gradient takes.
GRADIENT = 0.02

RATE = 0.01


class Use(Workload):
    """Base: something that goes on step by step.

    Subclasses define ``steps``, which yields at the end of each.
    """

    iterator: Iterator[object]

    def __init__(self, client: Client, nbytes: int, hoplite: bool = False):
        super().__init__(client, nbytes, hoplite)
        self.server, *self.others = self.workers
        self.k = max(len(self.others) // 2, 1)

    @staticmethod
    def crossings(workers: int, per_host: int) -> float:
        return STEPS

    def prepare(self) -> None:
        self.iterator = self.steps()
        self.advance(WARM_UP)

    def run(self) -> None:
        self.advance(STEPS)

    def advance(self, count: int) -> None:
        """Make some steps."""
        self.seconds: list[float] = []
        before = time.perf_counter()
        for _ in itertools.islice(self.iterator, count):
            now = time.perf_counter()
            self.seconds.append(round(now - before, 4))
            before = now
        assert len(self.seconds) == count, f"it ended after {len(self.seconds)} of {count} steps"

    def figures(self) -> dict[str, object]:
        return {"steps": self.seconds}

    def steps(self) -> Iterator[object]:
        """Make steps without end."""
        raise NotImplementedError


class AsyncSGD(Use):
    """Each step adds up the first k gradients, and gives new parameters to those workers."""

    parameters: Future

    def steps(self) -> Iterator[object]:
        data = {worker: self.on(worker, load, 1.0) for worker in self.others}
        self.parameters = self.on(self.server, zeros, self.nbytes)
        wait([self.parameters, *data.values()])
        return self.by_hoplite(data) if self.hoplite else self.by_tasks(data)

    def by_hoplite(self, data: dict[str, Future]) -> Iterator[object]:
        """As a user of Hoplite would write it."""
        from dask_hoplite import sgd

        with sgd.train(
            gradient,
            self.parameters,
            list(data.values()),
            sgd.Sum(RATE),
            self.k,
            server=self.server,
            client=self.client,
        ) as training:
            for step in training:
                self.parameters = step.parameters
                yield step

    def by_tasks(self, data: dict[str, Future]) -> Iterator[object]:
        """In plain Dask, one task on the server takes the gradients: no tree of tasks is faster."""
        owners: dict[Future, str] = {}
        gradients = as_completed()

        def ask(worker: str) -> None:
            future = self.on(worker, gradient, self.parameters, data[worker])
            owners[future] = worker
            gradients.add(future)

        for worker in self.others:
            ask(worker)
        before = None
        while True:
            done = list(itertools.islice(gradients, self.k))
            self.parameters = self.on(self.server, update, self.parameters, *done)
            for future in done:
                ask(owners.pop(future))
            del done, future
            if before is not None:  # the next one is under way
                wait(before)
                yield before
            before = self.parameters

    def correct(self) -> bool:
        found = self.on(self.server, extremes, self.parameters).result()
        self.iterator.close()  # type: ignore[attr-defined]
        steps = round(found[0] / (-RATE * self.k))
        return steps >= WARM_UP + STEPS and np.allclose(found, -RATE * self.k * steps, rtol=1e-4)


#: These operations by name.
USES: dict[str, type[Workload]] = {"async-sgd": AsyncSGD}


def zeros(nbytes: int) -> np.ndarray:
    """Parameters."""
    return np.zeros(nbytes // 4, "f4")


def load(value: float) -> float:
    """A worker's data; it stays there."""
    return value


def gradient(parameters: np.ndarray, data: float) -> np.ndarray:
    """Compute for a while."""
    time.sleep(GRADIENT)
    return np.full_like(parameters, data)


def update(parameters: np.ndarray, *gradients: np.ndarray) -> np.ndarray:
    """Apply gradients."""
    total = gradients[0].copy()
    for one in gradients[1:]:
        total += one
    return parameters - RATE * total


def extremes(parameters: np.ndarray) -> tuple[float, float]:
    """Look at all of the parameters."""
    return float(parameters.min()), float(parameters.max())
