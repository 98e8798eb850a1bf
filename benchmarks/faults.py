"""What a broadcast among emulated hosts suffers when one of them fails in the middle of it.

A task on every worker takes the same array. At a share of the undisturbed time something happens to
one host, chosen by its place in the tree. Measured is when the tasks on the other hosts are done.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future, wait

from benchmarks.cluster import ClientProcess, Cluster
from benchmarks.laboratory import Laboratory
from dask_hoplite.bench.workloads import (
    Workload,
    checksum,
    checksum_of_copy,
    ends,
    make,
    workers_of,
)

#: Share of the undisturbed time after which it happens.
MOMENT = 0.3


class Spread(Workload):
    """In the client's process: one task on each worker takes an array of worker 0."""

    def __init__(self, client: Client, nbytes: int, recomputable: bool):
        super().__init__(client, nbytes)
        self.seed = time.time_ns()
        self.expected = checksum(make(nbytes, self.seed))
        root = self.workers[:1]
        if recomputable:
            self.array: Future = client.submit(
                make, nbytes, self.seed, workers=root, allow_other_workers=True, pure=False
            )
        else:
            self.array = client.scatter(make(nbytes, self.seed), workers=root, hash=False)
        wait(self.array)

    def run(self) -> None:
        """Submit the tasks, and note when each is done."""
        self.seconds: dict[int, float] = {}
        self.start = time.perf_counter()
        self.tasks = [self.on(worker, ends, self.array) for worker in self.workers]
        for index, task in enumerate(self.tasks):
            task.add_done_callback(lambda _, index=index: self.note(index))

    def note(self, index: int) -> None:
        self.seconds[index] = time.perf_counter() - self.start

    def tree(self) -> dict[int, int]:
        """Who is fed by whom, by number."""
        import dask_hoplite

        told = dask_hoplite.status(client=self.client)["objects"].get(self.array.key, {})
        number = {worker: index for index, worker in enumerate(self.workers)}
        rows = told.get("tree", {}).items()
        return {number[receiver]: number[row["source"]] for receiver, row in rows}

    def outcome(self, without: list[int], within: float) -> dict[str, Any]:
        """Wait for all tasks but some: their times, their errors, and whether copies are right."""
        others = {index: task for index, task in enumerate(self.tasks) if index not in without}
        with contextlib.suppress(TimeoutError):
            wait(list(others.values()), timeout=within)
        errors = {}
        for index, task in others.items():
            if task.status != "finished":
                try:
                    task.result(timeout=1)
                except Exception as error:
                    errors[index] = f"{type(error).__name__}: {error}"
        alive = set(workers_of(self.client))
        holders = [self.workers[i] for i in others if i not in errors and self.workers[i] in alive]
        found = self.client.run(
            checksum_of_copy, self.array.key, workers=holders, on_error="return"
        )
        return {
            "seconds": [self.seconds[index] for index in others if index in self.seconds],
            "errors": errors,
            "correct": set(found.values()) <= {self.expected, None} and bool(found or errors),
        }


@dataclass
class Stage:
    """The laboratory during one broadcast, and what can be done to its hosts."""

    lab: Laboratory
    cluster: Cluster
    client: ClientProcess

    def tree(self) -> dict[int, int]:
        return {int(r): s for r, s in self.client.call("faults", name="tree").items()}

    def leaf(self) -> int:
        tree = self.tree()
        return next(receiver for receiver in tree if receiver not in tree.values())

    def inner(self) -> int:
        """The second in the chain: some are before it, and most are behind."""
        tree = self.tree()
        first = next(receiver for receiver, source in tree.items() if source == 0)
        return next(receiver for receiver, source in tree.items() if source == first)

    def signal(self, host: int, number: signal.Signals) -> None:
        self.cluster.worker(host).send_signal(number)


Undo = Callable[[], None]


def kill(find: Callable[[Stage], int]) -> Callable[[Stage], tuple[int, Undo]]:
    def happen(stage: Stage) -> tuple[int, Undo]:
        host = find(stage)
        stage.signal(host, signal.SIGKILL)
        return host, lambda: None

    return happen


def freeze(stage: Stage) -> tuple[int, Undo]:
    host = stage.inner()
    stage.signal(host, signal.SIGSTOP)
    return host, lambda: stage.signal(host, signal.SIGCONT)


def cut(stage: Stage) -> tuple[int, Undo]:
    host = stage.inner()
    stage.lab.link_down(host)
    return host, lambda: stage.lab.link_up(host)


@dataclass
class Case:
    """Something that happens, and what is to come of it."""

    happen: Callable[[Stage], tuple[int, Undo]] | None
    moment: float = MOMENT  #: share of the undisturbed time
    recomputable: bool = True
    slow: int | None = None  #: a host with a tenth of the rate, from the start
    first: bool = False  #: whether nothing was moved on the cluster before
    returns: bool = False  #: whether the host comes back, and is to be served then


CASES = {
    "undisturbed": Case(None),
    "kill leaf": Case(kill(Stage.leaf)),
    "kill inner": Case(kill(Stage.inner)),
    "kill source after a copy": Case(kill(lambda _: 0), moment=1.01),
    "freeze inner": Case(freeze, returns=True),
    "cut off inner": Case(cut, returns=True),
    "kill source before, recomputable": Case(kill(lambda _: 0)),
    "kill source before, scattered": Case(kill(lambda _: 0), recomputable=False),
    "slow host": Case(None, slow=2),
    "slow host, first object": Case(None, slow=2, first=True),
}


def run(
    lab: Laboratory, cluster: Cluster, cases: list[str], nbytes: int, reps: int, timeout: float
) -> Iterator[dict[str, Any]]:
    """Go through the cases, the undisturbed one first, and yield a record for each repetition."""
    normal: list[float] = []
    for name in ["undisturbed", *(name for name in cases if name != "undisturbed")]:
        for rep in range(reps):
            record = once(lab, cluster, CASES[name], nbytes, normal, timeout)
            if name == "undisturbed":
                normal.append(max(record["seconds"]))
            slower = max(record["seconds"], default=float("nan")) - statistics.median(normal)
            yield {"fault": name, "rep": rep, "nbytes": nbytes, "slower": slower, **record}


def once(
    lab: Laboratory,
    cluster: Cluster,
    case: Case,
    nbytes: int,
    normal: list[float],
    timeout: float,
) -> dict[str, Any]:
    """One broadcast with one fault."""
    if case.first:
        cluster.restart()
    client = cluster.client()
    if not case.first:
        client.call("warm_up")
    if case.slow is not None:
        lab.set_rate(case.slow, lab.tenth())
    client.call("faults", name="begin", nbytes=nbytes, recomputable=case.recomputable)
    stage = Stage(lab, cluster, client)
    client.call("faults", name="run")
    start = time.perf_counter()
    host, undo = case.slow, lambda: None
    returned = None
    try:
        if case.happen is not None:
            time.sleep(
                max(case.moment * statistics.median(normal) - time.perf_counter() + start, 0)
            )
            host, undo = case.happen(stage)
        without = [] if host is None else [host]
        record = client.call(
            "faults", timeout + 30, name="outcome", without=without, within=timeout
        )
        if case.returns:
            undo()
            back = client.call("faults", timeout + 30, name="outcome", without=[], within=timeout)
            returned = "served" if not back["errors"] else str(back["errors"])
    finally:
        undo()
        if case.slow is not None:
            lab.set_rate(case.slow, lab.rate)
    if case.happen is None and case.slow is None:
        client.call("release")
    else:
        cluster.restart()
    return {**record, "host": host, "returned": returned}
