"""Compare Hoplite with plain Dask.

python -m benchmarks lab              on emulated hosts whose network is the limit (needs root)
python -m benchmarks loopback         on this machine as it is
python -m benchmarks arrivals         reductions whose operands become ready one by one (needs root)
python -m benchmarks degrees          reductions by trees of given degrees (needs root)
python -m benchmarks uses             asynchronous SGD and what else it is for (needs root)
python -m benchmarks programs         other people's programs, unchanged (needs root)
python -m benchmarks disturbed        the same when a worker fails, or is slow (needs root)
python -m benchmarks peers            what Gloo and Open MPI need for the same (needs root)
python -m benchmarks faults           what becomes of a broadcast when a host fails (needs root)
python -m benchmarks tls              an object of more than 2 GiB on a TLS cluster
python -m benchmarks side             what Hoplite does to everything else
python -m benchmarks churn            the same data scattered, used, dropped, without a pause
python -m benchmarks learning         whether asynchronous training learns as much
python -m benchmarks versions         memory over many versions of parameters
python -m benchmarks memory           more at once than a worker has memory for
python -m benchmarks chaos            whether faults by chance do any harm
python -m benchmarks exactness        collectives while workers fail: each operand counted once
python -m benchmarks dashboard        what an open page of the dashboard costs the scheduler
python -m benchmarks dask-tests DIR   Dask's own tests, plain and with Hoplite
python -m benchmarks plot FILE        draw the records of an earlier run again
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import itertools
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dask.utils import format_bytes, parse_bytes
from rich.console import Console

from benchmarks import (
    churn,
    dashboard,
    dask_tests,
    disturbed,
    faults,
    memory,
    peers,
    report,
    tls,
    versions,
)
from benchmarks.chaos.run import add_command as add_chaos
from benchmarks.cluster import SYSTEMS, Cluster, Loopback, Place
from benchmarks.degrees import degrees
from benchmarks.exactness import add_command as add_exactness
from benchmarks.laboratory import Laboratory, LaboratoryError, why_not
from benchmarks.measure import Comparison
from benchmarks.programs import RUNNING, compared
from benchmarks.side import EFFECTS
from benchmarks.uses import STEPS, USES
from dask_hoplite.bench.operations import OPS, OPS_WITHOUT_NETWORK
from dask_hoplite.bench.report import line, ops_table
from dask_hoplite.bench.turns import Record

#: The operations of `arrivals`.
REDUCTIONS = ["reduce", "allreduce"]

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

    hosts = lab_options()

    lab = commands.add_parser("lab", parents=[common, hosts], help="on emulated hosts")
    lab.add_argument("--per-host", type=int, default=1, help="workers on each host")
    add_ops(lab, list(OPS), sizes=["1MiB", "32MiB", "128MiB"], reps=3)
    lab.set_defaults(run=run_lab)

    loopback = commands.add_parser("loopback", parents=[common], help="on this machine as it is")
    loopback.add_argument("--workers", type=int, default=4)
    add_ops(loopback, OPS_WITHOUT_NETWORK, sizes=["64MiB", "256MiB"], reps=5)
    loopback.set_defaults(run=run_loopback)

    arrivals = commands.add_parser(
        "arrivals",
        parents=[common, hosts],
        help="reductions whose operands become ready one by one, on emulated hosts",
    )
    arrivals.add_argument("--ops", nargs="+", choices=REDUCTIONS, default=REDUCTIONS)
    arrivals.add_argument("--size", type=parse_bytes, default=parse_bytes("32MiB"))
    arrivals.add_argument(
        "--interval",
        type=float,
        default=0.3,
        help="from one operand to the next, in times size over goodput",
    )
    arrivals.add_argument(
        "--late",
        type=float,
        metavar="SECONDS",
        help="measure instead the sum of those half of the operands that are there first, while "
        "one is late, and while none is",
    )
    arrivals.add_argument("--reps", type=int, default=3)
    arrivals.set_defaults(run=run_arrivals)

    shapes = commands.add_parser(
        "degrees",
        parents=[common, hosts],
        help="reductions by trees of given degrees, on emulated hosts",
    )
    add_sizes(shapes, ["64KiB", "1MiB", "32MiB"])
    shapes.add_argument("--reps", type=int, default=5)
    shapes.set_defaults(run=run_degrees)

    uses = commands.add_parser(
        "uses",
        parents=[common, hosts],
        help="asynchronous SGD and what else it is for, on emulated hosts",
    )
    uses.add_argument("--ops", nargs="+", choices=USES, default=list(USES))
    add_sizes(uses, ["16MiB"])
    uses.add_argument("--reps", type=int, default=3)
    uses.set_defaults(run=run_uses, slow_reps=1, later=0)

    programs = commands.add_parser(
        "programs",
        parents=[common, hosts],
        help="other people's programs, unchanged, on emulated hosts",
    )
    programs.add_argument("--ops", nargs="+", choices=RUNNING, default=list(RUNNING))
    add_sizes(programs, ["32MiB"])
    programs.add_argument("--reps", type=int, default=3)
    programs.add_argument("--slow-reps", type=int, default=1, help="of plain Dask where it is slow")
    programs.set_defaults(run=run_programs, later=0)

    fails = commands.add_parser(
        "disturbed",
        parents=[common, hosts],
        help="the same while a worker fails, or is slow, on emulated hosts",
    )
    fails.add_argument("--ops", nargs="+", choices=USES, default=["async-sgd", "ensemble"])
    fails.add_argument("--cases", nargs="+", choices=disturbed.CASES, default=disturbed.CASES)
    fails.add_argument("--size", type=parse_bytes, default=parse_bytes("16MiB"))
    fails.add_argument("--reps", type=int, default=1)
    fails.set_defaults(run=run_disturbed)

    others = commands.add_parser(
        "peers", parents=[hosts], help="Gloo and Open MPI, on emulated hosts"
    )
    others.add_argument("--systems", nargs="+", choices=peers.SYSTEMS, default=list(peers.SYSTEMS))
    others.add_argument("--ops", nargs="+", choices=peers.LIKE, default=list(peers.LIKE))
    others.add_argument(
        "--python", default=sys.executable, help="an interpreter with numpy, torch and mpi4py"
    )
    add_sizes(others, ["1MiB", "32MiB"])
    others.add_argument("--reps", type=int, default=3)
    others.add_argument("--timeout", type=float, default=150, help="seconds for an operation")
    others.add_argument("--out", type=Path, default=RESULTS, help="folder for records and picture")
    others.set_defaults(run=run_peers)

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

    learns = commands.add_parser(
        "learning", help="whether asynchronous training learns as much, on this machine"
    )
    learns.add_argument("--workers", type=int, default=4)
    learns.add_argument("--seeds", type=int, default=5)
    learns.add_argument("--slow", type=float, default=0.1, help="seconds of the slow worker")
    learns.set_defaults(run=run_learning)

    many = commands.add_parser("versions", help="memory over many versions, on this machine")
    many.add_argument("--versions", type=int, default=200)
    many.add_argument("--size", type=parse_bytes, default=parse_bytes("50MB"))
    many.add_argument("--workers", type=int, default=4)
    many.set_defaults(run=run_versions)

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
    add_exactness(commands)

    plot = commands.add_parser("plot", help="draw the records of an earlier run again")
    plot.add_argument("file", type=Path)
    plot.set_defaults(run=run_plot)

    page = commands.add_parser(
        "dashboard", help="what an open page of the dashboard costs the scheduler"
    )
    page.add_argument("--workers", type=int, default=200, help="simulated ones")
    page.add_argument("--seconds", type=float, default=20, help="of each of three windows")
    page.add_argument("--picture", type=Path, help="save a picture of the page instead")
    page.set_defaults(run=run_dashboard)

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


def lab_options() -> argparse.ArgumentParser:
    """Options of emulated hosts."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--hosts", type=int, default=8)
    options.add_argument("--rate", default="200mbit", help="of each host, each way")
    options.add_argument("--delay", default="0ms", help="of each packet (needs the kernel's netem)")
    return options


