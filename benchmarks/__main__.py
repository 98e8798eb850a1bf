"""Compare Hoplite with plain Dask.

python -m benchmarks lab              on emulated hosts whose network is the limit (needs root)
python -m benchmarks loopback         on this machine as it is
python -m benchmarks faults           what becomes of a broadcast when a host fails (needs root)
python -m benchmarks tls              an object of more than 2 GiB on a TLS cluster
python -m benchmarks side             what Hoplite does to everything else
python -m benchmarks churn            the same data scattered, used, dropped, without a pause
python -m benchmarks memory           more at once than a worker has memory for
python -m benchmarks chaos            whether faults by chance do any harm
python -m benchmarks dask-tests DIR   Dask's own tests, plain and with Hoplite
python -m benchmarks plot FILE        draw the records of an earlier run again
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from dask.utils import format_bytes, parse_bytes
from rich.console import Console

from benchmarks import churn, dask_tests, faults, memory, report, tls
from benchmarks.chaos.run import add_command as add_chaos
from benchmarks.cluster import SYSTEMS, Cluster, Loopback, Place
from benchmarks.laboratory import Laboratory, LaboratoryError, why_not
from benchmarks.measure import Comparison, Record
from benchmarks.side import EFFECTS
from benchmarks.workloads import OPS

OPS_WITHOUT_NETWORK = ["tasks", "graph", "scatter", "replicate", "gather-task", "gather-client"]

RESULTS = Path(__file__).with_name("results")

console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = common_options()

    lab = commands.add_parser("lab", parents=[common], help="on emulated hosts")
    lab.add_argument("--hosts", type=int, default=8)
    lab.add_argument("--rate", default="200mbit", help="of each host, each way")
    lab.add_argument("--delay", default="0ms", help="of each packet (needs the kernel's netem)")
    lab.add_argument("--per-host", type=int, default=1, help="workers on each host")
    add_ops(lab, list(OPS), sizes=["1MiB", "32MiB", "128MiB"], reps=3)
    lab.set_defaults(run=run_lab)

    loopback = commands.add_parser("loopback", parents=[common], help="on this machine as it is")
    loopback.add_argument("--workers", type=int, default=4)
    add_ops(loopback, OPS_WITHOUT_NETWORK, sizes=["64MiB", "256MiB"], reps=5)
    loopback.set_defaults(run=run_loopback)

    fault = commands.add_parser(
        "faults", parents=[common], help="hosts that fail during a broadcast, on emulated hosts"
    )
    fault.add_argument("--hosts", type=int, default=8)
    fault.add_argument("--rate", default="200mbit", help="of each host, each way")
    fault.add_argument("--size", type=parse_bytes, default=parse_bytes("128MiB"))
    fault.add_argument("--cases", nargs="+", choices=faults.CASES, default=list(faults.CASES))
    fault.add_argument("--reps", type=int, default=3)
    fault.set_defaults(run=run_faults)

    secure = commands.add_parser("tls", help="a large object on a TLS cluster, on this machine")
    secure.add_argument("--size", type=parse_bytes, default=parse_bytes("2.5GiB"))
    secure.add_argument("--workers", type=int, default=3)
    secure.set_defaults(run=run_tls)

    side = commands.add_parser("side", parents=[common], help="side effects, on this machine")
    side.add_argument("--workers", type=int, default=4)
    side.add_argument("--effects", nargs="+", choices=EFFECTS, default=list(EFFECTS))
    side.add_argument("--reps", type=int, default=7)
    side.add_argument("--shrink", type=int, default=1, help="divide all sizes, to try it out")
    side.set_defaults(run=run_side)

    again = commands.add_parser("churn", parents=[common], help="the same data again and again")
    again.add_argument("--workers", type=int, default=4)
    again.add_argument("--rounds", type=int, default=200)
    again.add_argument(
        "--sizes", nargs="+", type=parse_bytes, default=[parse_bytes("10kB"), parse_bytes("1MiB")]
    )
    again.add_argument("--patience", type=float, default=20, help="seconds for a round")
    again.set_defaults(run=run_churn)

    narrow = commands.add_parser("memory", help="more at once than a worker has memory for")
    narrow.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    narrow.add_argument("--size", type=parse_bytes, default=parse_bytes("100MiB"))
    narrow.add_argument("--no-shared-memory", dest="shared", action="store_false")
    narrow.set_defaults(run=run_memory)

    add_chaos(commands)

    plot = commands.add_parser("plot", help="draw the records of an earlier run again")
    plot.add_argument("file", type=Path)
    plot.set_defaults(run=run_plot)

    tests = commands.add_parser("dask-tests", help="Dask's own tests, with Hoplite and without")
    tests.add_argument("checkout", type=Path, help="of dask/distributed, at the installed release")
    tests.add_argument("--files", nargs="+", default=dask_tests.FILES, help="paths in the checkout")
    tests.add_argument("--reruns", type=int, default=4, help="of tests that differ")
    tests.add_argument("--clients", action="store_true", help="clients use Hoplite, too")
    tests.add_argument("--out", type=Path, default=RESULTS, help="folder for what comes of it")
    tests.set_defaults(run=run_dask_tests)

    # An end by SIGTERM is an orderly one, too: no host and no process stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    args = parser.parse_args()
    try:
        args.run(args)
    except (LaboratoryError, ValueError) as error:
        sys.exit(f"benchmarks: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def common_options() -> argparse.ArgumentParser:
    """Options of all measurements."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options.add_argument("--timeout", type=float, default=150, help="seconds for an operation")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for records and picture")
    return options


