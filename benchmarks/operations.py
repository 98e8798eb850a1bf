"""All operations by name."""

from __future__ import annotations

from benchmarks.arrivals import ARRIVALS
from benchmarks.programs import RUNNING
from benchmarks.uses import USES
from dask_hoplite.bench.operations import OPS
from dask_hoplite.bench.workloads import Workload

#: Those of `lab` and `loopback`, of `arrivals`, of `uses` and of `programs`.
WORKLOADS: dict[str, type[Workload]] = OPS | ARRIVALS | USES | RUNNING
