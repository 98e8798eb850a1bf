"""All operations by name."""

from __future__ import annotations

from benchmarks.arrivals import ARRIVALS
from benchmarks.uses import USES
from dask_hoplite.bench.operations import OPS
from dask_hoplite.bench.workloads import Workload

#: Those of `lab` and `loopback`, of `arrivals` and of `uses`.
WORKLOADS: dict[str, type[Workload]] = OPS | ARRIVALS | USES
