"""A cluster that both systems use in turns: Hoplite is installed and uninstalled for each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from dask.utils import format_bytes
from distributed import Client, Scheduler, Worker

import dask_hoplite
from dask_hoplite import Hoplite, NotInstalledError
from dask_hoplite.bench import link, turns
from dask_hoplite.bench.operations import OPS, Runner
from dask_hoplite.bench.turns import Record
from dask_hoplite.bench.workloads import workers_of
from dask_hoplite.client import extension
from dask_hoplite.scheduler import NAME

#: Seconds within which all of the cluster has to answer, and Hoplite to be installed.
PATIENCE = 60.0

#: Bytes that are moved after Hoplite was installed, or uninstalled, and before anything is timed.
WARM_UP = 2**22

#: Of a worker's memory limit, what an operation may need.
SHARE = 0.6

#: Operations in which a worker gets an array from each one.
ALL_ON_ONE = ("gather-task", "allgather")

#: Operations that move bytes over the client's link, which is not measured.
BY_CLIENT = ("scatter", "gather-client")


class BenchError(Exception):
    """Something that keeps a cluster from being measured, in a sentence."""


class Overdue(Exception):
    """An operation has not come to its end in time."""


class Side:
    """A system on a cluster that is shared."""

    def __init__(self, system: str):
        self.system = system


class SharedCluster:
    """A cluster on which plain Dask and Hoplite take turns.

    Use it as a context manager: afterwards, Hoplite is installed if it was so before.

    Parameters
    ----------
    connect : callable
        Makes a client.
    timeout : float
        Seconds after which an operation is given up.
    alone : bool
        Whether to refuse if others use the cluster.

    Raises
    ------
    BenchError
        On entering it, if it is not to be measured.
    """

    def __init__(self, connect: Callable[[], Client], timeout: float, alone: bool = True):
        self.connect = connect
        self.timeout = timeout
        self.alone = alone
        self.limit: Callable[[str, int], float | None] = lambda op, nbytes: None
        self.found: dict[str, Any] | None = None
        self.present = ""  #: the system that was measured last, unless it failed

    def __enter__(self) -> SharedCluster:
        with ExitStack() as stack:
            self.client = self.connect()
            stack.callback(self.close)
            with self._answering():
                self._check_versions()
                self.found = self.client.run_on_scheduler(look, self.client.id)
            if self.alone:
                self._check_alone(self.found)
            self.workers = workers_of(self.client)
            if len(self.workers) < 2:
                raise BenchError(f"It takes two workers, and the cluster has {len(self.workers)}.")
            self.hosts = Counter(str(worker["host"]) for worker in self.workers.values())
            stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cluster as it was."""
        try:
            if self.found is None:
                return
            if self.client.status != "running":
                self.client = self.connect()
            before = "plain" if self.found["overrides"] is None else "hoplite"
            with deadline(self.client, PATIENCE):
                self.use(before)
        except (OSError, Overdue, NotInstalledError) as error:
            raise BenchError(f"The cluster could not be left as it was: {error}") from error
        finally:
            self.client.close()

    def use(self, system: str) -> bool:
        """Let the cluster have Hoplite, or not; return whether it has."""
        assert self.found is not None
        if system == "hoplite":
            self.client.register_plugin(Hoplite(**(self.found["overrides"] or {})))
            # Where it steps aside, plain Dask would be measured, and called Hoplite.
            try:
                self.client.sync(extension, self.client)
            except NotInstalledError:
                self.client.unregister_scheduler_plugin(NAME)  # what stands in for it
                raise
        elif self.client.run_on_scheduler(look, self.client.id)["overrides"] is not None:
            self.client.unregister_scheduler_plugin(NAME)
        return system == "hoplite"

    # Before

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Give up if a process of the cluster does not answer within the block."""
        try:
            with deadline(self.client, PATIENCE):
                yield
        except Overdue as error:
            raise BenchError(f"Not all of the cluster answers: {error}.") from error

    def _check_versions(self) -> None:
        """Whatever is sent to the cluster is found there, and is the same."""
        own = dask_hoplite.__version__
        found: Any = self.client.get_versions(packages=["dask_hoplite"])
        processes = {"the scheduler": found["scheduler"]}
        processes |= {f"worker {address}": told for address, told in found["workers"].items()}
        others = [
            f"{name} has {told['packages'].get('dask_hoplite') or 'none'}"
            for name, told in processes.items()
            if told is not None and told["packages"].get("dask_hoplite") != own
        ]
        if others:
            some = "; ".join(others[:3]) + (f"; and {len(others) - 3} more" * (len(others) > 3))
            raise BenchError(f"dask-hoplite {own} has to be installed everywhere, but {some}.")

    def _check_alone(self, found: dict[str, Any]) -> None:
        """Others would be disturbed, and their copies would lose Hoplite's protection."""
        others = [f"{found['clients']} other clients are connected"] * bool(found["clients"])
        others += [f"it has {found['tasks']} tasks or data"] * bool(found["tasks"])
        if others:
            raise BenchError(
                f"The cluster is in use: {' and '.join(others)}. Measuring loads all workers, "
                "installs and uninstalls Hoplite in turns, and forgets what copies it was to keep. "
                "To do it all the same: --yes"
            )

    def check_memory(self, ops: Collection[str], nbytes: int) -> None:
        """Raise a `BenchError` if a worker's memory limit is too low for an operation."""
        limits = [w["memory_limit"] for w in self.workers.values() if w["memory_limit"]]
        for op in ops if limits else ():
            # The operand, the sum or copy, and what arrives of them
            arrays = 2 * len(self.workers) if op in ALL_ON_ONE else 4
            if arrays * nbytes > SHARE * min(limits):
                raise BenchError(
                    f"{op} of {format_bytes(nbytes)} needs up to {format_bytes(arrays * nbytes)} "
                    f"on a worker, and the lowest memory limit is {format_bytes(min(limits))}: "
                    "see --sizes and --ops"
                )

    def measure_link(self) -> tuple[float | None, str]:
        """Measure a raw stream between two hosts, which gives the limit of operations.

        Returns
        -------
        goodput : float or None
            Bytes per second.
        about : str
            The same in words, or why there is none.
        """
        by_host = {str(worker["host"]): address for address, worker in self.workers.items()}
        if len(by_host) < 2:
            return None, "there is no link between them to be measured"
        sender, receiver, *_ = by_host.values()
        try:
            with self._answering():
                goodput = link.goodput(self.client, sender, receiver)
        except (OSError, ValueError) as error:
            return None, f"no raw stream from {sender} to {receiver}: {error}"
        about = f"a raw stream between two hosts carries {goodput * 8 / 1e6:.1f} Mbit/s"
        if len(set(self.hosts.values())) > 1:
            return goodput, f"{about}; no limits, as hosts have different numbers of workers"
        self.limit = partial(limit, len(self.workers), next(iter(self.hosts.values())), goodput)
        return goodput, about

    # Measuring

    def measure(self, side: Side, op: str, nbytes: int, later: float) -> Record:
        """Do an operation once. An error is noted, and what follows has a client of its own."""
        least = self.limit(op, nbytes)
        record: Record = {} if least is None else {"limit": least}
        try:
            with deadline(self.client, PATIENCE):
                runner = Runner(self.client, self.use(side.system))
                workers = self._addresses()
            once = partial(turns.once, partial(self._call, runner), timeout=self.timeout)
            if side.system != self.present:  # connections are new, and links' speed is not known
                once(op="tasks", nbytes=WARM_UP, later=0)
                self.present = side.system
            found = once(op=op, nbytes=nbytes, later=later)
            with deadline(self.client, PATIENCE):
                if self._addresses() != workers:  # copies lack, or are too many: no value is wrong
                    raise BenchError("workers have left or joined meanwhile")
            record |= found
        except (Exception, asyncio.CancelledError) as error:
            overdue = isinstance(error, Overdue)
            said = (str(error).splitlines() or [""])[0]
            record["error"] = said if overdue else f"{type(error).__name__}: {said}"
            record["timeout"] = self.timeout if overdue else None
            self.client.close()
            self.client = self.connect()
            self.present = ""
        return record

    def _addresses(self) -> set[str]:
        return set(workers_of(self.client))

    def _call(
        self, runner: Runner, method: str, timeout: float | None = None, **arguments: Any
    ) -> Any:
        with self.client.as_current(), deadline(self.client, timeout or self.timeout):
            if method == "release":
                keys = self.client.run_on_scheduler(keys_of, self.client.id)
                runner.release()
                return self._wait_until_gone(keys)
            return getattr(runner, method)(**arguments)

    def _wait_until_gone(self, keys: list[Any]) -> None:
        while self.client.run_on_scheduler(count_known, keys) or any(
            self.client.run(count_stored, keys).values()
        ):
            time.sleep(0.02)


