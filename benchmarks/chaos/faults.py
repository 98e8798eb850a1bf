"""What happens to workers and clients."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from contextlib import suppress

import numpy as np
from distributed import Client

import dask_hoplite as hoplite
from benchmarks.chaos.cluster import Cluster, Member
from benchmarks.chaos.journal import Journal

#: How often each happens, of all
FAULTS = {
    "kill": 3,
    "freeze": 5,
    "freeze and kill": 1,
    "retire": 2,
    "join": 2,
    "client killed": 1,
    "client vanishes": 2,
}

#: So many workers are always left alone, and there are never more than so many more than meant.
SPARED, SURPLUS = 2, 2

VANISHING = "from benchmarks.chaos.faults import vanishing; vanishing()"


class Faults:
    """Lets things happen.

    Parameters
    ----------
    cluster, journal
        To what they happen, and where it is written down.
    client : Client
        One to retire workers with.
    seed : int
        What happens follows from it.
    workers : int
        How many there are to be.
    """

    def __init__(self, cluster: Cluster, journal: Journal, client: Client, seed: int, workers: int):
        self.cluster = cluster
        self.journal = journal
        self.client = client
        self.seed = seed
        self.workers = workers
        self.rng = random.Random(f"{seed}/faults")
        self.joined = 0
        self.over = False
        self.running: set[asyncio.Task[None]] = set()

    async def happen(self) -> None:
        """Let one thing happen after the other; several may go on at a time."""
        while not self.over:
            await asyncio.sleep(self.rng.uniform(0.3, 4))
            [fault] = self.rng.choices(list(FAULTS), list(FAULTS.values()))
            which, length = self.rng.random(), self.rng.uniform(0.5, 6)
            if not self.over:
                task = asyncio.create_task(self.let(fault, which, length))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
                while len(self.cluster.members) < self.workers:
                    self.join()

    async def settled(self) -> None:
        """Let what goes on come to its end."""
        if self.running:
            await asyncio.wait(self.running)

    def join(self) -> None:
        """Start a worker: of another host or of one that has workers; slow or not; with a nanny."""
        rng = random.Random(f"{self.seed}/worker/{self.joined}")
        how = " ".join(word for word in ("alone", "slow") if rng.random() < 0.5)
        member = self.cluster.join(
            f"w{self.joined}", f"127.0.0.{rng.randint(1, 4)}", how, nanny=rng.random() < 0.3
        )
        self.joined += 1
        self.journal.note("join", who=member.name, how=how, nanny=member.nanny)

    async def let(self, fault: str, which: float, length: float) -> None:
        """Let one thing happen."""
        if fault == "join":
            if len(self.cluster.members) < self.workers + SURPLUS:
                self.join()
            return
        if fault.startswith("client"):
            await (self.kill_client if fault == "client killed" else self.vanish)(length)
            return
        candidates = [member for member in self.cluster.present() if not member.busy]
        if len(candidates) <= SPARED:
            return
        member = candidates[int(which * len(candidates))]
        member.busy = True
        self.journal.note(fault, who=member.name, address=member.address, length=round(length, 2))
        try:
            if fault == "kill":
                self.cluster.kill(member)
            elif fault == "retire":
                await self.retire(member)
            else:
                self.cluster.signal(member, signal.SIGSTOP)
                await asyncio.sleep(length)
                if fault == "freeze":
                    self.cluster.signal(member, signal.SIGCONT)
                    self.journal.note("continue", who=member.name)
                else:
                    self.journal.note("kill", who=member.name)
                    self.cluster.kill(member, fault)
        finally:
            member.busy = False

    async def retire(self, member: Member) -> None:
        """Retire a worker, as a user does."""
        self.cluster.gone(member, "retire")
        start = time.monotonic()
        try:
            async with asyncio.timeout(120):
                await self.client.retire_workers([member.address])
        except TimeoutError:
            verdict, details = "hang", {}
        except Exception as error:
            verdict, details = "unexplained", {"error": repr(error)}
        else:
            verdict, details = "right", {}
        seconds = time.monotonic() - start
        self.journal.judge("retire", verdict, seconds, who=member.name, **details)
        self.cluster.gone(member, "retired")

    async def kill_client(self, length: float) -> None:
        """Kill a client's process in the middle of what it does."""
        self.journal.note("client killed", length=round(length, 2))
        command = [sys.executable, "-c", VANISHING, self.cluster.address]
        process = self.cluster.start(command, "vanishing")
        await asyncio.sleep(1.5 + length / 3)
        process.kill()
        await self.cluster.ended(process)

    async def vanish(self, length: float) -> None:
        """Break a client's connections in the middle of a broadcast."""
        self.journal.note("client vanishes", length=round(length, 2))
        async with asyncio.timeout(30):
            client = await Client(self.cluster.address, asynchronous=True, set_as_default=False)
        doing = asyncio.ensure_future(
            hoplite.broadcast(np.ones(2**23 + int(length * 2**21), "u1"), client=client)
        )
        await asyncio.wait({doing}, timeout=length / 20)
        client.scheduler_comm.abort()
        await client._close(fast=True)
        doing.cancel()
        await asyncio.wait({doing}, timeout=30)
        with suppress(BaseException):
            doing.result()


def vanishing() -> None:
    """Use a cluster until killed."""
    with Client(sys.argv[1]) as client:
        while True:
            shared = hoplite.broadcast(np.random.default_rng().bytes(2**24), client=client)
            used = [client.submit(len, shared, pure=False) for _ in range(4)]
            client.gather([shared, *used])
