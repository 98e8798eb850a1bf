"""What a comparison looks like: a line for each repetition, and a table."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import platform
import statistics
from collections.abc import Iterable

from dask.utils import format_bytes
from rich.table import Table

from dask_hoplite.bench.turns import Record

COLUMNS = ["op", "size", "system", "n", "median s", "min to max", "limit s", "× limit", "× plain"]
CAPTION = (
    "Medians. × plain: over plain Dask's median. most in, most out: bytes at the busiest host, in "
    "arrays. copies: on return; later: some seconds after it. Plain Dask repeats scatter and "
    "replicate less often."
)
COLUMNS += ["most in", "most out", "copies", "later", "values"]


def versions() -> dict[str, str]:
    """The versions of what is compared, and of what it runs on."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("dask", "distributed", "numpy", "dask_hoplite"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def line(record: Record) -> str:
    """One repetition in a line."""
    words = [record.get("op") or record["effect"], record["system"], f"#{record['rep'] + 1}:"]
    if "nbytes" in record:
        words.insert(1, format_bytes(record["nbytes"]))
    if "error" in record:
        words.append(record["error"])
    elif "figures" in record:
        words.append(", ".join(f"{name}: {value:.3g}" for name, value in record["figures"].items()))
    else:
        words.append(f"{record['seconds']:.3f} s")
        if "limit" in record:
            words.append(f"({over_limit(record):.2f} × the limit)")
        if not record["correct"]:
            words.append("WRONG VALUES")
    return " ".join(words)


def ops_table(records: list[Record]) -> Table:
    """One row per operation, size and system."""
    lines = []
    for (op, nbytes), rows in grouped(records, "op", "nbytes").items():
        for (system,), mine in grouped(rows, "system").items():
            cells = {"op": op, "size": format_bytes(nbytes), "system": system}
            lines.append(cells | summary(mine, others=rows))
    columns = [name for name in COLUMNS if any(name in cells for cells in lines)]
    table = Table(*columns)
    nothing: dict[str, str] = {}
    for cells, following in itertools.zip_longest(lines, lines[1:], fillvalue=nothing):
        group = [cells[name] for name in ("op", "size")]
        ends = group != [following.get(name) for name in ("op", "size")]
        table.add_row(*(cells.get(name, "") for name in columns), end_section=ends)
    table.caption = CAPTION
    return table


def summary(rows: list[Record], others: list[Record]) -> dict[str, str]:
    """Cells of the table for the repetitions of a system; some of the others may be plain Dask."""
    good = [row for row in rows if is_good(row)]
    cells = {"n": str(len(good)), "values": "ok"}
    if "limit" in rows[0]:
        cells["limit s"] = f"{rows[0]['limit']:.3f}"
    if not all(row["correct"] for row in good):
        cells["values"] = "WRONG"
    if len(good) < len(rows):
        cells["values"] = rows[-1]["error"]
    if not good:
        return cells
    seconds = sorted(row["seconds"] for row in good)
    cells["median s"] = f"{statistics.median(seconds):.3f}"
    cells["min to max"] = f"{seconds[0]:.3f} to {seconds[-1]:.3f}"
    plain = [row["seconds"] for row in others if is_good(row) and row["system"] == "plain"]
    if plain:
        cells["× plain"] = f"{statistics.median(seconds) / statistics.median(plain):.2f}"
    if "limit" in good[0]:
        cells["× limit"] = f"{statistics.median(map(over_limit, good)):.2f}"
    if "entered" in good[0]:
        cells["most in"] = crossed(good, "entered")
        cells["most out"] = crossed(good, "left")
    if good[0]["copies"] is not None:
        cells["copies"] = spread(row["copies"] for row in good)
        cells["later"] = spread(row["copies_later"] for row in good)
    return cells


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Records by the values of some of their keys, in order of appearance."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def is_good(record: Record) -> bool:
    """Whether a repetition came to its end."""
    return "error" not in record


def over_limit(record: Record) -> float:
    """Time of a repetition over the least time that the links allow."""
    return record["seconds"] / record["limit"]


def crossed(rows: list[Record], direction: str) -> str:
    """Bytes at the busiest cable in multiples of an array, as the largest of the repetitions."""
    return f"{max(max(row[direction].values()) / row['nbytes'] for row in rows):.1f} ×"


def spread(counts: Iterable[int]) -> str:
    """Smallest and largest of some counts."""
    first, *_, last = sorted(counts) * 2
    return str(first) if first == last else f"{first} to {last}"
