"""What became of the sums of a reduction, for people who look at it afterwards."""

from __future__ import annotations

from time import monotonic
from typing import Any

from dask_hoplite.core.events import Key
from dask_hoplite.core.instructions import Combine

#: Reductions that are remembered when they have ended.
REMEMBERED = 100


class Account:
    """The sums that workers were told to make for one reduction, and what became of each."""

    def __init__(self, key: Key, operands: int):
        self.key = key
        self.operands = operands
        self.start = monotonic()
        self.sums: dict[int, dict[str, Any]] = {}

    def begin(self, told: Combine) -> None:
        """A worker is told to make a sum."""
        self.sums[told.node] = {
            "node": told.node,
            "worker": told.worker,
            "operands": list(told.operands),
            "sources": [number for _, number in told.sources],
            "final": bool(told.count),
            "ring": told.ring,
            "reason": told.reason,
            "start": monotonic(),
            "stop": None,
            "status": "running",
        }

    def end(self, node: int, status: str = "finished") -> None:
        """A sum is made, or given up."""
        row = self.sums.get(node)
        if row is not None:
            row["stop"] = monotonic() if row["stop"] is None else row["stop"]
            row["status"] = status

    def row(self, status: str = "running", contributors: int = 0) -> dict[str, Any]:
        """All of it. Times are those of the scheduler's monotonic clock."""
        return {
            "key": self.key,
            "operands": self.operands,
            "contributors": contributors,
            "start": self.start,
            "stop": None if status == "running" else monotonic(),
            "status": status,
            "sums": [dict(row) for row in self.sums.values()],
        }
