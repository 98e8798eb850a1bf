"""What the page in the dashboard costs the scheduler, and a picture of it.

The scheduler is a real one. Its directory hears what 200 workers of a simulated network tell of a
broadcast, in real time; some of them die or are slow on the way. A browser in another process has
the page open. Measured is the CPU time of the scheduler's process, with the page and without.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dask
import numpy as np
from distributed import Client, Scheduler, Worker
from distributed.utils import Deadline

import dask_hoplite as hoplite
from benchmarks.browser import browser, text, why_not
from benchmarks.cluster import ROOT
from dask_hoplite import Hoplite, simulate
from dask_hoplite.core.events import WorkerJoined
from dask_hoplite.simulate import KEY, Fault, Link, Simulation
from dask_hoplite.simulate import Worker as Simulated
from dask_hoplite.transfer import pull, pump

#: Of a simulated host's link, in bytes per second
BANDWIDTH = 1.25e9


class Directory:
    """The plugin's directory in place of a simulation's own, on the plugin's clock."""

    def __init__(self, plugin: Hoplite):
        self.plugin = plugin
        self.begin = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plugin.directory, name)

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take an event in at a simulated time."""
        return self.plugin.directory.handle(event, self.begin + now)


class Broadcast:
    """A simulated broadcast that takes its time, and of which a plugin hears.

    Parameters
    ----------
    plugin : Hoplite
        That of a scheduler without workers.
    workers : int
        How many receive.
    seconds : float
        How long it takes, about.
    """

    def __init__(self, plugin: Hoplite, workers: int, seconds: float):
        sim = Simulation(int(BANDWIDTH * seconds), 1e-3, 2**16)
        sim.directory = self.directory = Directory(plugin)  # type: ignore[assignment]
        plugin.holders = plugin.directory.holders = (  # type: ignore[method-assign]
            lambda key: [*sim.known] if key == KEY else []
        )
        names = [f"tcp://10.0.{i // 250}.{i % 250}:4000" for i in range(workers + 1)]
        for name in names:
            sim.links[name] = Link(BANDWIDTH, BANDWIDTH), Link(BANDWIDTH, BANDWIDTH)
            sim.workers[name] = Simulated(name, name)
        origin = sim.workers[names[0]]
        origin.state, origin.line = "whole", origin.line._replace(nbytes=sim.nbytes)
        sim.known[origin.name] = None
        sim.decide(WorkerJoined(origin.name, origin.host))
        for name in names[1:]:
            sim.at(0.0, sim.suffer, Fault(0.0, "join", name))
        for n, name in enumerate(names[10 :: max(workers // 12, 1)]):  # one every few seconds
            at = 3.0 + 8 * n
            sim.at(at, sim.suffer, Fault(at, "kill" if n % 2 else "slow", name))
        self.simulation = sim

    async def play(self) -> None:
        """Let it happen."""
        sim, begin = self.simulation, self.directory.begin
        with patch.object(simulate, "cycles", lambda directory: []):  # its own check is dear
            while sim.queue:
                await asyncio.sleep(max(begin + sim.queue[0][0] - time.monotonic(), 0.02))
                sim.run(time.monotonic() - begin)


def run(workers: int, seconds: float) -> dict[str, float]:
    """Measure what an open page costs.

    Parameters
    ----------
    workers : int
        How many are simulated.
    seconds : float
        For which each window lasts: one without the page, one with it, one without.

    Returns
    -------
    dict
        ``closed`` and ``open``: CPU of the scheduler's process, as a share of one core; ``page``:
        the difference; ``updates``: of the page per second.

    Raises
    ------
    ValueError
        If there is no browser.
    """
    if reason := why_not():
        raise ValueError(reason)
    key = "distributed.scheduler.dashboard.bokeh-application"
    brief = {"unused_session_lifetime_milliseconds": 500}  # what nobody looks at ends soon
    with dask.config.set({key: {**dask.config.get(key), **brief}}):
        return asyncio.run(_run(workers, seconds))


async def _run(workers: int, seconds: float) -> dict[str, float]:
    async with Scheduler(host="127.0.0.1", dashboard_address="127.0.0.1:0") as scheduler:
        plugin = Hoplite()
        scheduler.add_plugin(plugin)
        await plugin.start(scheduler)
        broadcast = Broadcast(plugin, workers, 4 * seconds + 30)
        playing = asyncio.create_task(broadcast.play())
        await asyncio.sleep(2)  # all have asked for a source
        try:
            before = await _share(seconds)
            async with _viewer(scheduler, seconds + 2) as viewer:
                opened = await _share(seconds)
                updates = float(await asyncio.to_thread(viewer.stdout.readline))
            await _unseen(scheduler)
            after = await _share(seconds)
        finally:
            playing.cancel()
    closed = (before + after) / 2
    return {"closed": closed, "open": opened, "page": opened - closed, "updates": updates}


async def _share(seconds: float) -> float:
    """How much of a core this process takes for some time."""
    begin, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - begin)


@contextlib.asynccontextmanager
async def _viewer(scheduler: Scheduler, seconds: float) -> AsyncIterator[Any]:
    """A process that looks at the page, from when that is there."""
    url = f"http://127.0.0.1:{scheduler.http_server.port}/hoplite"
    argv = [sys.executable, "-m", "benchmarks.dashboard", url, str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(argv, **pipes, text=True, cwd=ROOT)  # type: ignore[call-overload]
    try:
        await asyncio.to_thread(process.stdout.readline)
        yield process
    finally:
        await asyncio.to_thread(process.communicate)


async def _unseen(scheduler: Scheduler) -> None:
    """Wait until Bokeh has ended the documents that nobody looks at any more."""
    pages = scheduler.http_application.applications[0]
    deadline = Deadline.after(60)
    while pages.get_sessions("/hoplite"):
        if deadline.expired:
            raise TimeoutError("Bokeh keeps a document that nobody looks at")
        await asyncio.sleep(0.1)


def summary(driver: Any) -> str:
    """The first line of the page that a browser shows; empty if it is not there yet."""
    return next((line for line in text(driver).splitlines() if " moving · " in line), "")


def look(url: str, seconds: float) -> None:
    """Print a line when the page is there, and then how often it changed per second."""
    with browser() as driver:
        driver.get(url)
        while not summary(driver):
            time.sleep(0.05)
        print("there", flush=True)
        seen, times = [""], []
        deadline = Deadline.after(seconds)
        while not deadline.expired:
            if (line := summary(driver)) != seen[-1]:
                seen.append(line)
                times.append(time.monotonic())
            time.sleep(0.05)
        print((len(times) - 1) / (times[-1] - times[0]), flush=True)
        sys.stdin.read()  # until nobody cares any more


@contextlib.contextmanager
def slow_links(pause: float, piece: int = 2**16) -> Iterator[SimpleNamespace]:
    """Let transfers within this process take long, by a pause for each piece of them.

    Yields
    ------
    SimpleNamespace
        Its ``pause``, in seconds, may be changed.
    """
    step = pump.Move.step
    pace = SimpleNamespace(pause=pause)

    def slowly(self: pump.Move, events: int) -> int:
        time.sleep(pace.pause)
        return step(self, events)

    with (
        patch.object(pump.Move, "step", slowly),
        patch.object(pump, "PIECE", piece),
        patch.object(pull, "affinity", lambda: ""),  # no shared memory
    ):
        yield pace


def photograph(path: Path) -> None:
    """Save a picture of the page while a broadcast and a reduction run and a worker leaves."""
    if reason := why_not():
        raise ValueError(reason)
    asyncio.run(_photograph(path))


async def _photograph(path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(dask.config.set({"hoplite.stall-timeout": "2s"}))
        scheduler = await stack.enter_async_context(
            Scheduler(host="127.0.0.1", dashboard_address="127.0.0.1:0")
        )
        workers = []
        for i in range(8):
            where = {"name": f"worker-{i}", "host": f"127.0.0.{10 + i}"}  # as if on several hosts
            worker = Worker(scheduler.address, nthreads=1, **where)
            workers.append(await stack.enter_async_context(worker))
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
        await client.register_plugin(Hoplite())
        model = client.submit(np.ones, 4_000_000, key="model", workers=["worker-0"])
        gradients = [
            client.submit(np.ones, 1_000_000, key=f"gradient-{i}", workers=[f"worker-{i}"])
            for i in range(7)
        ]
        await asyncio.gather(model, *gradients)
        driver = await asyncio.to_thread(stack.enter_context, browser(1160, 1110))
        url = f"http://127.0.0.1:{scheduler.http_server.port}/hoplite"
        await asyncio.to_thread(driver.get, url)
        pace = stack.enter_context(slow_links(0.0015))
        spreading = asyncio.create_task(hoplite.broadcast(model))
        await asyncio.sleep(3)
        await workers.pop().close()  # those that it feeds go on with others
        total = await hoplite.reduce(gradients)
        await asyncio.sleep(5)
        await asyncio.to_thread(driver.save_screenshot, str(path))
        pace.pause = 0
        await spreading
        await total


if __name__ == "__main__":
    look(sys.argv[1], float(sys.argv[2]))
