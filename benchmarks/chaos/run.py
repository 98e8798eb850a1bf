"""The command ``python -m benchmarks chaos``."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client
from rich.console import Console

import dask_hoplite as hoplite
from benchmarks.chaos import leftovers
from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.load import Load, Operation, in_task

ACTIVITIES = 5

#: What tracebacks of Hoplite in the processes' logs may end with: connections break, and what is
#: typed is judged where it arrives.
HARMLESS = re.compile(
    r"CommClosedError|OSError|Connection\w*Error|TimeoutError|StreamClosedError"
    r"|TransferError|ObjectLostError|CancelledError|no such worker"
)


def add_command(commands: Any) -> None:
    """Add the command to those of ``python -m benchmarks``."""
    parser = commands.add_parser("chaos", help="faults by chance, on this machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("chaos-results"))
    parser.add_argument("--deadline", type=float, default=60, help="seconds for an operation")
    # A worker that froze lately must be heard of again, and the directory remembers receivers for
    # ten stall timeouts.
    parser.add_argument("--settle", type=float, default=40, help="seconds until nothing is left")
    parser.add_argument(
        "--sabotage",
        nargs="+",
        default=[],
        choices=SABOTAGE,
        help="do something wrong, to see that it is reported",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> None:
    """Run, print what came of it, and exit with 1 if anything went wrong."""
    name = f"chaos-{args.seed}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    journal = Journal(args.out / f"{name}.jsonl")
    logs = args.out.absolute() / f"{name}.logs"
    with Cluster(logs) as cluster:
        log_to(logs / "client.log")
        asyncio.run(Run(args, cluster, journal).run())
    for problem in problems(logs):
        journal.judge("logs", "unexplained", **problem)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(journal.table())
    for failure in journal.failures:
        long = ("state", "text", "traceback")
        shown = {name: value for name, value in failure.items() if name not in long}
        console.print(f"FAILED {shown}", soft_wrap=True)
    journal.note("end", failures=len(journal.failures))
    journal.close()
    if journal.failures:
        raise SystemExit(1)


class Run:
    """One run, from the first worker to the last look at what is left."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster, journal: Journal):
        self.args = args
        self.cluster = cluster
        self.journal = journal

    async def run(self) -> None:
        """Let load and faults happen for the time given; then look at what is left."""
        args, cluster, journal = self.args, self.cluster, self.journal
        journal.note("start", **{k: v for k, v in vars(args).items() if k != "run"})
        other = partial(
            Client, cluster.address, asynchronous=True, timeout=60, set_as_default=False
        )
        async with (
            Client(cluster.address, asynchronous=True, timeout=60) as self.client,
            other() as plain,
            other(direct_to_workers=False) as relayed,
        ):
            self.clients = {"hoplite": self.client, "relayed": relayed, "plain": plain}
            self.faults = Faults(cluster, journal, self.client, args.seed, args.workers)
            self.load = Load(cluster, journal, self.clients, args.seed, args.deadline)
            self.load.diagnose = self.diagnose
            for _ in range(args.workers):
                self.faults.join()
            await self.client.wait_for_workers(args.workers, timeout=120)
            watching = asyncio.create_task(self.watch())
            before = await self.baseline()
            doing = [asyncio.create_task(self.load.activity(f"a{i}")) for i in range(ACTIVITIES)]
            happening = asyncio.create_task(self.faults.happen())
            for name in args.sabotage:
                await SABOTAGE[name](self)
            await asyncio.sleep(args.minutes * 60)
            self.load.over = self.faults.over = True
            await asyncio.wait(doing)
            await happening
            await self.faults.settled()
            for member in cluster.present():
                cluster.signal(member, signal.SIGCONT)
            await asyncio.gather(*doing)
            await self.look(before)
            watching.cancel()

    async def watch(self) -> None:
        """Keep up with who is there."""
        while True:
            self.cluster.update(await self.client.run_on_scheduler(_addresses))
            await asyncio.sleep(0.3)

    async def baseline(self) -> dict[str, dict[str, int]]:
        """Use everything once, and see what the processes are then."""
        while len(self.cluster.present()) < self.args.workers:
            await asyncio.sleep(0.1)
        for name, client in self.clients.items():
            if name != "plain":
                await hoplite.status(client=client)
            x = await client.scatter(np.ones(2**25, "u1"), broadcast=True)
            sums = [client.submit(len, x, pure=False) for _ in range(self.args.workers)]
            await client.gather([x, *sums])
        # The client that a worker then has for its tasks stays, with connections of its own.
        addresses = [member.address for member in self.cluster.present()]
        inside = [self.client.submit(in_task, b"x", workers=[w], pure=False) for w in addresses]
        await self.client.gather(inside)
        del x, sums, inside
        await self.emptied(self.args.settle)
        figures = await self.figures()
        workers = [
            figure for name, figure in figures.items() if name not in ("scheduler", "client")
        ]
        typical = {name: sorted(w[name] for w in workers)[len(workers) // 2] for name in workers[0]}
        before = {"worker": typical, **{name: figures[name] for name in ("scheduler", "client")}}
        self.journal.note("baseline", **before)
        return before

    # Leaks

    async def look(self, before: dict[str, dict[str, int]]) -> None:
        """Judge what is left."""
        left = await self.emptied(self.args.settle)
        for process, things in left.items():
            self.journal.judge("left behind", "leak", who=process, **things)
        if left:
            self.journal.note("stories", **await self.stories(_keys(left)))
        else:
            self.journal.judge("left behind", "right")
        figures = await self.figures()
        self.journal.note("figures", **figures)
        for process, after in figures.items():
            more = leftovers.excess(before.get(process, before["worker"]), after)
            verdict = "leak" if more else "right"
            self.journal.judge("figures", verdict, who=process, **more)

    async def emptied(self, timeout: float) -> dict[str, dict[str, list[str]]]:
        """Wait until nothing is left; return what is left nevertheless."""
        deadline = time.monotonic() + timeout
        while True:
            found = {
                "scheduler": await self.client.run_on_scheduler(leftovers.of_scheduler),
                "client": leftovers.of_process(),
                **await self.client.run(leftovers.of_worker, on_error="return"),
            }
            left = {
                process: {name: items for name, items in things.items() if items}
                if isinstance(things, dict)
                else {"error": [repr(things)]}
                for process, things in found.items()
            }
            left = {process: things for process, things in left.items() if things}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.5)

    async def figures(self) -> dict[str, dict[str, int]]:
        """Figures of all processes. Twice, since the pools of one hold connections of another."""
        for _ in range(2):
            for client in self.clients.values():
                client.rpc.collect()
            scheduler, workers, ours = await asyncio.gather(
                self.client.run_on_scheduler(leftovers.figures_of_scheduler),
                self.client.run(leftovers.figures_of_worker),
                leftovers.figures(self.client),
            )
        return {"scheduler": scheduler, **workers, "client": ours}

    async def diagnose(self, op: Operation) -> dict[str, Any]:
        """What everybody knows of the objects of an operation that hangs."""
        return {
            "futures": {future.key: future.status for future in op.futures},
            "client": [leftovers.where(task) for task in asyncio.all_tasks()],
            **await self.stories([future.key for future in op.futures]),
        }

    async def stories(self, keys: list[Any]) -> dict[str, Any]:
        """What the scheduler and the workers say of some keys."""
        try:
            async with asyncio.timeout(10):
                return {
                    "scheduler": await self.client.run_on_scheduler(_story, keys=keys),
                    "workers": await self.client.run(_worker_story, keys, on_error="return"),
                }
        except Exception as error:
            return {"error": repr(error)}


def _keys(left: dict[str, dict[str, list[str]]]) -> list[str]:
    """The keys that are named in what is left."""
    return sorted(set(re.findall(r"\w+-[0-9a-f-]{32,36}", str(left))))


def _addresses(dask_scheduler: Any) -> dict[str, str]:
    return {str(ws.name): ws.address for ws in dask_scheduler.workers.values()}


async def _story(dask_scheduler: Any, keys: list[Any]) -> dict[str, Any]:
    from dask_hoplite.scheduler import NAME

    plugin = dask_scheduler.plugins[NAME]
    wanted = set(keys)
    for key in keys:
        if key in dask_scheduler.tasks:
            wanted |= {ts.key for ts in dask_scheduler.tasks[key].dependencies}
    tasks = {
        key: str((ts.state, ts.who_has, ts.processing_on, ts.waiting_on, ts.who_wants))
        for key in wanted
        if (ts := dask_scheduler.tasks.get(key)) is not None
    }
    return {
        "tasks": tasks,
        "workers": {ws.address: str(ws.status) for ws in dask_scheduler.workers.values()},
        "rows": [row for row in plugin.directory.log() if row["key"] in wanted][-40:],
        "puts": {str(key): str(put) for key, put in plugin.puts.pending.items()},
        "waits": [leftovers.where(task) for task in asyncio.all_tasks()],
        "story": [str(item) for item in dask_scheduler.story(*wanted)][-60:],
    }


async def _worker_story(keys: list[Any], dask_worker: Any) -> dict[str, Any]:
    plugin = dask_worker.plugins["hoplite"]
    tasks = dask_worker.state.tasks
    return {
        "tasks": {key: str((ts, ts.who_has)) for key, ts in tasks.items()},
        "incoming": {
            str(key): f"{pull.received}/{pull.nbytes} from {pull.source} {pull.task}"
            for key, pull in plugin.puller.incoming.items()
        },
        "shelf": {str(key): str(entry) for key, entry in plugin.shelf.entries.items()},
        "expected": list(map(str, plugin.arrivals.expected)),
        "landing": list(map(str, plugin.landing)),
        "waits": [leftovers.where(task) for task in asyncio.all_tasks()],
        "story": [str(item) for item in dask_worker.state.story(*keys)][-40:],
    }


# What the processes said


def problems(logs: Path) -> list[dict[str, str]]:
    """Errors that processes have logged of Hoplite, and that no broken connection explains."""
    found = []
    for path in sorted(logs.glob("*.log")):
        for entry in re.split(r"(?m)^(?=\d{4}-\d\d-\d\d )", path.read_text(errors="replace")):
            if "Traceback" not in entry or "dask_hoplite" not in entry:
                continue
            if "Compute Failed" in entry:  # of a task: it is judged where it arrives
                continue
            outcomes = re.findall(r"Traceback \(most recent call last\):\n(?: .*\n)+(\S.*)", entry)
            outcome = outcomes[-1] if outcomes else "an unfinished traceback"
            if not HARMLESS.search(outcome):
                found.append({"log": path.name, "error": outcome, "text": entry[-6000:]})
    return found


def log_to(path: Path) -> None:
    """What Dask logs in this process goes to a file, too."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    for name in ("distributed", "asyncio", "tornado", "dask_hoplite"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False


# Sabotage


async def _wrong_value(run: Run) -> None:
    async def wrong(op: Operation) -> None:
        future = op.hold(await run.client.scatter(np.zeros(op.nbytes, "u1")))
        op.check(await run.client.gather(future))

    await run.load.perform(Operation("sabotage", "value", 2**20, run.client), wrong)


async def _hang(run: Run) -> None:
    async def hang(op: Operation) -> None:
        await asyncio.Event().wait()

    op = Operation("sabotage", "hang", 1, run.client)
    op.since -= run.args.deadline
    await run.load.perform(op, hang)


async def _leak(run: Run) -> None:
    def leak(dask_scheduler: Any) -> None:
        dask_scheduler.plugins["hoplite"].wishes.add("leaked", None)

    await run.client.run_on_scheduler(leak)


async def _error(run: Run) -> None:
    async def fail(op: Operation) -> None:
        raise RuntimeError("an internal error")

    await run.load.perform(Operation("sabotage", "error", 1, run.client), fail)


SABOTAGE: dict[str, Callable[[Run], Awaitable[None]]] = {
    "value": _wrong_value,
    "hang": _hang,
    "leak": _leak,
    "error": _error,
}
