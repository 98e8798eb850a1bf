"""``dask hoplite``: the commands of this package, as a part of Dask's own command line."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from statistics import median
from typing import IO, Any

import click
from dask.utils import format_bytes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import dask_hoplite
from dask_hoplite.bench.command import bench, size_of
from dask_hoplite.interrupts import interruptible

INTRODUCTION = """\
A neural network that reads handwritten digits (scikit-learn's MLPClassifier and data set), made \
wide on purpose so that its weights have {size}, and fitted in one pass, goes to \
{workers} worker processes on each of two clusters on this machine: plain Dask's and one with \
Hoplite.
"""
SYSTEMS = {"plain": "plain Dask", "hoplite": "Hoplite"}
TITLES = {"scatter": "scatter to all", "tasks": "tasks on all", "gather": "gather"}
LEGEND = """\
[b]scatter to all[/b]: client.scatter(weights, broadcast=True)
[b]tasks on all[/b]: a task on each worker takes weights that one worker has made
[b]gather[/b]: client.gather of a gradient from each worker
[b]time, received[/b]: medians of {n}; received is what came over TCP to the worker that got most \
(gather: to this process, which is client and scheduler)
[b]copies[/b]: on return → {pause:g} s later
"""
CONCLUSION = """\
The weights are the same on all workers, and read {home:.1%} of the held-out digits right by \
scikit-learn in this process, {plain:.1%} on plain Dask, {hoplite:.1%} on Hoplite.
Hoplite's bytes went by {paths}. This was one machine: there, workers with Hoplite share one copy \
in memory, whose pages are mapped as they are first read. Between machines, each receives an \
object once, and sends on what it has while the rest still comes.
"""


@click.group()
@click.version_option(dask_hoplite.__version__, prog_name="dask-hoplite")
def hoplite() -> None:
    """Hoplite: large objects move between workers pipelined."""


hoplite.add_command(bench)


def _size(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Read a size such as ``64MiB``."""
    try:
        return size_of(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@hoplite.command()
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help="Worker processes of each cluster.",
)
@click.option(
    "--size",
    callback=_size,
    default="64MiB",
    show_default=True,
    help="Bytes of the model's weights.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How often each operation is timed on each cluster.",
)
@click.option(
    "--wait",
    "pause",
    type=click.FloatRange(min=0),
    default=5,
    show_default=True,
    help="Seconds after which copies are counted again.",
)
@click.option(
    "--json",
    "file",
    type=click.File("w", lazy=False),
    help="Write the figures to this file as well.",
)
@interruptible()
def demo(workers: int, size: int, repetitions: int, pause: float, file: IO[str] | None) -> None:
    """Move a model's weights on plain Dask and on Hoplite, and compare.

    Starts two clusters on this machine, one of them with Hoplite, and fits a neural network. Takes
    about a minute. The exit code is 1 if the results are not the same.
    """
    try:
        import_module("sklearn")
    except ImportError as error:
        raise click.ClickException(
            "The demo fits a model of scikit-learn, which is not installed. "
            "Install it with: pip install 'dask-hoplite[demo]' "
            "(in a clone: pip install -e '.[demo]')"
        ) from error
    console = Console(stderr=file is sys.stdout, highlight=False)
    console.print(INTRODUCTION.format(size=format_bytes(size), workers=workers))
    figures = run(workers, size, repetitions, pause)
    report(figures, pause, console)
    if file is not None:
        json.dump(figures, file, indent=2)
        file.write("\n")
    if not figures["equal"]:
        raise click.ClickException("The results differ.")


def run(workers: int, size: int, repetitions: int, pause: float) -> dict[str, Any]:
    """Let both clusters do the same in turns, and show how far they are."""
    from dask_hoplite.demo import clusters, figures  # starts no sooner than it is needed

    # Not on stdout: that may be a pipe or a file which is to hold the result.
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("Start both clusters, fit the model", total=2 * repetitions + 2)
        with clusters(workers, size) as (problem, sides):
            progress.advance(bar)
            for i in range(repetitions):
                # Who goes first may have an advantage, or a disadvantage.
                for system in list(sides) if i % 2 == 0 else reversed(sides):
                    progress.update(bar, description=f"Repetition {i + 1}: {SYSTEMS[system]}")
                    last = i + 1 == repetitions
                    sides[system].repeat(problem, keep=last)
                    if not last:
                        sides[system].settle()
                    progress.advance(bar)
            progress.update(bar, description="Wait, and count copies again")
            time.sleep(pause)
            for side in sides.values():
                side.count_copies("copies_later", **side.kept)
            progress.update(bar, description="Stop both clusters", advance=1)
            return figures(problem, sides)


def report(figures: dict[str, Any], pause: float, console: Console) -> None:
    """Print a table, and how to read it."""
    table = Table()
    for name in ("operation", "system"):
        table.add_column(name)
    for name in ("time", "ratio", "received", "copies", "results"):
        table.add_column(name, justify="right")
    for operation, row in figures["operations"].items():
        equal = all(side["equal"] for side in row.values())
        ratio = median(row["plain"]["seconds"]) / median(row["hoplite"]["seconds"])
        last = {"plain": ("", ""), "hoplite": (f"{ratio:.1f} ×", "equal" if equal else "DIFFER")}
        for system, side in row.items():
            speed, results = last[system]
            copies = [str(side[n][-1]) for n in ("copies", "copies_later") if n in side]
            table.add_row(
                TITLES[operation] if system == "plain" else "",
                SYSTEMS[system],
                f"{median(side['seconds']):.3f} s",
                speed,
                f"{median(side['received']) / 2**20:.0f} MiB",
                " → ".join(copies),
                results,
                end_section=system == "hoplite",
            )
    console.print(table)
    scatter = figures["operations"]["scatter"]
    console.print(LEGEND.format(n=len(scatter["plain"]["seconds"]), pause=pause))
    if figures["equal"]:
        accuracy = {system: side["accuracy"] for system, side in scatter.items()}
        paths = ", ".join(f"{path} ({n} transfers)" for path, n in figures["paths"].items())
        console.print(CONCLUSION.format(home=figures["accuracy"], paths=paths, **accuracy))