def add_ops(parser: argparse.ArgumentParser, ops: list[str], sizes: list[str], reps: int) -> None:
    """Options of the comparison of operations."""
    parser.add_argument("--ops", nargs="+", choices=OPS, default=ops)
    parser.add_argument(
        "--sizes", nargs="+", type=parse_bytes, default=list(map(parse_bytes, sizes))
    )
    parser.add_argument("--reps", type=int, default=reps)
    parser.add_argument(
        "--slow-reps", type=int, default=1, help="of plain Dask in scatter and replicate"
    )
    parser.add_argument(
        "--later", type=float, default=10, help="seconds after which copies are counted again"
    )


def run_lab(args: argparse.Namespace) -> None:
    """Compare operations on emulated hosts."""
    if reason := why_not():
        raise LaboratoryError(reason)
    with Laboratory(args.hosts, args.rate, args.delay) as lab:
        # The best of three: on a shared machine, one may be disturbed, and the limit is not.
        goodput = max(lab.goodput() for _ in range(3))
        mbit = goodput * 8 / 1e6
        title = f"{args.hosts} hosts × {args.per_host} workers, {args.rate} ({mbit:.1f} of payload)"
        about = {"hosts": args.hosts, "per_host": args.per_host, "rate": args.rate}
        about |= {"delay": args.delay, "goodput": goodput}
        compare_ops(args, lab, title, about, per_host=args.per_host, goodput=goodput)


def run_loopback(args: argparse.Namespace) -> None:
    """Compare operations on this machine."""
    title = f"loopback, {args.workers} workers"
    compare_ops(args, Loopback(args.workers), title, {"workers": args.workers})


def compare_ops(
    args: argparse.Namespace,
    place: Place,
    title: str,
    about: Record,
    per_host: int = 1,
    goodput: float | None = None,
) -> None:
    """Compare operations somewhere."""
    path = new_file(args)
    with clusters(args, place, path, per_host=per_host) as all_clusters:
        comparison = Comparison(
            all_clusters, args.reps, args.slow_reps, args.timeout, args.later, goodput
        )
        about = report.header(title=title, **about)
        records = kept(path, about, comparison.ops(args.ops, args.sizes))
    show_ops(path, title, records)


def run_faults(args: argparse.Namespace) -> None:
    """Let hosts fail."""
    if reason := why_not():
        raise LaboratoryError(reason)
    args.systems = ["hoplite"]
    path = new_file(args)
    title = f"{args.hosts} hosts, {args.rate}, {format_bytes(args.size)}"
    with Laboratory(args.hosts, args.rate) as lab, clusters(args, lab, path) as [cluster]:
        report.append(path, report.header(title=title, hosts=args.hosts, rate=args.rate))
        records = []
        for record in faults.run(lab, cluster, args.cases, args.size, args.reps, args.timeout):
            report.append(path, record)
            console.print(report.fault_line(record), soft_wrap=True)
            records.append(record)
    console.print(report.faults_table(records))
    console.print(f"{path}", soft_wrap=True)


