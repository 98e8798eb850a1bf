"""What the measurements look like: a file of JSON lines, tables and a picture."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from dask.utils import format_bytes
from rich.table import Table

from benchmarks import disturbed
from benchmarks.cluster import ROOT, SYSTEMS
from dask_hoplite.bench.report import grouped, is_good, line, versions
from dask_hoplite.bench.turns import Record

COLOURS = {"plain": "#8c8c8c", "hoplite": "#d1495b", "gloo": "#2e86ab", "openmpi": "#3a7d44"}


def header(**more: object) -> Record:
    """What has to be known about a run besides its records."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "versions": versions(),
        "commit": commit or None,
        "cpus": os.cpu_count(),
        **more,
    }


def append(path: Path, record: Record) -> None:
    """Add a line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> tuple[Record, list[Record]]:
    """Read the header and the records of a file."""
    first, *records = map(json.loads, path.read_text().splitlines())
    return first, records


def fault_line(record: Record) -> str:
    """One repetition with a fault in a line."""
    words = [f"{record['fault']} #{record['rep'] + 1}:"]
    if record["host"] is not None:
        words.append(f"host {record['host']};")
    if record["seconds"]:
        words.append(f"{len(record['seconds'])} others done after {max(record['seconds']):.2f} s")
        words.append(f"({record['slower']:+.2f} s)")
    for index, error in record["errors"].items():
        words.append(f"[{index}: {error}]")
    if record["returned"]:
        words.append(f"the host that returned: {record['returned']}")
    if not record["correct"]:
        words.append("WRONG VALUES")
    return " ".join(words)


def stages_line(record: Record) -> str:
    """One repetition of something that was disturbed."""
    stages = ", ".join(
        f"{stage} {median:.2f} s (longest {longest:.2f})"
        for stage, (median, longest) in disturbed.medians(record).items()
    )
    loss = f", loss {record['loss']:.1e}" if "loss" in record else ""
    wrong = "" if record["correct"] else " WRONG VALUES"
    name = f"{record['op']}, {record['case']}, {record['system']} #{record['rep'] + 1}"
    return f"{name}: steps {stages}{loss}{wrong}"


def churn_line(record: Record) -> str:
    """One case of the same data again and again, in a line."""
    errors = ", ".join(f"{n} × {name}" for name, n in record["errors"].items())
    words = [
        f"{record['system']:7} {record['case']}, {format_bytes(record['nbytes'])}:",
        f"{record['rounds']} rounds in {record['seconds']:.1f} s,",
        f"{sum(record['errors'].values())} failures" + (f" ({errors})" if errors else ""),
    ]
    if record["left"]:
        words.append(f"and {record['left']} keys left")
    return " ".join(words)


def faults_table(records: list[Record]) -> Table:
    """One row per kind of fault."""
    table = Table("fault", "n", "last other s", "than undisturbed", "×", "errors", "values")
    normal = [max(r["seconds"]) for r in records if r["fault"] == "undisturbed" and r["seconds"]]
    for (fault,), rows in grouped(records, "fault").items():
        last = [max(row["seconds"]) for row in rows if row["seconds"]]
        cells = ["", "", ""]
        if last:
            median, usual = statistics.median(last), statistics.median(normal)
            cells = [f"{median:.2f}", f"{median - usual:+.2f} s", f"{median / usual:.2f}"]
        errors = str(sum(len(row["errors"]) for row in rows))
        values = "ok" if all(row["correct"] for row in rows) else "WRONG"
        table.add_row(fault, str(len(rows)), *cells, errors, values)
    return table


def effects_table(records: list[Record]) -> Table:
    """One row per figure."""
    table = Table("figure (median)", "n", *SYSTEMS, "hoplite/plain")
    figures: dict[str, dict[str, list[float]]] = {}
    for record in filter(is_good, records):
        for name, value in record["figures"].items():
            figures.setdefault(name, {}).setdefault(record["system"], []).append(value)
    for name, by_system in figures.items():
        medians = {system: statistics.median(values) for system, values in by_system.items()}
        shown = [f"{medians[system]:.3g}" if system in medians else "" for system in SYSTEMS]
        ratio = ""
        # The ratio of two growths that are almost nothing would say nothing.
        if all(medians.get(system) for system in SYSTEMS) and not name.endswith("[MiB]"):
            ratio = f"{medians['hoplite'] / medians['plain']:.2f}"
        table.add_row(name, str(max(map(len, by_system.values()))), *shown, ratio)
    for record in records:
        if "error" in record:
            table.add_row(line(record))
    return table


def plot(path: Path, records: list[Record], title: str) -> None:
    """Draw each repetition as a dot: a panel per size, a line per operation, a colour per system.

    The x axis is the time over the limit, or the time where there is no limit. Operations that were
    given up are open triangles at the moment of the giving up.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    limited = any("limit" in record for record in records)
    ops = list(grouped(records, "op"))
    panels = grouped(records, "nbytes")
    systems = [system for system in COLOURS if any(row["system"] == system for row in records)]
    offsets = {system: 0.64 * (i + 0.5) / len(systems) - 0.32 for i, system in enumerate(systems)}
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1.5 + 3.5 * len(panels), 1.4 + 0.5 * len(ops)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, ((nbytes,), rows) in zip(axes[0], panels.items(), strict=True):
        for row in rows:
            y = ops.index((row["op"],)) + offsets[row["system"]]
            seconds = row["seconds"] if is_good(row) else row["timeout"]
            if seconds is None:
                continue
            colour = COLOURS[row["system"]]
            style = {"s": 28, "alpha": 0.75, "linewidths": 0, "color": colour}
            if not is_good(row):
                style = {"s": 36, "marker": ">", "facecolors": "none", "edgecolors": colour}
            axis.scatter(seconds / row["limit"] if limited else seconds, y, zorder=3, **style)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        if limited:
            axis.axvline(1, color="black", linewidth=1)
            axis.set_xlim(left=0.8)
        axis.set_title(format_bytes(nbytes), fontsize=10)
        axis.set_xlabel("time / limit" if limited else "seconds")
        axis.grid(axis="x", color="#e5e5e5")
        axis.set_yticks(range(len(ops)), [op for (op,) in ops])
        axis.set_ylim(len(ops) - 0.5, -0.5)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    for system in systems:
        axes[0][0].scatter([], [], s=28, color=COLOURS[system], label=system)
    figure.legend(loc="outside lower center", ncols=len(systems), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
