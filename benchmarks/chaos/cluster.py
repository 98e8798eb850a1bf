"""A cluster of processes to which things happen."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import dask
import psutil

ROOT = Path(__file__).resolve().parents[2]

#: Dask alone would wait for minutes for a worker that is frozen; this makes it give up in time for
#: the deadlines of the operations. No task is ever blamed for the deaths of its workers.
SETTINGS = {
    "distributed.scheduler.worker-ttl": "20s",
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "12s",
}


@dataclass
class Member:
    """A worker's process, or its nanny's."""

    name: str
    process: subprocess.Popen
    nanny: bool
    address: str = ""  #: the worker's, while the scheduler knows it
    busy: bool = False  #: something is happening to it

    def worker(self) -> psutil.Process | None:
        """The worker's own process."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            if not self.nanny:
                return process
            for child in process.children():
                if any("spawn_main" in word for word in child.cmdline()):
                    return child
        return None


class Cluster:
    """A scheduler with Hoplite, and workers that come and go; all gone at the end of the block."""

    def __init__(self, logs: Path, settings: Mapping[str, object] | None = None):
        self.logs = logs
        self.config = {**SETTINGS, **(settings or {})}
        self.members: dict[str, Member] = {}
        self.others: list[subprocess.Popen] = []
        self.departures: list[tuple[float, str, str]] = []  #: when, who, how

    def __enter__(self) -> Cluster:
        self.logs.mkdir(parents=True, exist_ok=True)
        dask.config.set(self.config)
        settings = dask.config.serialize(dask.config.global_config)
        self.settings = {"DASK_INTERNAL_INHERIT_CONFIG": settings}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--preload", "dask_hoplite"]
        self.others.append(self.start(command, "scheduler"))
        return self

    def __exit__(self, *exc_info: object) -> None:
        processes = [member.process for member in self.members.values()] + self.others
        trees = [list(_family(process.pid)) for process in processes]
        for family in trees:
            for process in family:
                with suppress(psutil.Error):
                    process.kill()
        for process in processes:
            process.wait()

    def start(self, command: list[str], name: str, **environment: str) -> subprocess.Popen:
        """Start a process."""
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **self.settings, **environment},
            )

    def join(self, name: str, host: str, how: str, nanny: bool) -> Member:
        """Start a worker, on one of the addresses of this machine."""
        command = [sys.executable, "-m", "distributed.cli.dask_worker", self.address]
        command += ["--no-dashboard", "--host", host, "--name", name, "--nthreads", "2"]
        command += ["--memory-limit", "3GiB", "--nanny" if nanny else "--no-nanny"]
        command += ["--preload", "benchmarks.chaos.hindered", "--local-directory", str(self.logs)]
        process = self.start(command, f"worker-{name}", HOPLITE_CHAOS=how)
        member = self.members[name] = Member(name, process, nanny)
        return member

    def gone(self, member: Member, how: str) -> None:
        """Note that a worker leaves, or is about to."""
        self.departures.append((time.monotonic(), member.address, how))

    def kill(self, member: Member, how: str = "kill") -> None:
        """Kill a worker. If it has a nanny, that starts another one."""
        self.gone(member, how)
        self.signal(member, signal.SIGKILL)

    def signal(self, member: Member, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        if (worker := member.worker()) is not None:
            with suppress(psutil.Error):
                worker.send_signal(number)

    def departed(self, since: float) -> int:
        """How many workers, or lives of one, have left since a moment."""
        return len({who for t, who, _ in self.departures if t >= since})

    def update(self, addresses: dict[str, str]) -> None:
        """Take in what the scheduler knows: the address of each worker by name."""
        for name, member in list(self.members.items()):
            member.address = addresses.get(name, "")
            if member.process.poll() is not None and not member.address:
                del self.members[name]

    def present(self) -> list[Member]:
        """Workers that are there, in the order of their names."""
        return [m for _, m in sorted(self.members.items()) if m.address]

    async def ended(self, process: subprocess.Popen, timeout: float = 10) -> None:
        """Wait for the end of a process without blocking."""
        deadline = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


def _family(pid: int) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)
