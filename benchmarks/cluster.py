"""Clusters of plain and of Hoplite's Dask, as processes on emulated hosts or on this one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

#: Every process runs here, so that each can import what the others send it.
ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("plain", "hoplite")

#: As Dask's nannies set it: a worker's threads are enough.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

#: What Dask's processes do every so many milliseconds although there is nothing to do: sample their
#: stacks, measure the event loop's delay and the system. On a host it is a few percent of one
#: processor; of 18 processes that share two, it is a third of all there is.
CLOCKS = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "5s",
}

#: Of all processes, of either system; what the caller has set goes before it.
ENVIRONMENT = CLOCKS | os.environ | THREADS


class Place(Protocol):
    """Where a cluster can be: a `Laboratory` or a `Loopback`."""

    n: int

    def address(self, host: int | str) -> str:
        """The address of a host."""

    def popen(self, host: int | str, argv: list[str], **kwargs) -> subprocess.Popen:
        """Start a command on a host."""


class Loopback:
    """This machine as it is: all "hosts" are 127.0.0.1."""

    def __init__(self, hosts: int):
        self.n = hosts

    def address(self, host: int | str) -> str:
        """The address of a host."""
        return "127.0.0.1"

    def popen(self, host: int | str, argv: list[str], **kwargs) -> subprocess.Popen:
        """Start a command."""
        return subprocess.Popen(argv, start_new_session=True, **kwargs)


class ClientError(RuntimeError):
    """A client process has failed to do what it was asked for."""


class ClientTimeout(ClientError):
    """A client process has not answered in time."""


class Cluster:
    """A scheduler, its workers and any client processes, all gone at the end of the block.

    Parameters
    ----------
    place : Laboratory or Loopback
        Where it is.
    system : {"plain", "hoplite"}
        Whether the scheduler preloads Hoplite.
    logs : Path
        Folder for what the processes print.
    per_host, threads : int
        Workers on each host, and threads of each worker.
    memory : str
        Memory limit of each worker.
    """

    def __init__(
        self,
        place: Place,
        system: str,
        logs: Path,
        per_host: int = 1,
        threads: int = 1,
        memory: str = "4GiB",
    ):
        self.place = place
        self.system = system
        self.logs = logs
        self.per_host = per_host
        self.workers = place.n * per_host
        self.options = ["--nthreads", str(threads), "--memory-limit", memory]
        self._processes: list[subprocess.Popen] = []
        self._clients: dict[bool, ClientProcess] = {}

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the scheduler and the workers; who connects to it waits for it to be ready."""
        # Free on this machine is almost surely free on the scheduler's emulated host as well.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.scheduler = f"tcp://{self.place.address('scheduler')}:{port}"
        command = [*self._python("scheduler"), "--port", str(port)]
        if self.system == "hoplite":
            command += ["--preload", "dask_hoplite"]
        self._spawn("scheduler", command, "scheduler")
        for index in range(self.workers):
            self._start_worker(index)

    def _start_worker(self, index: int) -> subprocess.Popen:
        host = index // self.per_host
        command = [*self._python("worker", host), "--no-nanny", "--name", str(index)]
        return self._spawn(host, [*command, *self.options, self.scheduler], f"worker-{index}")

    def replace(self, index: int) -> None:
        """Start a worker in place of one that has ended, or is about to."""
        self.worker(index).wait(30)
        process = self._start_worker(index)
        self._processes.remove(process)
        self._processes[1 + index] = process

    def stop(self) -> None:
        """End all processes."""
        self.signal(signal.SIGCONT)
        for client in self._clients.values():
            client.stop()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._clients.clear()
        self._processes.clear()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        for process in self._processes:
            process.send_signal(number)

    def worker(self, index: int) -> subprocess.Popen:
        """The process of a worker."""
        return self._processes[1 + index]

    def restart(self) -> None:
        """Start again from nothing."""
        self.stop()
        self.start()

    def client(self, registers: bool = True) -> ClientProcess:
        """The process of a client, started when it is first asked for.

        Parameters
        ----------
        registers : bool
            Whether this client has registered Hoplite, if the cluster is Hoplite's.
        """
        registers = registers and self.system == "hoplite"
        if registers not in self._clients:
            argv = [sys.executable, "-m", "benchmarks.agent", self.scheduler, str(self.workers)]
            argv += ["--register"] * registers
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            name = "client" if registers or self.system == "plain" else "client-plain"
            process = self._spawn("client", argv, name, **pipes)
            self._clients[registers] = ClientProcess(process, self._log(name))
        return self._clients[registers]

    def _log(self, name: str) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{self.system}-{name}.log"

    def _python(self, role: str, host: int | str = "scheduler") -> list[str]:
        module = f"distributed.cli.dask_{role}"
        where = ["--host", self.place.address(host), "--no-dashboard"]
        return [sys.executable, "-m", module, *where]

    def _spawn(self, host: int | str, argv: list[str], name: str, **kwargs) -> subprocess.Popen:
        with self._log(name).open("ab") as log:
            kwargs = {"stdout": log, "stderr": log, "cwd": ROOT, "env": ENVIRONMENT, **kwargs}
            process = self.place.popen(host, argv, **kwargs)
        self._processes.append(process)
        return process


class ClientProcess:
    """A handle on a `benchmarks.agent` process."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self._process = process
        self._log = log
        self._answer(timeout=120)  # it is connected, and so are the workers

    def call(self, method: str, timeout: float = 120, **arguments):
        """Call a method of `benchmarks.agent.Agent` and return its value.

        Raises
        ------
        ClientTimeout
            If there is no answer in time. The process is of no use afterwards.
        ClientError
            If the method raised, or the process has ended.
        """
        request = json.dumps({"method": method, "arguments": arguments})
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer(timeout)

    def _answer(self, timeout: float):
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            raise ClientTimeout(f"no answer within {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["value"]

    def _ended(self) -> ClientError:
        said = self._log.read_text(errors="replace").splitlines() or ["it said nothing"]
        return ClientError(f"the client process has ended: {said[-1]}")

    def stop(self) -> None:
        """Let the client close; whoever started the process waits for its end."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
