"""What clients do while things happen, and what may come of it.

The value that was asked for must arrive, unless a fault explains why not. What a fault explains:

=====================  ========================================  ==================================
object                 what may happen                           if
=====================  ========================================  ==================================
made by a task         nothing: it is computed again
scattered              ``CancelledError``, ``TransferError``     as many workers left since the
                       of its key; or Dask calls it lost         beginning as had copies
released by the load   ``CancelledError``, ``TransferError``     always, for that call
smaller than           also ``OSError``, and ``KeyError`` of     a worker left (this is Dask's own
``min-size``           the worker                                path, which looks it up in vain)
for a named worker     ``ValueError`` with its name              it left
=====================  ========================================  ==================================

``CancelledError`` is Dask's, with its subclasses.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any

from distributed import Client, Future, worker_client

import dask_hoplite as hoplite
from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.values import digest, make, same
from dask_hoplite.exceptions import TransferError

MIN_SIZE = 2**19  #: Dask's own path is taken below

#: Operations that only a client with Hoplite can do
HOPLITES = ("broadcast value", "broadcast future", "release midway")

#: Seconds that Dask may take to bring back what it calls lost
GRACE = 5


class WrongValue(Exception):
    """A value that is not what it should be has arrived."""


class Operation:
    """Something that a client does, with its futures."""

    def __init__(self, kind: str, tag: str, nbytes: int, client: Client):
        self.kind = kind
        self.tag = tag
        self.nbytes = nbytes
        self.client = client
        self.rng = random.Random(tag)
        self.since = time.monotonic()
        self.futures: list[Future] = []
        #: How many workers have to leave for an object to be lost. None: it can be computed again.
        self.copies: int | None = None

    def hold(self, future: Any) -> Any:
        """Keep a future until the end."""
        self.futures.extend(future if isinstance(future, list) else [future])
        return future

    def release(self) -> None:
        """Let go of all futures."""
        for future in self.futures:
            future.release()
        self.futures.clear()

    @property
    def lost(self) -> list[str]:
        """Keys that Dask calls lost."""
        return [str(f.key) for f in self.futures if f.status == "lost"]

    def check(self, value: Any, tag: str | None = None, nbytes: int | None = None) -> None:
        """Compare a value with what it should be."""
        if not same(value, make(tag or self.tag, self.nbytes if nbytes is None else nbytes)):
            raise WrongValue(f"{tag or self.tag}: {digest(value)}")

    def check_digest(self, found: str) -> None:
        """Compare a checksum with what it should be."""
        if found != (right := digest(make(self.tag, self.nbytes))):
            raise WrongValue(f"{self.tag}: {found}, not {right}")


def in_task(value: Any) -> str:
    """Scatter and gather inside a task."""
    with worker_client() as client:
        [future] = client.scatter([value])
        return digest(client.gather(future))


class Load:
    """Several activities at a time.

    Parameters
    ----------
    cluster, journal
        Where it happens, and is written down.
    clients : dict of str to Client
        One that has Hoplite ("hoplite"), one that besides is to reach only the scheduler
        ("relayed"), and one that has it not ("plain").
    seed : int
        What is done follows from it.
    deadline : float
        Seconds after which an operation hangs.
    """

    def __init__(
        self,
        cluster: Cluster,
        journal: Journal,
        clients: dict[str, Client],
        seed: int,
        deadline: float = 60,
    ):
        self.cluster = cluster
        self.journal = journal
        self.clients = clients
        self.seed = seed
        self.deadline = deadline
        self.over = False
        self.diagnose: Callable[[Operation], Awaitable[Any]] | None = None
        self.kinds: dict[str, tuple[float, Callable[[Operation], Awaitable[None]]]] = {
            "broadcast value": (3, self.broadcast_value),
            "broadcast future": (3, self.broadcast_future),
            "scatter broadcast": (3, self.scatter_broadcast),
            "scatter": (2, self.scatter),
            "replicate": (2, self.replicate),
            "tasks": (4, self.tasks),
            "gather": (3, self.gather),
            "release midway": (4, self.release_midway),
            "inside task": (1, self.inside_task),
        }

    async def activity(self, name: str) -> None:
        """Do one thing after the other."""
        rng = random.Random(f"{self.seed}/{name}")
        weights = [weight for weight, _ in self.kinds.values()]
        count = 0
        while not self.over:
            [kind] = rng.choices(list(self.kinds), weights)
            which = rng.choices(list(self.clients), [5, 2, 3])[0]
            client = self.clients["hoplite" if kind in HOPLITES else which]
            tag = f"{self.seed}/{name}/{count}"
            await self.perform(Operation(kind, tag, _size(rng), client))
            count += 1
            await asyncio.sleep(rng.uniform(0, 0.3))

    async def perform(
        self, op: Operation, method: Callable[[Operation], Awaitable[None]] | None = None
    ) -> None:
        """Do one thing, and judge what came of it."""
        [who] = [name for name, client in self.clients.items() if client is op.client]
        self.journal.note("begin", kind=op.kind, tag=op.tag, nbytes=op.nbytes, client=who)
        doing = asyncio.ensure_future((method or self.kinds[op.kind][1])(op))
        lost_for = 0.0
        while True:
            await asyncio.wait({doing}, timeout=0.5)
            seconds = time.monotonic() - op.since
            lost_for = lost_for + 0.5 if op.lost else 0.0
            if doing.done():
                verdict, details = self.verdict(op, _error(doing))
            elif seconds > self.deadline:
                verdict, details = "hang", {}
                if self.diagnose is not None:
                    details["state"] = await self.diagnose(op)
            elif lost_for > GRACE and self.may_be_lost(op):
                verdict, details = "justified", {"error": f"lost: {op.lost}"}
            else:
                continue
            break
        details |= {"nbytes": op.nbytes, "client": who}
        self.journal.judge(op.kind, verdict, seconds, tag=op.tag, **details)
        doing.cancel()
        await asyncio.wait({doing}, timeout=10)
        op.release()

    # Judgement

    def verdict(self, op: Operation, error: BaseException | None) -> tuple[str, dict[str, Any]]:
        """What to think of the end of an operation."""
        if error is None:
            return "right", {}
        details: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:1000]}
        if isinstance(error, WrongValue):
            return "wrong", details
        if self.excused(op, error):
            return "justified", details
        details["traceback"] = "".join(traceback.format_exception(error))[-4000:]
        return "unexplained", details

    def excused(self, op: Operation, error: BaseException) -> bool:
        """Whether faults explain an error, and it names what it is about."""
        departed = self.cluster.departed
        if isinstance(error, TransferError | CancelledError):
            return _names(error, op) and self.may_be_lost(op)
        if isinstance(error, OSError):
            return op.nbytes < MIN_SIZE and departed(op.since) > 0
        if isinstance(error, ValueError) or (isinstance(error, KeyError) and op.nbytes < MIN_SIZE):
            gone = {who for _, who, _ in self.cluster.departures if who}
            return any(who in str(error) for who in gone)
        return False

    def may_be_lost(self, op: Operation) -> bool:
        """Whether enough workers have left since the beginning."""
        return op.copies is not None and self.cluster.departed(op.since) >= max(op.copies, 1)

    # Operations

    async def broadcast_value(self, op: Operation) -> None:
        """``hoplite.broadcast`` of a value."""
        op.copies = 1
        value = make(op.tag, op.nbytes)
        future = op.hold(await hoplite.broadcast(value, client=op.client))
        op.copies = await self.count(op, future)
        await self.use(op, future)

    async def broadcast_future(self, op: Operation) -> None:
        """``hoplite.broadcast`` of a task's result; sometimes to some workers only."""
        future = op.hold(op.client.submit(make, op.tag, op.nbytes, pure=False))
        workers = None if op.rng.random() < 0.7 else self.pick(op, 2)
        assert await hoplite.broadcast(future, workers, client=op.client) is future
        await self.use(op, future)

    async def scatter_broadcast(self, op: Operation) -> None:
        """``client.scatter(broadcast=True)``."""
        op.copies = 1
        [future] = op.hold(await op.client.scatter([make(op.tag, op.nbytes)], broadcast=True))
        op.copies = await self.count(op, future)
        await self.use(op, future)

    async def scatter(self, op: Operation) -> None:
        """``client.scatter`` and ``hoplite.scatter`` of some values."""
        op.copies = 1
        tags = [f"{op.tag}/{i}" for i in range(op.rng.randint(1, 3))]
        values = [make(tag, op.nbytes) for tag in tags]
        if op.client is not self.clients["plain"] and op.rng.random() < 0.5:
            futures = await hoplite.scatter(values, client=op.client)
        else:
            futures = await op.client.scatter(values)
        del values
        op.hold(futures)
        for tag, value in zip(tags, await op.client.gather(futures), strict=True):
            op.check(value, tag)

    async def replicate(self, op: Operation) -> None:
        """``client.replicate`` of a task's result."""
        future = op.hold(op.client.submit(make, op.tag, op.nbytes, pure=False))
        await op.client.replicate(future, n=op.rng.choice([None, 2, 3]))
        await self.use(op, future)

    async def tasks(self, op: Operation) -> None:
        """Tasks on several workers need the same result."""
        future = op.hold(op.client.submit(make, op.tag, op.nbytes, pure=False))
        await self.use_in_tasks(op, future, 6)

    async def gather(self, op: Operation) -> None:
        """``client.gather`` and ``hoplite.gather`` of several results."""
        tags = [f"{op.tag}/{i}" for i in range(op.rng.randint(2, 4))]
        futures = op.hold([op.client.submit(make, t, op.nbytes, pure=False) for t in tags])
        if op.client is not self.clients["plain"] and op.rng.random() < 0.5:
            [found] = await hoplite.gather([{"values": futures}], client=op.client)
            values = found["values"]
        else:
            values = await op.client.gather(futures)
        for tag, value in zip(tags, values, strict=True):
            op.check(value, tag)

    async def release_midway(self, op: Operation) -> None:
        """Let go in the middle of a broadcast; then scatter the same again, which has to work."""
        op.copies = 1
        client = op.client
        value = make(op.tag, op.nbytes)
        how = op.rng.choice(["task", "scattered", "call"])
        if how == "task":
            future = client.submit(make, op.tag, op.nbytes, pure=False)
        elif how == "scattered":
            [future] = await client.scatter([value])
        else:
            future = None
        copying = asyncio.ensure_future(
            hoplite.broadcast(value if future is None else future, client=client)
        )
        await asyncio.wait({copying}, timeout=op.rng.uniform(0, 0.4))
        if future is not None:
            future.release()
        else:
            copying.cancel()
        del future
        try:
            [again] = op.hold(await client.scatter([value], broadcast=op.rng.random() < 0.5))
            await self.use(op, again)
        finally:
            await asyncio.wait({copying})
            error = _error(copying)
        if not isinstance(error, TransferError | CancelledError | asyncio.CancelledError | None):
            raise error

    async def inside_task(self, op: Operation) -> None:
        """A task that scatters and gathers itself."""
        op.copies = 1
        future = op.hold(op.client.submit(make, op.tag, op.nbytes, pure=False))
        op.check_digest(await op.hold(op.client.submit(in_task, future, pure=False)))

    # What they have in common

    async def use(self, op: Operation, future: Future) -> None:
        """Look at a value, on workers or here or both."""
        how = op.rng.choice(["tasks", "here", "both"])
        if how != "here":
            await self.use_in_tasks(op, future, 3)
        if how != "tasks":
            op.check(await op.client.gather(future))

    async def use_in_tasks(self, op: Operation, future: Future, count: int) -> None:
        """Let tasks on several workers look at a value."""
        sums = [
            op.client.submit(digest, future, workers=[w], allow_other_workers=True, pure=False)
            for w in self.pick(op, count)
        ]
        for found in await op.client.gather(op.hold(sums)):
            op.check_digest(found)

    async def count(self, op: Operation, future: Future) -> int:
        """How many workers hold an object."""
        found = await op.client.who_has([future])
        return max(len(next(iter(found.values()), ())), 1)

    def pick(self, op: Operation, count: int) -> list[str]:
        """Addresses of some workers."""
        there = [member.address for member in self.cluster.present()]
        return op.rng.sample(there, min(count, len(there)))


def _size(rng: random.Random) -> int:
    low, high = rng.choices([(0, 19), (19, 23), (23, 25), (25, 26)], [15, 60, 20, 5])[0]
    return int(2 ** rng.uniform(low, high))


def _error(done: asyncio.Future[Any]) -> BaseException | None:
    return asyncio.CancelledError() if done.cancelled() else done.exception()


def _names(error: BaseException, op: Operation) -> bool:
    """Whether an error says which object it is about."""
    if getattr(error, "key", None) is not None:
        return True
    return any(str(future.key) in str(error) for future in op.futures)
