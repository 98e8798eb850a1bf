"""Results that are given, as if they were scattered: how they were made is forgotten.

Dask remembers of each result what it was computed from, for as long as anything is there that
depends on it. Where each result follows from the one before, without end, that is everything since
the beginning.
"""

from __future__ import annotations

from time import time
from typing import Any

from distributed import Scheduler

from dask_hoplite.core.events import Key


def settle(scheduler: Scheduler, key: Key) -> bool:
    """Forget how a result was made.

    It can not be computed again then. What it was computed from is forgotten, too, if nobody else
    has use for it.

    Parameters
    ----------
    scheduler : Scheduler
    key : Key
        The result.

    Returns
    -------
    bool
        Whether that was done: it is not if the result is not in memory.
    """
    ts = scheduler.tasks.get(key)
    if ts is None or ts.state != "memory":
        return False
    ts.run_spec = None
    forgotten: dict[Key, Any] = {}
    for dts in list(ts.dependencies):
        ts.dependencies.discard(dts)
        dts.dependents.discard(ts)
        if not (dts.dependents or dts.who_wants or dts.waiters):
            forgotten[dts.key] = "forgotten"
    scheduler.transitions(forgotten, stimulus_id=f"hoplite-settle-{time()}")
    return True
