"""The operations by name, and how one is done step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distributed import Client

from dask_hoplite.bench.collectives import COLLECTIVES
from dask_hoplite.bench.workloads import MOVES, Workload

#: The operations that plain Dask and Hoplite are compared by.
OPS: dict[str, type[Workload]] = MOVES | COLLECTIVES

#: Those that need neither emulated hosts nor a scheduler that preloads Hoplite.
OPS_WITHOUT_NETWORK = ["tasks", "graph", "scatter", "replicate", "gather-task", "gather-client"]
OPS_WITHOUT_NETWORK += COLLECTIVES


class Runner:
    """Does operations as a client of a cluster.

    Parameters
    ----------
    client : Client
        The client.
    hoplite : bool
        Whether it has registered Hoplite.
    operations : mapping of str to type
        The operations by name.
    """

    workload: Workload | None = None

    def __init__(
        self, client: Client, hoplite: bool, operations: Mapping[str, type[Workload]] = OPS
    ):
        self.client = client
        self.hoplite = hoplite
        self.operations = operations

    @property
    def present(self) -> Workload:
        """The operation that was prepared."""
        assert self.workload is not None
        return self.workload

    def prepare(self, op: str, nbytes: int, **how: Any) -> None:
        """Get ready for an operation."""
        self.workload = self.operations[op](self.client, nbytes, self.hoplite, **how)
        self.workload.prepare()

    def run(self) -> dict[str, Any]:
        """Do the operation: the seconds that it took and the number of copies that it left."""
        start = time.perf_counter()
        self.present.run()
        end = time.perf_counter()
        copies = self.copies()
        seconds = end - self.present.since(start)
        return {"seconds": seconds, "copies": copies, **self.present.figures()}

    def copies(self) -> int | None:
        """Count the copies there are now, if the operation is one that makes copies."""
        present = self.present
        return present.copies() if present.makes_copies else None  # type: ignore[attr-defined]

    def correct(self) -> bool:
        """Look at the values."""
        return self.present.correct()

    def release(self) -> None:
        """Let go of everything."""
        self.workload = None
