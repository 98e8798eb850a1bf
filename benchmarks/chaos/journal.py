"""What was done and what came of it: kept as JSON lines, and judged at the end."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

#: Verdicts that make a run fail.
FAILURES = ("wrong", "hang", "leak", "unexplained")


class Journal:
    """The record of a run.

    Parameters
    ----------
    path : Path
        Where it is kept.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._start = time.monotonic()
        self.path = path
        self.verdicts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.slowest: defaultdict[str, float] = defaultdict(float)
        self.failures: list[dict[str, Any]] = []

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._start

    def note(self, what: str, **details: Any) -> dict[str, Any]:
        """Write a line."""
        row = {"t": round(self.now, 3), "what": what, **details}
        self._file.write(json.dumps(row, default=str) + "\n")
        self._file.flush()
        return row

    def judge(self, kind: str, verdict: str, seconds: float = 0.0, **details: Any) -> None:
        """Note what became of something, and count it."""
        row = self.note("verdict", kind=kind, verdict=verdict, s=round(seconds, 3), **details)
        self.verdicts[kind][verdict] += 1
        self.slowest[kind] = max(self.slowest[kind], seconds)
        if verdict in FAILURES:
            self.failures.append(row)

    def table(self) -> Table:
        """What is to be seen at a glance."""
        table = Table(title=f"{self.now:.0f} s, {self.path}")
        columns = ("right", "justified", *FAILURES)
        table.add_column("")
        for name in (*columns, "slowest (s)"):
            table.add_column(name, justify="right")
        for kind in sorted(self.verdicts):
            counts = self.verdicts[kind]
            row = [str(counts[name] or "") for name in columns]
            table.add_row(kind, *row, f"{self.slowest[kind]:.1f}")
        total: Counter[str] = sum(self.verdicts.values(), Counter())
        table.add_section()
        table.add_row("all", *(str(total[name]) for name in columns), "")
        return table

    def close(self) -> None:
        """No more is to come."""
        self._file.close()
