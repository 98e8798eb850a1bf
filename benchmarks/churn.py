"""The same data again and again: scattered, used, dropped, without a pause, by one client or two.

A release goes by another way than the next scatter, and Dask names data by their content: in plain
Dask, what is late ends what is new. Each case is a round that is repeated; a round fails if it
raises, hangs, or gives a wrong value.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from distributed import Client

from benchmarks.cluster import Cluster

#: After so many rounds without an end, a case is given up.
HANGS = 3


@dataclass
class Churn:
    """Clients, and the array that they go on scattering."""

    clients: list[Client]
    array: np.ndarray
    timeout: float
    errors: Counter[str] = field(default_factory=Counter)

    async def use(self, client: Client, future: Any) -> None:
        """Look at it in a task."""
        total = await client.submit(np.sum, future, pure=False)
        if total != self.array.sum():
            raise ValueError("wrong value")

    async def again(self, client: Client, broadcast: bool = True) -> None:
        """Scatter, use, drop."""
        [x] = await client.scatter([self.array], broadcast=broadcast)
        await self.use(client, x)

    async def to_one(self, n: int) -> None:
        """Scatter to any worker, use, drop."""
        await self.again(self.clients[0], broadcast=False)

    async def to_all(self, n: int) -> None:
        """Scatter to all workers, use, drop."""
        await self.again(self.clients[0])

    async def two_clients(self, n: int) -> None:
        """One scatters while the other drops: the second is half a round behind."""
        one, other = self.clients
        [x] = await one.scatter([self.array], broadcast=True)
        second = asyncio.create_task(self.again(other))
        try:
            await self.use(one, x)
            del x
            await self.again(one)
        finally:
            await second

    async def dropped_midway(self, n: int) -> None:
        """Drop it while it is copied, and scatter it again at once."""
        client = self.clients[0]
        [x] = await client.scatter([self.array])
        copying = asyncio.create_task(client.replicate(x))
        await asyncio.wait({copying}, timeout=random.Random(n).uniform(0, 0.02))
        x.release()
        await self.again(client)
        await asyncio.wait({copying})
        copying.exception()  # it may say that the data have gone

    async def cancelled_midway(self, n: int) -> None:
        """Cancel the scatter itself, and scatter it again at once."""
        client = self.clients[0]
        scattering = asyncio.create_task(client.scatter([self.array], broadcast=True))
        await asyncio.wait({scattering}, timeout=random.Random(n).uniform(0, 0.02))
        scattering.cancel()
        await self.again(client)
        await asyncio.wait({scattering})

    async def published(self, n: int) -> None:
        """One publishes it, drops it and takes its name away; another one uses it meanwhile."""
        owner, user = self.clients
        [x] = await owner.scatter([self.array], broadcast=True)
        await owner.publish_dataset(x, name=f"dataset-{n}")
        x.release()
        found = await user.get_dataset(f"dataset-{n}")
        await user.submit(int, pure=False)  # by now the scheduler knows that this one wants it
        using = asyncio.create_task(self.use(user, found))
        del found
        await owner.unpublish_dataset(f"dataset-{n}")
        await self.again(owner)
        await using

    async def rounds(self, case: str, rounds: int) -> int:
        """Repeat a round; return how many there were. Those that fail are in ``errors``."""
        for n in range(rounds):
            if self.errors["TimeoutError"] == HANGS:
                return n
            try:
                async with asyncio.timeout(self.timeout):
                    await CASES[case](self, n)
            except Exception as error:
                self.errors[type(error).__name__] += 1
        return rounds


#: What happens in a round, by name.
CASES: dict[str, Callable[[Churn, int], Awaitable[None]]] = {
    "scatter, use, drop": Churn.to_one,
    "scatter to all, use, drop": Churn.to_all,
    "two clients in antiphase": Churn.two_clients,
    "dropped while it is copied, and again": Churn.dropped_midway,
    "cancelled while it is scattered, and again": Churn.cancelled_midway,
    "published, used by another, unpublished": Churn.published,
}


def run(
    clusters: list[Cluster], rounds: int, sizes: list[int], timeout: float
) -> Iterator[dict[str, Any]]:
    """Go through the cases with each system, and yield a record for each."""
    for nbytes in sizes:
        for case in CASES:
            for cluster in clusters:
                record = asyncio.run(once(cluster, case, rounds, nbytes, timeout))
                yield record
                if record["left"]:
                    cluster.restart()


async def once(
    cluster: Cluster, case: str, rounds: int, nbytes: int, timeout: float
) -> dict[str, Any]:
    """One case with one system, by new clients."""
    array = np.random.default_rng(0).integers(0, 256, nbytes, dtype="u1")
    async with (
        Client(cluster.scheduler, asynchronous=True, timeout=60) as one,
        Client(cluster.scheduler, asynchronous=True, timeout=60, set_as_default=False) as other,
    ):
        await one.wait_for_workers(cluster.workers, timeout=60)
        if cluster.system == "hoplite":
            from dask_hoplite import Hoplite

            for client in (one, other):
                await client.register_plugin(Hoplite())
        churn = Churn([one, other], array, timeout)
        start = time.perf_counter()
        done = await churn.rounds(case, rounds)
        seconds = time.perf_counter() - start
        left = await emptied(one)
    return {
        "system": cluster.system,
        "case": case,
        "nbytes": nbytes,
        "rounds": done,
        "errors": dict(churn.errors),
        "seconds": seconds,
        "left": left,
    }


async def emptied(client: Client, timeout: float = 10) -> int:
    """Wait until nothing is left; return how many keys are left nevertheless."""
    deadline = time.monotonic() + timeout
    while True:
        tasks = await client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        stored = await client.run(lambda dask_worker: len(dask_worker.data))
        left = max(tasks, *stored.values())
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)
