"""All operations by name."""

from __future__ import annotations

from benchmarks.arrivals import ARRIVALS
from benchmarks.collectives import COLLECTIVES
from benchmarks.programs import RUNNING
from benchmarks.uses import USES
from benchmarks.workloads import MOVES, Workload

#: The operations of `lab` and `loopback`.
OPS: dict[str, type[Workload]] = MOVES | COLLECTIVES

#: The same, and those of `arrivals`, `uses` and `programs`.
WORKLOADS: dict[str, type[Workload]] = OPS | ARRIVALS | USES | RUNNING
