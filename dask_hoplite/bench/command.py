"""``dask hoplite bench``: its options, and what it prints."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import click
from dask.utils import format_bytes, parse_bytes
from rich.console import Console

from dask_hoplite.interrupts import interruptible

if TYPE_CHECKING:
    from distributed import Client, LocalCluster

    from dask_hoplite.bench.cluster import SharedCluster
    from dask_hoplite.bench.turns import Record

#: Below this, arrays are small objects, which Hoplite leaves to Dask.
SMALLEST = 2**20

#: Characters of a line, where the output is not a terminal
WIDTH = 160

#: Seconds within which a scheduler must answer.
PATIENCE = 10.0


def size_of(text: str) -> int:
    """Bytes of an array, from a size such as ``64MiB``.

    Raises
    ------
    ValueError
        If it is no size, or that of a small object.
    """
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a size such as 64MiB") from error
    if nbytes < SMALLEST:
        raise ValueError(f"{text!r} is less than {format_bytes(SMALLEST)}")
    return nbytes


class Several(click.ParamType):
    """Values with commas between them."""

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Any]:
        """Read them."""
        if not isinstance(value, str):
            return list(value)
        words = [word.strip() for word in value.split(",") if word.strip()]
        if not words:
            self.fail("names nothing", param, ctx)
        try:
            return [self.read(word) for word in words]
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def read(self, word: str) -> Any:
        """Read one."""
        raise NotImplementedError


class Sizes(Several):
    """Sizes such as ``1MiB,64MiB``."""

    name = "sizes"

    def read(self, word: str) -> int:
        """Read a size."""
        return size_of(word)


class Operations(Several):
    """Names of operations."""

    name = "names"

    def read(self, word: str) -> str:
        """Check a name."""
        from dask_hoplite.bench.operations import OPS_WITHOUT_NETWORK

        if word not in OPS_WITHOUT_NETWORK:
            raise ValueError(f"{word!r} is none of {', '.join(OPS_WITHOUT_NETWORK)}")
        return word


@click.command()
@click.option("--scheduler-address", metavar="ADDRESS", help="Of the cluster, as tcp://host:8786.")
@click.option(
    "--scheduler-file", type=click.File(), help="With the address, as `dask scheduler` writes it."
)
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    help="Worker processes of the local cluster that is started if no scheduler is given. "
    "[default: 4]",
)
@click.option("--ops", type=Operations(), help="Operations, as tasks,scatter.  [default: all]")
@click.option(
    "--sizes", type=Sizes(), default="64MiB", show_default=True, help="Of arrays, as 1MiB,64MiB."
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How often each operation is timed with each system.",
)
@click.option(
    "--slow-repetitions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The same of plain Dask in scatter and replicate, which can take minutes.",
)
@click.option(
    "--wait",
    "later",
    type=click.FloatRange(min=0),
    default=5,
    show_default=True,
    help="Seconds after which copies are counted again.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=150,
    show_default=True,
    help="Seconds after which an operation is given up.",
)
@click.option("--yes", is_flag=True, help="Measure also if others use the cluster.")
@click.option(
    "--json",
    "file",
    type=click.File("w", lazy=False),
    help="Write all repetitions to this file as well.",
)
@interruptible()
def bench(
    scheduler_address: str | None,
    scheduler_file: IO[str] | None,
    workers: int | None,
    ops: list[str] | None,
    sizes: list[int],
    repetitions: int,
    slow_repetitions: int,
    later: float,
    timeout: float,
    yes: bool,
    file: IO[str] | None,
) -> None:
    """Compare plain Dask with Hoplite on a cluster.

    Both take turns on the same workers: Hoplite is installed and uninstalled, and in the end it is
    there if it was there before. Keys that were made are released. The cluster should have nothing
    else to do. TLS is set up by Dask's configuration. The exit code is 1 if values were wrong.
    """
    from dask_hoplite.bench.cluster import BenchError, SharedCluster, Side
    from dask_hoplite.bench.operations import OPS_WITHOUT_NETWORK
    from dask_hoplite.bench.report import ops_table, versions
    from dask_hoplite.bench.turns import compare

    if scheduler_file is not None:
        if scheduler_address is not None:
            raise click.UsageError("Give --scheduler-address or --scheduler-file, not both.")
        scheduler_address = address_in(scheduler_file)
    if scheduler_address is not None and workers is not None:
        raise click.UsageError("--workers is for a local cluster: this one has its own.")
    ops = ops or OPS_WITHOUT_NETWORK
    progress = Console(stderr=True, highlight=False, markup=False)
    try:
        with (
            orderly_end(),
            nullcontext(scheduler_address) if scheduler_address else local(workers or 4) as address,
            SharedCluster(partial(connect, address), timeout, alone=not yes) as cluster,
        ):
            cluster.check_memory(ops, max(sizes))
            goodput, about = cluster.measure_link()
            title = title_of(cluster, about)
            progress.print(title, soft_wrap=True)
            sides = [Side("plain"), Side("hoplite")]
            measured = compare(
                sides, cluster.measure, ops, sizes, repetitions, slow_repetitions, later
            )
            records = list(shown(measured, progress))
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    table = ops_table(records)
    table.title = title
    stream = sys.stderr if file is sys.stdout else sys.stdout
    width = None if stream.isatty() else WIDTH
    Console(file=stream, width=width, highlight=False, markup=False).print(table)
    if file is not None:
        hosts = dict(cluster.hosts)
        header = {"title": title, "versions": versions(), "hosts": hosts, "goodput": goodput}
        json.dump({**header, "records": records}, file, indent=2)
        file.write("\n")
    if not all(record.get("correct", True) for record in records):
        raise click.ClickException("Values were wrong.")


def address_in(file: IO[str]) -> str:
    """The address in a scheduler file."""
    try:
        return str(json.load(file)["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise click.UsageError(f"{file.name!r} is not what a scheduler writes: {error}") from error


def connect(address: str) -> Client:
    """A client of a scheduler, which does not become the current one."""
    from distributed import Client
    from distributed.comm.addressing import get_address_host_port

    from dask_hoplite.bench.cluster import BenchError

    try:
        get_address_host_port(address)  # a client of what is no address does not get closed
        return Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"No scheduler answers at {address}: {error}") from error


@contextmanager
def local(workers: int) -> Iterator[str]:
    """Start a cluster on this machine; yield its scheduler's address."""
    import dask

    from dask_hoplite.demo import local_cluster

    def start() -> LocalCluster:
        # Somebody who has Hoplite in the configuration wants to see plain Dask all the same.
        with dask.config.set({"distributed.scheduler.preload": []}):
            return local_cluster(workers)

    with ThreadPoolExecutor(1) as pool, pool.submit(start).result() as cluster:
        yield cluster.scheduler_address


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM be an exception in the block, so that a cluster is left as it was."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def title_of(cluster: SharedCluster, about: str) -> str:
    """What is measured, in a line."""
    hosts = len(cluster.hosts)
    on = f"{hosts} host{'s' * (hosts > 1)}"
    return f"{len(cluster.workers)} workers on {on}; {about}"


def shown(records: Iterable[Record], console: Console) -> Iterator[Record]:
    """Show records as they come."""
    from dask_hoplite.bench.report import line

    for record in records:
        console.print(line(record), soft_wrap=True)
        yield record