def add_sizes(parser: argparse.ArgumentParser, sizes: list[str]) -> None:
    """The option for several sizes."""
    parser.add_argument(
        "--sizes", nargs="+", type=parse_bytes, default=list(map(parse_bytes, sizes))
    )


def add_ops(parser: argparse.ArgumentParser, ops: list[str], sizes: list[str], reps: int) -> None:
    """Options of the comparison of operations."""
    parser.add_argument("--ops", nargs="+", choices=OPS, default=ops)
    add_sizes(parser, sizes)
    parser.add_argument("--reps", type=int, default=reps)
    parser.add_argument(
        "--slow-reps", type=int, default=1, help="of plain Dask in scatter and replicate"
    )
    parser.add_argument(
        "--later", type=float, default=10, help="seconds after which copies are counted again"
    )


def run_lab(args: argparse.Namespace) -> None:
    """Compare operations on emulated hosts."""
    with laboratory(args) as (lab, about):
        per_host = args.per_host
        title = f"{args.hosts} hosts × {per_host} workers, {payload(about)}"
        about["per_host"] = per_host
        compare_ops(args, lab, title, about, per_host=per_host, goodput=about["goodput"])


@contextlib.contextmanager
def laboratory(args: argparse.Namespace) -> Iterator[tuple[Laboratory, Record]]:
    """Make emulated hosts, and what the header says of them."""
    if reason := why_not():
        raise LaboratoryError(reason)
    with Laboratory(args.hosts, args.rate, args.delay) as lab:
        # The best of three: on a shared machine, one may be disturbed, and the limit is not.
        goodput = max(lab.goodput() for _ in range(3))
        about = {"hosts": args.hosts, "rate": args.rate, "delay": args.delay, "goodput": goodput}
        yield lab, about