def run_tls(args: argparse.Namespace) -> None:
    """Bring a large object to all workers of a TLS cluster."""
    found = tls.run(args.size, args.workers)
    console.print(
        f"{format_bytes(args.size)} to {args.workers - 1} workers in {found['seconds']:.1f} s "
        f"by {', '.join(found['paths'])}; "
        f"a receiver grew by {format_bytes(found['growth'])}; "
        + ("values are right" if found["correct"] else "WRONG VALUES")
    )


def run_side(args: argparse.Namespace) -> None:
    """Compare side effects."""
    path = new_file(args)
    title = f"side effects, loopback, {args.workers} workers of 2 threads"
    options = {"threads": 2, "memory": "8GiB"}
    with clusters(args, Loopback(args.workers), path, **options) as all_clusters:
        comparison = Comparison(all_clusters, args.reps, timeout=args.timeout)
        about = report.header(title=title, workers=args.workers, shrink=args.shrink)
        records = kept(path, about, comparison.effects(args.effects, args.shrink))
    console.print(report.effects_table(records))
    console.print(f"{path}", soft_wrap=True)


def run_memory(args: argparse.Namespace) -> None:
    """Bring ten objects at once to a worker that has memory for three."""
    for record in memory.run(args.systems, args.size, args.shared):
        console.print(
            f"{record['system']:7} {record['how']}: a peak of "
            f"{record['growth'] / record['nbytes']:.1f} objects, {record['pauses']} pauses, "
            f"{record['seconds']:.1f} s",
            soft_wrap=True,
        )


def run_churn(args: argparse.Namespace) -> None:
    """Scatter the same data again and again."""
    path = new_file(args)
    about = report.header(title=f"{args.rounds} rounds", workers=args.workers)
    with clusters(args, Loopback(args.workers), path) as all_clusters:
        records = churn.run(all_clusters, args.rounds, args.sizes, args.patience)
        kept(path, about, records, report.churn_line)
    console.print(f"{path}", soft_wrap=True)


def run_plot(args: argparse.Namespace) -> None:
    """Show and draw a file again."""
    about, records = report.read(args.file)
    if any("effect" in record for record in records):
        console.print(report.effects_table(records))
    else:
        show_ops(args.file, about["title"], records)


def run_dask_tests(args: argparse.Namespace) -> None:
    """Run Dask's own tests both ways."""
    sys.exit(
        dask_tests.compare(args.checkout, args.files, args.out, args.reruns, args.clients, console)
    )


def show_ops(path: Path, title: str, records: list[Record]) -> None:
    """Print the table and draw the picture next to the file of records."""
    table = report.ops_table(records)
    table.title = title
    console.print(table)
    picture = path.with_suffix(".png")
    report.plot(picture, records, title)
    console.print(f"{path}\n{picture}", soft_wrap=True)


def new_file(args: argparse.Namespace) -> Path:
    """Name of the file for the records of this run."""
    if "hoplite" in args.systems and importlib.util.find_spec("dask_hoplite") is None:
        raise ValueError("dask_hoplite cannot be imported here; use --systems plain")
    command = args.run.__name__.removeprefix("run_")
    return args.out / f"{command}-{datetime.datetime.now():%Y%m%d-%H%M%S}.jsonl"


@contextlib.contextmanager
def clusters(args: argparse.Namespace, place: Place, path: Path, **options):
    """Start a cluster per system."""
    with contextlib.ExitStack() as stack:
        logs = path.with_suffix(".logs")
        all_clusters = [Cluster(place, system, logs, **options) for system in args.systems]
        yield [stack.enter_context(cluster) for cluster in all_clusters]


def kept(
    path: Path,
    header: Record,
    records: Iterable[Record],
    line: Callable[[Record], str] = report.line,
) -> list[Record]:
    """Write and show the records as they come, and collect them."""
    report.append(path, header)
    collected = []
    for record in records:
        report.append(path, record)
        console.print(line(record), soft_wrap=True)
        collected.append(record)
    return collected


if __name__ == "__main__":
    main()
