"""What ``dask hoplite demo`` does: one program on two clusters, plain Dask's and Hoplite's.

A model is scattered to all workers; each of them makes a gradient, and the client gathers these;
one worker takes a step, and all others take the new weights from it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import dask
import distributed
import numpy as np
from distributed import Client, Future, LocalCluster
from distributed.utils import silence_logging_cmgr

import dask_hoplite
from dask_hoplite import Hoplite
from dask_hoplite.bench.workloads import workers_of
from dask_hoplite.interrupts import insistent

OPERATIONS = ("scatter", "tasks", "gather")
SYSTEMS = ("plain", "hoplite")

#: Workers that are stopped complain at lower levels.
SILENCE = logging.CRITICAL

#: A layer's matrix, its bias, the next layer's matrix, and so on.
Weights = list[np.ndarray]


# The model


class Problem:
    """Handwritten digits, and a network that is wide enough to have weights of a given size.

    Parameters
    ----------
    nbytes : int
        Bytes of all weights together.
    """

    #: Fewer than a good fit needs.
    EPOCHS = 1

    def __init__(self, nbytes: int):
        from sklearn.datasets import load_digits
        from sklearn.neural_network import MLPClassifier

        x, y = load_digits(return_X_y=True)
        x = (x / 16).astype("f4")
        # Not all of them: this is not to take long.
        self.x, self.y, self.held_out, self.truth = x[:800], y[:800], x[800:1000], y[800:1000]
        # Two hidden layers of one width have width² + (64 + 10 + 2) width + 10 parameters.
        self.width = int((76**2 / 4 + nbytes / 4 - 10) ** 0.5 - 76 / 2)
        layers = (self.width, self.width)
        how = {"solver": "sgd", "learning_rate_init": 0.1, "batch_size": 50, "random_state": 0}
        model = MLPClassifier(layers, max_iter=self.EPOCHS, **how)
        with insistent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged, or was interrupted
            model.fit(self.x, self.y)
        pairs = zip(model.coefs_, model.intercepts_, strict=True)
        self.weights: Weights = [array for pair in pairs for array in pair]
        self.accuracy = float(model.score(self.held_out, self.truth))
        self.fingerprint = fingerprint(self.weights)
        self._answers: dict[str, np.ndarray] = {}

    def batch(self, i: int, n: int = 8) -> tuple[np.ndarray, np.ndarray]:
        """The training digits of the i-th worker."""
        chosen = np.arange(i * n, (i + 1) * n) % len(self.x)
        return self.x[chosen], self.y[chosen]

    def agrees(self, operation: str, predictions: list[np.ndarray]) -> bool:
        """Whether all workers predict what the first one ever asked did."""
        answer = self._answers.setdefault(operation, predictions[0])
        return all(np.array_equal(each, answer) for each in predictions)


def activations(weights: Weights, x: np.ndarray) -> list[np.ndarray]:
    """What each layer gives; the last one has a number for each digit."""
    layers = [x]
    for i in range(0, len(weights), 2):
        z = layers[-1] @ weights[i] + weights[i + 1]
        layers.append(np.maximum(z, 0) if i + 2 < len(weights) else z)
    return layers


def predict(weights: Weights, x: np.ndarray) -> np.ndarray:
    """The most probable digits."""
    return activations(weights, x)[-1].argmax(axis=1)


def gradient(weights: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """The gradient of the cross entropy: of the same shapes as the weights."""
    layers = activations(weights, x)
    scores = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    delta = (scores - np.eye(10, dtype="f4")[y]) / np.float32(len(x))
    parts: Weights = []
    for i in range(len(weights) - 2, -1, -2):
        below = layers[i // 2]
        parts[:0] = [below.T @ delta, delta.sum(axis=0)]
        delta = (delta @ weights[i].T) * (below > 0)
    return parts


def step(weights: Weights, gradient: Weights) -> Weights:
    """The weights after one step. New ones: what a task is given is not its own to change."""
    return [w - np.float32(0.1) * g for w, g in zip(weights, gradient, strict=True)]


def fingerprint(weights: Weights) -> int:
    """Equal for equal bytes."""
    checksum = 0
    for array in weights:
        checksum = zlib.crc32(array.tobytes(), checksum)
    return checksum


# Measuring


def received() -> dict[int, int]:
    """Bytes that this process has received over each of its TCP connections.

    As the kernel counts: Dask's own counters leave out what is scattered, and have what comes
    through shared memory in them.
    """
    counts: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not TCP
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                # linux/tcp.h: tcpi_bytes_received
                [counts[os.fstat(connection.fileno()).st_ino]] = struct.unpack_from("=Q", info, 128)
    return counts


class Side:
    """One of the two clusters, with a client, and what was measured there.

    Parameters
    ----------
    system : str
        "plain" or "hoplite".
    workers : int
        Number of worker processes.
    """

    def __init__(self, system: str, workers: int):
        #: By operation; a list has an item for each repetition
        self.measured: dict[str, dict[str, Any]] = {
            operation: {"seconds": [], "received": [], "equal": True} for operation in OPERATIONS
        }
        self.kept: dict[str, Future] = {}
        self.cluster = local_cluster(workers)
        try:
            self.client = Client(self.cluster, set_as_default=False)
            if system == "hoplite":
                self.client.register_plugin(Hoplite())
            self.workers = list(workers_of(self.client))
        except BaseException:
            self.cluster.close()
            raise

    def close(self) -> None:
        """End the processes."""
        self.client.close()
        self.cluster.close()

    def on_each(self, function: Callable[..., Any], *arguments: list[Any]) -> list[Future]:
        """One task on each worker, with the arguments that are for it."""
        return [
            self.client.submit(function, *own, workers=[worker], pure=False)
            for worker, *own in zip(self.workers, *arguments, strict=True)
        ]

    def on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What tasks on all workers make of the same arguments."""
        same = [[argument] * len(self.workers) for argument in arguments]
        return list(self.client.gather(self.on_each(function, *same)))

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Take down how long something takes, and what the busiest worker, or we, receive."""

        def count() -> list[dict[int, int]]:
            here = operation == "gather"
            return [received()] if here else list(self.client.run(received).values())

        before = {connection: n for process in count() for connection, n in process.items()}
        start = time.perf_counter()
        yield
        self.measured[operation]["seconds"].append(time.perf_counter() - start)
        sums = [sum(n - before.get(c, 0) for c, n in process.items()) for process in count()]
        self.measured[operation]["received"].append(max(sums))

    def repeat(self, problem: Problem, keep: bool) -> None:
        """Do everything once; ``keep`` what was broadcast, to count its copies once more."""
        with self.timed("scatter"):
            [weights] = self.client.scatter([problem.weights], broadcast=True)
        self.count_copies("copies", scatter=weights)
        predictions = self.on_all(predict, weights, problem.held_out)
        self.measured["scatter"]["accuracy"] = float(np.mean(predictions[0] == problem.truth))
        same = set(self.on_all(fingerprint, weights)) == {problem.fingerprint}
        self.measured["scatter"]["equal"] &= same and problem.agrees("scatter", predictions)

        batches = zip(*map(problem.batch, range(len(self.workers))), strict=True)
        gradients = self.on_each(gradient, [weights] * len(self.workers), *map(list, batches))
        there = self.client.gather(self.on_each(fingerprint, gradients))
        with self.timed("gather"):
            here = self.client.gather(gradients)
        self.measured["gather"]["equal"] &= [fingerprint(each) for each in here] == there

        first = {"workers": self.workers[:1], "pure": False}
        stepped = self.client.submit(step, weights, gradients[0], **first)
        expected = self.client.submit(fingerprint, stepped, **first).result()
        with self.timed("tasks"):
            # A few digits: a task reads all weights, and does not compute for long.
            predictions = self.on_all(predict, stepped, problem.held_out[:4])
        self.count_copies("copies", tasks=stepped)
        same = set(self.on_all(fingerprint, stepped)) == {expected}
        self.measured["tasks"]["equal"] &= same and problem.agrees("tasks", predictions)
        if keep:
            self.kept = {"scatter": weights, "tasks": stepped}

    def count_copies(self, name: str, **futures: Future) -> None:
        """Take down how many workers hold a value."""
        for operation, future in futures.items():
            holders = self.client.who_has(future)[future.key]
            self.measured[operation].setdefault(name, []).append(len(holders))

    def settle(self, timeout: float = 10) -> None:
        """Wait until what was released is gone, so that it does not disturb the other side."""
        deadline = time.monotonic() + timeout
        while self.cluster.scheduler.tasks and time.monotonic() < deadline:
            time.sleep(0.02)


def local_cluster(workers: int) -> LocalCluster:
    """Start worker processes on this machine.

    To be called in a thread other than the main one: what it starts leaves Ctrl-C to this process.
    """
    resource_tracker.ensure_running()  # its start by multiprocessing would undo the next line
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=":0",
        # Two schedulers that import Dask's dashboard at the same time get in each other's way.
        scheduler_kwargs={"dashboard": False},
        memory_limit=0,  # neither system should spill or pause on a small machine
        silence_logs=SILENCE,
    )


@contextmanager
def clusters(workers: int, nbytes: int) -> Iterator[tuple[Problem, dict[str, Side]]]:
    """Start both clusters, and meanwhile fit the model; end their processes, come what may."""
    # Each cluster restores the level that it found, which may be the one that the other has set.
    with silence_logging_cmgr(SILENCE), ExitStack() as stack:

        def start(system: str) -> Side:
            side = Side(system, workers)
            stack.callback(side.close)  # here: it is to be closed also if nobody asks for it
            return side

        # Somebody who has Hoplite in the configuration wants to see plain Dask all the same.
        preload: dict[str, list[str]] = {"distributed.scheduler.preload": []}
        with dask.config.set(preload), ThreadPoolExecutor() as pool:
            starting = {system: pool.submit(start, system) for system in SYSTEMS}
            problem = Problem(nbytes)
            sides = {system: side.result() for system, side in starting.items()}
        yield problem, sides


def figures(problem: Problem, sides: dict[str, Side]) -> dict[str, Any]:
    """All that was measured, fit for JSON."""
    rows = {o: {system: side.measured[o] for system, side in sides.items()} for o in OPERATIONS}
    transfers = dask_hoplite.transfers(sides["hoplite"].client)
    return {
        "versions": {m.__name__: m.__version__ for m in (dask, distributed, dask_hoplite, np)},
        "workers": len(sides["hoplite"].workers),
        "nbytes": sum(array.nbytes for array in problem.weights),
        "width": problem.width,
        "epochs": problem.EPOCHS,
        "accuracy": problem.accuracy,
        "operations": rows,
        "paths": Counter(row["path"] for row in transfers if row["status"] == "finished"),
        "equal": all(side["equal"] for row in rows.values() for side in row.values()),
    }