def payload(about: Record) -> str:
    """The rate of links, in words."""
    return f"{about['rate']} ({about['goodput'] * 8 / 1e6:.1f} of payload)"


def run_arrivals(args: argparse.Namespace) -> None:
    """Compare reductions whose operands come later."""
    with laboratory(args) as (lab, about):
        goodput = about["goodput"]
        if args.late is None:
            interval = args.interval * args.size / goodput
            what = f"an operand every {interval:.2f} s"
            cases = [{"case": op, "op": f"{op}-arrivals", "interval": interval} for op in args.ops]
        else:
            what = f"the first {args.hosts // 2} operands of {args.hosts}"
            cases = [
                {"case": "none late", "op": "reduce-half", "late": 0},
                {"case": f"one {args.late:g} s late", "op": "reduce-half", "late": args.late},
            ]
        title = f"{args.hosts} hosts, {payload(about)}, {what}"
        path = new_file(args)
        with clusters(args, lab, path) as all_clusters:
            comparison = Comparison(all_clusters, args.reps, timeout=args.timeout, goodput=goodput)
            header = report.header(title=title, interval=args.interval, late=args.late, **about)
            records = kept(path, header, comparison.arrivals(cases, args.size))
    show_ops(path, title, records)


def run_uses(args: argparse.Namespace) -> None:
    """Compare what goes on step by step."""
    with laboratory(args) as (lab, about):
        title = f"{STEPS} steps, {args.hosts} hosts, {payload(about)}"
        compare_ops(args, lab, title, about, goodput=about["goodput"])


def run_programs(args: argparse.Namespace) -> None:
    """Compare programs that know nothing of Hoplite."""
    with laboratory(args) as (lab, about):
        path = new_file(args)
        title = f"programs, {args.hosts} hosts, {payload(about)}"
        with clusters(args, lab, path) as all_clusters:
            comparison = Comparison(all_clusters, args.reps, args.slow_reps, args.timeout)
            header = report.header(title=title, **about)
            records = compared(comparison.ops(args.ops, args.sizes))
            records = kept(path, header, records)
    show_ops(path, title, records)