def limit(workers: int, per_host: int, goodput: float, op: str, nbytes: int) -> float | None:
    """Seconds that an operation takes at least, latency aside; None if that is not known."""
    crossings = 0.0 if op in BY_CLIENT else OPS[op].crossings(workers, per_host)
    return crossings * nbytes / goodput or None


@contextmanager
def deadline(client: Client, seconds: float) -> Iterator[None]:
    """Close a client after some time, so that whatever waits for it within the block ends.

    Raises
    ------
    Overdue
        If that was so.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        with suppress(Exception):
            client.close()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if not expired.is_set():
            raise
        raise Overdue(f"no end within {seconds:g} s") from error
    finally:
        timer.cancel()
    if expired.is_set():
        raise Overdue(f"no end within {seconds:g} s")


# On the scheduler, and on workers


def look(client: str, dask_scheduler: Scheduler) -> dict[str, Any]:
    """Who uses a cluster besides a client, and what its Hoplite was made with, if it has one."""
    plugin = dask_scheduler.plugins.get(NAME)
    return {
        "clients": len(dask_scheduler.client_comms.keys() - {client}),
        "tasks": len(dask_scheduler.tasks),
        "overrides": plugin.overrides if isinstance(plugin, Hoplite) else None,
    }


def keys_of(client: str, dask_scheduler: Scheduler) -> list[Any]:
    """Keys of what a client wants, and of what that was made from."""
    found = set()
    ahead = list(dask_scheduler.clients[client].wants_what)
    while ahead:
        ts = ahead.pop()
        if ts.key not in found:
            found.add(ts.key)
            ahead.extend(ts.dependencies)
    return list(found)


def count_known(keys: list[Any], dask_scheduler: Scheduler) -> int:
    """Count the tasks that a scheduler knows."""
    return sum(key in dask_scheduler.tasks for key in keys)


def count_stored(keys: list[Any], dask_worker: Worker) -> int:
    """Count the values that a worker stores."""
    return sum(key in dask_worker.data for key in keys)
