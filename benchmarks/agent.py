"""A client process of a cluster, which does what the lines on its standard input say.

Each request is a line of JSON with the name of a method of `Agent` and its arguments; each answer
is one, too: ``{"value": ...}`` or ``{"error": "..."}``. Started by `benchmarks.cluster`, so that
each client lives on the host it should be on and a stuck one can be killed.

    python -m benchmarks.agent SCHEDULER_ADDRESS NUMBER_OF_WORKERS [--register]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from typing import Any

from distributed import Client

from benchmarks import faults, side
from benchmarks.degrees import set_degree
from benchmarks.operations import WORKLOADS
from dask_hoplite.bench.operations import Runner


class Agent(Runner):
    """The methods that can be asked for."""

    def __init__(self, client: Client, hoplite: bool):
        super().__init__(client, hoplite, WORKLOADS)

    def advance(self, count: int) -> list[float]:
        """Make some steps of an operation: the seconds of each."""
        self.workload.advance(count)  # type: ignore[union-attr]
        return self.workload.seconds  # type: ignore[union-attr]

    def figures(self) -> dict[str, Any]:
        """What else there is to note."""
        return self.workload.figures()

    def release(self) -> None:
        """Let go of everything and return when the cluster has."""
        super().release()
        wait_until_empty(self.client)

    def effect(self, name: str, shrink: int) -> dict[str, float]:
        """Measure a side effect."""
        figures = side.EFFECTS[name](self.client, shrink, self.hoplite)
        wait_until_empty(self.client)
        return figures

    def warm_up(self) -> None:
        """Spread something, so that connections exist and the speed of links is known."""
        for _ in range(2):
            workload = WORKLOADS["tasks"](self.client, 2**22)
            workload.prepare()
            workload.run()
        del workload
        wait_until_empty(self.client)

    def degree(self, degree: int | None) -> None:
        """Force the degree of the trees of reductions; None leaves it to Hoplite."""
        self.client.run_on_scheduler(set_degree, degree)

    def faults(self, name: str, **arguments: Any) -> Any:
        """Begin a broadcast that will be disturbed, or go on with it."""
        if name == "begin":
            self.workload = faults.Spread(self.client, **arguments)
            return None
        return getattr(self.workload, name)(**arguments)


def wait_until_empty(client: Client, timeout: float = 60) -> None:
    """Wait until the scheduler knows no task and the workers store none."""
    deadline = time.monotonic() + timeout
    while left := client.run_on_scheduler(count_tasks) + sum(client.run(count_stored).values()):
        gc.collect()  # futures may be in cycles of libraries that take no care of it
        if time.monotonic() > deadline:
            raise TimeoutError(f"{left} tasks or values are left {timeout} s after their release")
        time.sleep(0.02)


def count_tasks(dask_scheduler) -> int:
    """Count the tasks that a scheduler knows."""
    return len(dask_scheduler.tasks)


def count_stored(dask_worker) -> int:
    """Count the values that a worker stores."""
    return len(dask_worker.data)


def main() -> None:
    """Answer requests until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scheduler")
    parser.add_argument("workers", type=int)
    parser.add_argument("--register", action="store_true", help="register Hoplite")
    args = parser.parse_args()

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log

    def answer(**what) -> None:
        print(json.dumps(what), file=answers, flush=True)

    with Client(args.scheduler, timeout=60) as client:
        client.wait_for_workers(args.workers, timeout=60)
        if args.register:
            from dask_hoplite import Hoplite

            client.register_plugin(Hoplite())
        agent = Agent(client, hoplite=args.register)
        answer(value="ready")
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer(value=getattr(agent, request["method"])(**request["arguments"]))
            except Exception as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
