"""What is left of Hoplite where it cannot work with the installed Dask: it says why."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from distributed import Scheduler, SchedulerPlugin

import dask_hoplite
from dask_hoplite import seams, versions
from dask_hoplite.exceptions import NotInstalledError

logger = logging.getLogger(__name__)

NAME = "hoplite"


class Aside(SchedulerPlugin):
    """In place of :class:`dask_hoplite.Hoplite`, with the same parameters, which it ignores.

    Notes
    -----
    Clients that ask for Hoplite hear the reason, and go on without; workers get nothing.
    """

    name = NAME
    idempotent = True

    def __init__(self, *args: Any, **kwargs: Any):
        self.reason = versions.check(seams.PACKAGE) or "it is not known why"
        warnings.warn(self.reason, stacklevel=2)

    async def start(self, scheduler: Scheduler) -> None:
        """Say why."""
        self.stand(scheduler, self.reason)

    def stand(self, scheduler: Scheduler, reason: str) -> None:
        """Say why, and tell those who ask."""
        self.scheduler, self.reason = scheduler, reason
        logger.warning(reason)
        scheduler.handlers["hoplite_hello"] = self.hello

    async def hello(self) -> dict[str, Any] | None:
        """What a client must know."""
        if self.scheduler.plugins.get(NAME) is self:
            return {"version": dask_hoplite.__version__, "refused": self.reason}
        self.scheduler.handlers.pop("hoplite_hello", None)  # it was unregistered
        return None


class Again(SchedulerPlugin):
    """What becomes of a second :class:`dask_hoplite.Hoplite`, by another name: it does nothing."""

    name = NAME
    idempotent = True


def refuse(name: str) -> Callable[..., Any]:
    """What stands for a function of the package: it raises."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotInstalledError(versions.check(seams.PACKAGE))

    refused.__name__ = name
    return refused
