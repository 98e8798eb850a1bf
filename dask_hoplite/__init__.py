"""Hoplite for Dask: large objects move pipelined and survive workers that leave."""

from __future__ import annotations

from distributed import Scheduler

__version__ = "0.1.0"

from dask_hoplite.api import broadcast, gather, scatter, status, transfers
from dask_hoplite.collectives.api import (
    allgather,
    allreduce,
    contributors,
    reduce,
    reduce_scatter,
)
from dask_hoplite.collectives.operands import OperandError
from dask_hoplite.exceptions import (
    EnsembleError,
    HopliteError,
    NotInstalledError,
    ObjectLostError,
    ObjectTooLargeError,
    ReductionError,
    ReportError,
    TransferError,
)
from dask_hoplite.progress import progress
from dask_hoplite.report import report
from dask_hoplite.scheduler import Hoplite

__all__ = [
    "EnsembleError",
    "Hoplite",
    "HopliteError",
    "NotInstalledError",
    "ObjectLostError",
    "ObjectTooLargeError",
    "OperandError",
    "ReductionError",
    "ReportError",
    "TransferError",
    "allgather",
    "allreduce",
    "broadcast",
    "contributors",
    "gather",
    "progress",
    "reduce",
    "reduce_scatter",
    "report",
    "scatter",
    "status",
    "transfers",
]


async def dask_setup(scheduler: Scheduler) -> None:
    """Install on a scheduler: what ``dask scheduler --preload dask_hoplite`` calls."""
    if isinstance(scheduler, Scheduler):
        scheduler.add_plugin(Hoplite(), idempotent=True)
