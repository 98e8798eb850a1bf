"""A preload that makes workers of one machine as far apart as those of several.

Alone, faults would hardly ever meet a transfer: within a machine most of them are over in
milliseconds. ``HOPLITE_CHAOS`` in the environment names what a worker is to be: ``alone``, so that
it shares no memory with others, and ``slow``.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dask_hoplite.transfer import pull, pump, push, serve, shared, shelf

#: So many bytes at a time, each time with such a pause, in seconds
PIECE, PAUSE = 2**18, 0.004


def dask_setup(worker: Any) -> None:
    """Hinder this process."""
    how = os.environ.get("HOPLITE_CHAOS", "").split()
    if "alone" in how:
        for module in (pull, push, serve, shared, shelf):
            module.affinity = lambda: ""
    if "slow" in how:
        pump.PIECE, shared.COPY = PIECE, PIECE
        _pause(pump.Send, "advance")
        _pause(shared.SharedBuffer, "write")


def _pause(cls: type, name: str) -> None:
    method = getattr(cls, name)

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(PAUSE)
        return method(self, *args)

    setattr(cls, name, slowly)
