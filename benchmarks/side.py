"""What Hoplite does to everything else: figures that should not get worse.

Each effect is a function of a client (of a cluster on this machine), of a divisor of the sizes, for
quick trials, and of whether the client has registered Hoplite. It returns figures by name; of each,
less is better.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable

import dask.bag
from dask.utils import format_bytes
from distributed import Client, wait

from benchmarks import probes
from dask_hoplite.bench.workloads import Replicate, Scatter, Tasks, Workload

MIB = 2**20

#: How many graphs of tiny tasks are measured one after the other
GRAPHS = 5

Figures = dict[str, float]


def tiny_tasks(client: Client, shrink: int, hoplite: bool) -> Figures:
    """Tiny tasks; one half has no dependencies, the other half two tiny ones."""
    half = 1000 // shrink
    start = time.perf_counter()
    firsts = client.map(operator.neg, range(half), pure=False)
    wait(client.map(operator.add, firsts, firsts[1:] + firsts[:1], pure=False))
    return {f"{2 * half:,} tiny tasks [s]": time.perf_counter() - start}


def tiny_graph(client: Client, shrink: int, hoplite: bool) -> Figures:
    """A graph of many tiny tasks, half of which take another one.

    The least of several, since whatever disturbs a run makes it longer, and by more than Hoplite
    does. The first one is not counted: workers are new to their work.
    """
    half = 5000 // shrink
    seconds, processor = [], []
    for _ in range(1 + GRAPHS):
        bag = dask.bag.range(half, npartitions=half).map(operator.neg)
        before = client.run_on_scheduler(time.process_time)
        start = time.perf_counter()
        done = client.persist(bag, optimize_graph=False)
        wait(done)
        seconds.append(time.perf_counter() - start)
        processor.append(client.run_on_scheduler(time.process_time) - before)
        del done
    label = f"graph of {2 * half:,} tiny tasks"
    return {
        f"{label} [s]": min(seconds[1:]),
        f"{label}, processor of the scheduler [s]": min(processor[1:]),
    }


def busy_workers(client: Client, shrink: int, hoplite: bool) -> Figures:
    """A broadcast among workers whose interpreters are busy with pure Python."""
    nbytes = 64 * MIB // shrink
    workload = Tasks(client, nbytes)
    workload.prepare()
    client.run(probes.start_spinning)
    client.run_on_scheduler(probes.start_silence)
    try:
        seconds = timed(workload.run)
    finally:
        silence = client.run_on_scheduler(probes.stop_silence)
        client.run(probes.stop_spinning)
    return {
        f"{format_bytes(nbytes)} to busy workers [s]": seconds,
        "longest silence of a busy worker [s]": silence,
    }


def scheduler_memory(client: Client, shrink: int, hoplite: bool) -> Figures:
    """Growth of the scheduler while a worker's result is broadcast."""
    nbytes = 256 * MIB // shrink
    pid = client.run_on_scheduler(os.getpid)
    workloads: dict[str, type[Workload]] = {"tasks": Tasks}
    if hoplite:
        workloads["hoplite.broadcast"] = Broadcast
    figures = {}
    for name, kind in workloads.items():
        workload = kind(client, nbytes)
        workload.prepare()
        with probes.memory_growth(pid) as samples:
            workload.run()
        growth = (max(samples) - samples[0]) / MIB
        figures[f"scheduler growth, {format_bytes(nbytes)}, {name} [MiB]"] = growth
    return figures


def blocked_loops(client: Client, shrink: int, hoplite: bool) -> Figures:
    """Longest time for which the event loops were blocked while much was broadcast."""
    nbytes = 1024 * MIB // shrink
    figures = {}
    for name, kind in {"tasks": Tasks, "scatter": Scatter}.items():
        workload = kind(client, nbytes)
        workload.prepare()
        runners = {
            "scheduler": client.run_on_scheduler,
            "client": client.sync,
            "worker": client.run,
        }
        for run in runners.values():
            run(probes.start_lateness)
        label = f"{format_bytes(nbytes)}, {name}"
        figures[f"{label} [s]"] = timed(workload.run)
        for where, run in runners.items():
            found = run(probes.stop_lateness)
            largest = max(found.values()) if isinstance(found, dict) else found
            figures[f"{label}, loop of {where} blocked [ms]"] = 1000 * largest
    return figures


#: The side effects by name.
EFFECTS: dict[str, Callable[[Client, int, bool], Figures]] = {
    "tiny": tiny_tasks,
    "graph": tiny_graph,
    "busy": busy_workers,
    "memory": scheduler_memory,
    "loops": blocked_loops,
}


class Broadcast(Replicate):
    """`dask_hoplite.broadcast` of a worker's array."""

    def run(self) -> None:
        """Broadcast, and wait until all workers have it."""
        import dask_hoplite

        self.array = dask_hoplite.broadcast(self.array, client=self.client)
        wait(self.array)
        deadline = time.monotonic() + 60
        while self.copies() < len(self.workers):
            if time.monotonic() > deadline:
                raise TimeoutError("hoplite.broadcast has not reached all workers")
            time.sleep(0.01)


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
