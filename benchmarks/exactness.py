"""The command ``python -m benchmarks exactness``: collectives to which things happen.

The operands are multiples of distinct powers of two, so each result tells which of them are in it,
and how often. What happens follows from the seed and the number of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import signal
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, Future, wait
from distributed.core import Status
from rich.console import Console

import dask_hoplite as hoplite
from benchmarks.chaos import leftovers
from benchmarks.chaos.cluster import Cluster, Member
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.run import log_to, problems
from dask_hoplite.exceptions import HopliteError

OPERANDS = 8
WORKERS = 8

#: A frozen worker that nobody can do without is removed after about so many seconds. Workers do not
#: look at their memory and go on by themselves when they are paused.
SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-ttl": "8s",
    "distributed.worker.memory.pause": False,
    "hoplite.stall-timeout": "1s",
}

COLLECTIVES = (
    "reduce",
    "reduce some",
    "reduce to a root",
    "reduce whole objects",
    "reduce in order",
    "several per worker",
    "allreduce",
    "allreduce, late",
    "allreduce some",
    "reduce-scatter",
    "allgather",
)

FAULTS = (
    "kill before it contributes",
    "kill half streamed",
    "kill after it has merged others",
    "kill root",
    "kill two",
    "freeze, and back",
    "freeze for good",
    "freeze root, and back",
    "freeze root for good",
    "raises",
    "never comes",
    "retire",
    "pause",
)

#: Which workers a fault is to meet, if there are any
ROLES = {
    "kill half streamed": "streaming",
    "kill after it has merged others": "merged",
    "kill root": "root",
    "freeze root, and back": "root",
    "freeze root for good": "root",
}


class Raised(Exception):
    """What an operand's task raises that is to raise."""


def weights(start: int, stop: int) -> np.ndarray:
    """Numbers by position, so that nothing can be in a wrong place unnoticed."""
    return 1 + np.arange(start, stop) * 7919 % 1021


def operand(index: int, length: int, dtype: str, delay: float = 0, raises: bool = False) -> Any:
    """The operand of that number, after a while."""
    time.sleep(delay)
    if raises:
        raise Raised(index)
    return (weights(0, length) * 2**index).astype(dtype)


def plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For whole objects."""
    return a + b


def contents(value: np.ndarray, start: int = 0) -> tuple[str, int, int]:
    """The dtype and length of a sum or a part of it, and the operands in it, as a sum of powers.

    -1 stands for a mixture.
    """
    found = value / weights(start, start + len(value))
    mask = int(found[0]) if len(found) else 0
    return str(value.dtype), len(value), mask if (found == mask).all() else -1


def contents_of_each(values: list[np.ndarray]) -> list[tuple[str, int, int]]:
    """Of several sums."""
    return [contents(value) for value in values]


def contents_of_copy(key: str, dask_worker: Any) -> Any:
    """Of the copy that a worker has, or None."""
    value = dask_worker.data.get(key)
    if value is None:
        return None
    return contents_of_each(value) if isinstance(value, list) else contents(value)


@dataclass
class Plan:
    """What is done in one run, and what happens to it."""

    number: int
    collective: str
    fault: str | None
    rng: random.Random
    length: int = 0
    dtype: str = "float64"
    count: int = OPERANDS  #: how many are to go in
    where: list[int] = field(default_factory=list)  #: the place of each operand
    scattered: set[int] = field(default_factory=set)
    delays: dict[int, float] = field(default_factory=dict)
    moment: float = 0.0  #: in times of the usual duration
    seconds: float = 0.0  #: for which it lasts
    odd: int = 0  #: the operand that raises, or does not come
    root: int | None = None

    @classmethod
    def of(cls, seed: int, number: int) -> Plan:
        """The plan that follows from a seed."""
        rng = random.Random(f"{seed}/{number}")
        if number < len(COLLECTIVES):  # at first undisturbed, to learn how long each takes
            plan = cls(number, COLLECTIVES[number], None, rng)
        else:
            plan = cls(number, rng.choice(COLLECTIVES), rng.choice(FAULTS), rng)
        plan.length = rng.randint(500_000, 2_000_000)
        plan.dtype = rng.choice(["float64", "int64"])
        name = plan.collective
        if "some" in name:
            plan.count = rng.randint(3, OPERANDS - 2)
        places = rng.sample(range(WORKERS), 3 if "several" in name else WORKERS)
        plan.where = [places[i % len(places)] for i in range(OPERANDS)]
        plan.scattered = set(rng.sample(range(OPERANDS), OPERANDS // 2))
        others = sorted(set(range(OPERANDS)) - plan.scattered)
        if "late" in name or rng.random() < 0.3:
            late = rng.sample(others, rng.randint(1, len(others)))
            plan.delays = {index: rng.uniform(0, 1.0) for index in late}
        plan.odd = rng.choice(others)
        if plan.fault == "kill before it contributes":
            plan.delays[plan.odd] = 1.0
        plan.root = rng.randrange(WORKERS) if "root" in name else None
        plan.moment = rng.uniform(0, 1.1)
        plan.seconds = rng.uniform(0.3, 5)
        return plan

    @property
    def timeout(self) -> float | None:
        """Of the collective."""
        return 4.0 if self.fault == "never comes" and self.timed else None

    @property
    def timed(self) -> bool:
        """Whether the collective takes a timeout."""
        return self.collective.startswith(("reduce ", "several", "allreduce")) or (
            self.collective == "reduce"
        )

    @property
    def raises(self) -> bool:
        """Whether an operand raises. It does too where it could not be waited for with a limit."""
        return self.fault == "raises" or (self.fault == "never comes" and not self.timed)


@dataclass
class Outcome:
    """What came of it."""

    error: BaseException | None = None
    contributors: list[int] = field(default_factory=list)
    found: Any = None
    copies: dict[int, Any] = field(default_factory=dict)  #: by place
    departed: set[int] = field(default_factory=set)  #: places whose workers are not there any more
    touched: set[int] = field(default_factory=set)  #: places to which something happened
    seconds: float = 0.0


def judge(plan: Plan, outcome: Outcome) -> tuple[str, str]:
    """A verdict, and what is wrong or what explains it."""
    lost = {i for i in plan.scattered if plan.where[i] in outcome.departed}
    odd = {plan.odd} if plan.fault in ("raises", "never comes") else set()
    left = OPERANDS - len(lost | odd)
    error = outcome.error
    if error is not None:
        if left >= plan.count:
            return "unexplained", f"{left} operands were left for {plan.count}"
        if lost and isinstance(error, HopliteError | CancelledError):
            return "justified", "lost"
        if odd and plan.raises and isinstance(error, Raised):
            return "justified", "raised"
        if odd and not plan.raises and isinstance(error, TimeoutError):
            return "justified", "timeout"
        return "unexplained", "another error was to be expected"
    if odd and plan.count == OPERANDS:
        return "wrong", "a result without one of the operands"
    if len(set(outcome.contributors)) != plan.count or len(outcome.contributors) != plan.count:
        return "wrong", f"contributors: {outcome.contributors}"
    if odd & set(outcome.contributors):
        return "wrong", "the operand that does not exist is a contributor"
    right = expected(plan, outcome.contributors)
    if outcome.found != right:
        return "wrong", f"{outcome.found}, not {right}"
    for place, copy in outcome.copies.items():
        if place not in outcome.touched and copy != right:
            return "wrong", f"{copy} on worker {place}, not {right}"
    return "right", ""


def expected(plan: Plan, contributors: Iterable[int]) -> Any:
    """What is to be found in a result."""
    if plan.collective == "allgather":
        return [(plan.dtype, plan.length, 2**index) for index in range(OPERANDS)]
    return plan.dtype, plan.length, sum(2**index for index in contributors)


# What is seen on the scheduler


def roles(dask_scheduler: Any) -> dict[str, list[str]]:
    """Which workers play which part at the moment."""
    runs = dask_scheduler.plugins["hoplite"].reductions.runs.values()
    nodes = [node for run in runs for node in run.plan.nodes.values() if not node.lost]
    found = {
        "root": {run.root for run in runs if run.root is not None},
        "streaming": {node.worker for node in nodes if not node.done and not node.final},
        "merged": {node.worker for node in nodes if node.sources and not node.final},
    }
    return {role: sorted(workers) for role, workers in found.items()}


def state_of(dask_scheduler: Any) -> dict[str, Any]:
    """What the scheduler knows of all that goes on."""
    runs = dask_scheduler.plugins["hoplite"].reductions.runs
    return {
        "runs": {
            str(key): {
                **{name: str(getattr(run, name)) for name in ("root", "parked", "error", "events")},
                **{
                    name: str(getattr(run.plan, name))
                    for name in ("over", "ready", "gone", "suspects", "barred", "ends", "reason")
                },
                "nodes": list(map(str, run.plan.nodes.values())),
            }
            for key, run in runs.items()
        },
        "tasks": {
            str(key): f"{ts.state} on {ts.processing_on} in {ts.who_has} wants {ts.waiting_on}"
            for key, ts in dask_scheduler.tasks.items()
        },
        "workers": {ws.address: str(ws.status) for ws in dask_scheduler.workers.values()},
        "waits": [leftovers.where(task) for task in asyncio.all_tasks()],
    }


def state_of_worker(dask_worker: Any) -> dict[str, Any]:
    """What a worker does."""
    plugin = dask_worker.plugins["hoplite"]
    return {
        "name": dask_worker.name,
        "sums": [
            f"{sum.told} {sum.inputs} {sum.out} {sum.done}" for sum in plugin.reducer.sums.values()
        ],
        "results": list(map(str, plugin.reducer.results.items())),
        "tasks": {str(key): str(ts) for key, ts in dask_worker.state.tasks.items()},
        "waits": [leftovers.where(task) for task in asyncio.all_tasks()],
    }


def hasten(dask_worker: Any) -> None:
    """Let nothing stand on the shelf for longer than it is read."""
    dask_worker.plugins["hoplite"].shelf.grace = 0.2


def set_paused(paused: bool, dask_worker: Any) -> None:
    """Pause a worker, or let it go on."""
    dask_worker.status = Status.paused if paused else Status.running


class Exactness:
    """A cluster, and the runs on it.

    Parameters
    ----------
    args : argparse.Namespace
        Of the command.
    cluster : Cluster
        Where it happens.
    journal : Journal
        Where it is written down.
    """

    def __init__(self, args: argparse.Namespace, cluster: Cluster, journal: Journal):
        self.args = args
        self.cluster = cluster
        self.journal = journal
        self.members: list[Member | None] = [None] * WORKERS  # by place
        self.joined = 0
        self.usual: dict[str, float] = {}
        self.doing: asyncio.Task[None] | None = None

    async def run(self, numbers: Iterable[int]) -> None:
        """Go through the runs. After one that goes wrong, no worker is kept."""
        args = self.args
        async with Client(self.cluster.address, asynchronous=True, timeout=60) as self.client:
            for number in numbers:
                plan = Plan.of(args.seed, number)
                await self.complete()
                start = time.monotonic()
                verdict, why, outcome = await self.once(plan)
                seconds = time.monotonic() - start
                details = {
                    "run": number,
                    "fault": plan.fault,
                    "why": why,
                    "error": repr(outcome.error) if outcome.error else None,
                    "contributors": outcome.contributors,
                    "touched": sorted(outcome.touched),
                }
                self.journal.judge(plan.collective, verdict, outcome.seconds, **details)
                console.print(
                    f"{number:4} {plan.collective}, {plan.fault or 'undisturbed'}: {verdict} "
                    f"{why} {outcome.seconds:.1f} s ({seconds:.1f} s)",
                    soft_wrap=True,
                )
                if verdict == "hang":
                    self.journal.note("state", **await self.state())
                left = await self.emptied()
                if left:
                    self.journal.judge("left behind", "leak", run=number, **left)
                    self.journal.note("state", **await self.state())
                    console.print(f"     left behind: {str(left)[:300]}", soft_wrap=True)
                if verdict == "hang" or left:
                    for member in self.members:
                        if member is not None:
                            member.process.kill()
                            member.process.wait()

    # Workers

    async def complete(self) -> None:
        """See that there is a running worker in each place."""
        deadline = time.monotonic() + 90
        while True:
            known = await self.client.run_on_scheduler(addresses)
            for place, member in enumerate(self.members):
                if member is not None:
                    gone = member.address and member.address not in known.values()
                    member.address = known.get(member.name, "")
                    if gone or member.process.poll() is not None:
                        with suppress(ProcessLookupError):
                            member.process.kill()
                        member.process.wait()
                        if member.address:
                            continue  # until Dask knows it, too
                        member = None
                if member is None:
                    # Those in the first two places are neighbours.
                    host, self.joined = f"127.0.0.{max(place, 1)}", self.joined + 1
                    self.members[place] = self.cluster.join(
                        f"w{self.joined}", host, "alone slow", nanny=False
                    )
            there = [member.address for member in self.members if member is not None]
            if all(there) and set(known.values()) == set(there):
                with suppress(OSError):  # somebody has just left
                    await self.client.run(hasten)
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"workers do not come: {known}, {self.members}")
            await asyncio.sleep(0.1)

    def address(self, place: int) -> str:
        """Of the worker in a place."""
        member = self.members[place]
        assert member is not None
        return member.address

    def place(self, address: str) -> int | None:
        """Where a worker is."""
        found = (place for place in range(WORKERS) if self.address(place) == address)
        return next(found, None)

    def signal(self, place: int, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        member = self.members[place]
        assert member is not None
        self.cluster.signal(member, number)

    # One run

    async def once(self, plan: Plan) -> tuple[str, str, Outcome]:
        """Let it happen; judge it."""
        outcome = Outcome()
        futures: list[Future] = []
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.args.deadline):
                await self.attempt(plan, outcome, futures)
        except TimeoutError as error:
            if time.monotonic() - start >= self.args.deadline:
                return "hang", "", outcome
            outcome.error = error
        except Exception as error:
            outcome.error = error
        finally:
            if outcome.error is not None:  # its frames have futures
                outcome.error = outcome.error.with_traceback(None)
                outcome.error.__context__ = outcome.error.__cause__ = None
            outcome.seconds = time.monotonic() - start
            if plan.fault is None:
                self.usual[plan.collective] = outcome.seconds
            await self.undo(outcome)
            for future in futures:
                future.release()
        return *judge(plan, outcome), outcome

    async def attempt(self, plan: Plan, outcome: Outcome, futures: list[Future]) -> None:
        """Ask for a collective, let something happen to it, and look at the result."""
        operands = await self.operands(plan)
        futures += operands
        self.doing = asyncio.create_task(self.happen(plan, outcome))
        result = await self.ask(plan, operands)
        results = result if isinstance(result, list) else [result]
        futures += results
        del result
        await wait(results)
        where = {future.key: index for index, future in enumerate(operands)}
        if plan.collective == "allgather":
            outcome.contributors = list(range(OPERANDS))
            outcome.found = await self.client.submit(contents_of_each, results[0], pure=False)
        else:
            told = [await hoplite.contributors(each, client=self.client) for each in results]
            outcome.contributors = [where[future.key] for future in told[0]]
            for each in told:
                if [where[future.key] for future in each] != outcome.contributors:
                    raise AssertionError(f"blocks of different operands: {told}")
            del told
            outcome.found = await self.look(plan, results)
        if plan.collective.startswith(("allreduce", "allgather")):
            await self.look_at_copies(plan, outcome, results[0])
        await self.doing  # what happens late happens to the result

    async def operands(self, plan: Plan) -> list[Future]:
        """Have the operands made, or scatter them. Those that are not late are there then."""
        found, awaited = [], []
        for index, place in enumerate(plan.where):
            address = self.address(place)
            odd = index == plan.odd
            if plan.fault == "never comes" and not plan.raises and odd:
                future = self.client.submit(time.sleep, 0, workers=["tcp://127.0.0.1:1"])
            elif index in plan.scattered:
                value = operand(index, plan.length, plan.dtype)
                future = await self.client.scatter(value, workers=[address], hash=False)
            else:
                future = self.client.submit(
                    operand,
                    index,
                    plan.length,
                    plan.dtype,
                    plan.delays.get(index, 0),
                    raises=plan.raises and odd,
                    workers=[address],
                    allow_other_workers=True,
                    pure=False,
                )
                if index not in plan.delays and not odd:
                    awaited.append(future)
            found.append(future)
        await wait(awaited)
        return found

    async def ask(self, plan: Plan, operands: list[Future]) -> Any:
        """Ask for the collective."""
        name = plan.collective
        common: dict[str, Any] = {"client": self.client}
        if name == "reduce-scatter":
            return await hoplite.reduce_scatter(operands, **common)
        if name == "allgather":
            return await hoplite.allgather(operands, **common)
        common["timeout"] = plan.timeout
        if plan.count < OPERANDS:
            common["num_objects"] = plan.count
        if name.startswith("allreduce"):
            return await hoplite.allreduce(operands, **common)
        if plan.root is not None:
            common["root"] = self.address(plan.root)
        return await hoplite.reduce(
            operands, plus if "whole" in name else "sum", ordered="order" in name, **common
        )

    async def look(self, plan: Plan, results: list[Future]) -> Any:
        """What is in a result, or in all blocks together."""
        parts, start = [], 0
        for each in results:
            dtype, length, mask = await self.client.submit(contents, each, start, pure=False)
            parts.append((dtype, mask))
            start += length
        if len(set(parts)) > 1:
            return parts
        return parts[0][0], start, parts[0][1]

    async def look_at_copies(self, plan: Plan, outcome: Outcome, result: Future) -> None:
        """What the workers have that are to have copies."""
        places = {plan.where[index] for index in outcome.contributors} - outcome.touched
        workers = [self.address(place) for place in places]
        found = await self.client.run(
            contents_of_copy, result.key, workers=workers, on_error="return"
        )
        outcome.copies = {place: found.get(self.address(place)) for place in places}

    # Faults

    async def happen(self, plan: Plan, outcome: Outcome) -> None:
        """Let the fault happen, to a worker of the right role if there is any."""
        if plan.fault in (None, "raises", "never comes"):
            return
        rng = plan.rng
        await asyncio.sleep(plan.moment * self.usual.get(plan.collective, 1.0))
        found = await self.client.run_on_scheduler(roles)
        places = {
            role: [p for address in workers if (p := self.place(address)) is not None]
            for role, workers in found.items()
        }
        everybody = sorted(set(plan.where))
        able: Collection[int] = places.get(ROLES.get(plan.fault, ""), [])
        if plan.fault == "kill before it contributes":
            able = [plan.where[plan.odd]]
        elif plan.fault == "freeze for good":
            able = [place for place in everybody if place not in places["root"]]
        able = list(able) or everybody
        victims = rng.sample(everybody, 2) if plan.fault == "kill two" else [rng.choice(able)]
        self.journal.note("fault", run=plan.number, fault=plan.fault, places=victims, roles=places)
        for place in victims:
            outcome.touched.add(place)
            await self.let(plan, outcome, place)

    async def let(self, plan: Plan, outcome: Outcome, place: int) -> None:
        fault = plan.fault or ""
        address = self.address(place)
        if fault.startswith("kill"):
            outcome.departed.add(place)
            self.signal(place, signal.SIGKILL)
        elif fault.startswith("freeze"):
            if "good" in fault or plan.seconds > 4:
                outcome.departed.add(place)  # it will have been removed
            self.signal(place, signal.SIGSTOP)
            if "back" in fault:
                await asyncio.sleep(plan.seconds)
                self.signal(place, signal.SIGCONT)
        elif fault == "retire":
            await self.client.retire_workers([address])
        elif fault == "pause":
            await self.client.run(set_paused, True, workers=[address])
            await asyncio.sleep(plan.seconds)
            await self.client.run(set_paused, False, workers=[address])

    async def undo(self, outcome: Outcome) -> None:
        """Let the fault come to its end."""
        doing, self.doing = self.doing, None
        if doing is not None:
            await asyncio.wait({doing}, timeout=30)
            if doing.done() and not doing.cancelled() and (error := doing.exception()):
                self.journal.judge("faults", "unexplained", error=repr(error))
            doing.cancel()
        for place in outcome.touched:
            self.signal(place, signal.SIGCONT)

    # What is left

    async def emptied(self) -> dict[str, Any]:
        """Wait until nothing is left; return what is left nevertheless."""
        deadline = time.monotonic() + self.args.settle
        while True:
            try:
                found = {
                    "scheduler": await self.client.run_on_scheduler(leftovers.of_scheduler),
                    **await self.client.run(leftovers.of_worker, on_error="return"),
                }
            except OSError:  # somebody has just left
                continue
            left = {
                process: {name: items for name, items in things.items() if items}
                for process, things in found.items()
                if isinstance(things, dict)
            }
            left = {process: things for process, things in left.items() if things}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)

    async def state(self) -> dict[str, Any]:
        """What everybody knows of something that goes wrong."""
        try:
            async with asyncio.timeout(15):
                return {
                    "scheduler": await self.client.run_on_scheduler(state_of),
                    "workers": await self.client.run(state_of_worker, on_error="return"),
                }
        except Exception as error:
            return {"error": repr(error)}


def addresses(dask_scheduler: Any) -> dict[str, str]:
    """The addresses of the workers by name."""
    return {str(ws.name): ws.address for ws in dask_scheduler.workers.values()}


console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def add_command(commands: Any) -> None:
    """Add the command to those of ``python -m benchmarks``."""
    parser = commands.add_parser("exactness", help="collectives under faults, on this machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of runs to be done again")
    parser.add_argument("--deadline", type=float, default=60, help="seconds for a run")
    parser.add_argument("--settle", type=float, default=30, help="seconds until nothing is left")
    parser.add_argument("--out", type=Path, default=Path("exactness-results"))
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> None:
    """Do the runs, print what came of them, and exit with 1 if anything was wrong."""
    name = f"exactness-{args.seed}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    journal = Journal(args.out / f"{name}.jsonl")
    logs = args.out.absolute() / f"{name}.logs"
    numbers = range(args.runs)
    if args.only:  # after the undisturbed ones, as it was
        numbers = [*range(len(COLLECTIVES)), *args.only]
    with Cluster(logs, SETTINGS) as cluster:
        log_to(logs / "client.log")
        asyncio.run(Exactness(args, cluster, journal).run(numbers))
    for problem in problems(logs):
        journal.judge("logs", "unexplained", **problem)
    console.print(journal.table())
    for failure in journal.failures:
        shown = {name: value for name, value in failure.items() if name != "text"}
        console.print(f"FAILED (seed {args.seed}) {shown}", soft_wrap=True)
    journal.note("end", failures=len(journal.failures))
    journal.close()
    if journal.failures:
        raise SystemExit(1)
