"""Hoplite for Dask: large objects move pipelined and survive workers that leave."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from dask_hoplite import seams, versions
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

if TYPE_CHECKING or versions.check(seams.PACKAGE) is None:
    from dask_hoplite.api import broadcast, gather, scatter, status, transfers
    from dask_hoplite.collectives.api import (
        allgather,
        allreduce,
        contributors,
        reduce,
        reduce_scatter,
    )
    from dask_hoplite.collectives.operands import OperandError
    from dask_hoplite.progress import progress
    from dask_hoplite.report import report
    from dask_hoplite.scheduler import Hoplite
else:  # the rest of this package cannot be imported
    from dask_hoplite.aside import Aside as Hoplite
    from dask_hoplite.aside import refuse

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return refuse(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


logger = logging.getLogger(__name__)

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


async def dask_setup(server: Any) -> None:
    """Install on a scheduler: what ``dask scheduler --preload dask_hoplite`` calls."""
    from distributed import Scheduler

    if isinstance(server, Scheduler):
        try:
            plugin = Hoplite()
        except ValueError as error:
            logger.error("Hoplite is not installed, as its configuration is wrong: %s", error)
            return
        server.add_plugin(plugin, idempotent=True)
    else:
        logger.warning(
            "dask_hoplite is a preload of the scheduler (dask scheduler --preload dask_hoplite), "
            "which installs it on workers too; on a %s it does nothing",
            type(server).__name__.lower(),
        )