def run_disturbed(args: argparse.Namespace) -> None:
    """Let a worker fail, or be slow."""
    with laboratory(args) as (lab, about):
        path = new_file(args)
        with clusters(args, lab, path) as all_clusters:
            header = report.header(title="disturbed", **about)
            records = disturbed.run(
                lab,
                all_clusters,
                args.ops,
                list(args.cases),
                args.size,
                args.reps,
                about["goodput"],
                args.timeout,
            )
            kept(path, header, records, report.stages_line)
    console.print(f"{path}", soft_wrap=True)


def run_degrees(args: argparse.Namespace) -> None:
    """Compare trees of reductions."""
    args.systems = ["hoplite"]
    with laboratory(args) as (lab, about):
        title = f"reduce by trees, {args.hosts} hosts, {payload(about)}"
        path = new_file(args)
        with clusters(args, lab, path) as all_clusters:
            comparison = Comparison(
                all_clusters, args.reps, timeout=args.timeout, goodput=about["goodput"]
            )
            header = report.header(title=title, **about)
            records = kept(path, header, comparison.degrees(degrees(args.hosts), args.sizes))
    show_ops(path, title, records)


def run_peers(args: argparse.Namespace) -> None:
    """Measure those libraries that are there."""
    versions = {}
    for system in args.systems:
        version, missing = peers.find(system, args.python)
        console.print(f"{system}: {version or f'not measured: {missing}'}", soft_wrap=True)
        if version:
            versions[system] = version
    if not versions:
        raise ValueError("there is no peer to measure; see --python")
    with laboratory(args) as (lab, about):
        title = f"{args.hosts} hosts, {payload(about)}"
        path = new_file(args)
        header = report.header(title=title, peers=versions, **about)
        records = itertools.chain.from_iterable(
            peers.run(
                lab,
                system,
                args.python,
                args.ops,
                args.sizes,
                args.reps,
                about["goodput"],
                args.timeout,
                path.with_suffix(".logs"),
            )
            for system in versions
        )
        collected = kept(path, header, records)
    show_ops(path, title, collected)


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


def run_dashboard(args: argparse.Namespace) -> None:
    """Measure what an open page costs, or save a picture of it."""
    if args.picture is not None:
        dashboard.photograph(args.picture)
        return
    found = dashboard.run(args.workers, args.seconds)
    console.print(
        f"{args.workers} workers: {found['closed']:.2%} of a core with no page open, "
        f"{found['open']:.2%} with one: the page takes {found['page']:.2%}, "
        f"and changes {found['updates']:.2f} times a second",
        soft_wrap=True,
    )


def run_learning(args: argparse.Namespace) -> None:
    """Compare the rules of training."""
    from benchmarks import learning  # needs scikit-learn

    found: dict[str, list[tuple[float, float]]] = {}
    for record in learning.run(args.workers, args.seeds, args.slow):
        both = record["accuracy"], record["seconds"]
        found.setdefault(record["rule"], []).append(both)
        console.print(f"{record['rule']}, seed {record['seed']}: {both[0]:.3f}, {both[1]:.1f} s")
    for rule, rows in found.items():
        accuracies, seconds = zip(*rows, strict=True)
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        mean = statistics.mean(accuracies)
        console.print(f"{rule:20} {mean:.3f} ({spread}), {statistics.median(seconds):.1f} s")


def run_versions(args: argparse.Namespace) -> None:
    """Train with large parameters."""
    for record in versions.run(args.versions, args.size, args.workers):
        step, tasks = record.pop("step"), record.pop("tasks")
        sizes = ", ".join(f"{name} {format_bytes(rss)}" for name, rss in record.items())
        console.print(f"step {step}: {tasks} tasks; {sizes}", soft_wrap=True)


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
    table = ops_table(records)
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
    line: Callable[[Record], str] = line,
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
