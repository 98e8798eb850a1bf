"""The scheduler's side of copies: objects that enter the cluster, and those that are multiplied."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from dask.utils import parse_timedelta
from distributed.core import Status
from distributed.protocol.serialize import Serialize, Serialized
from distributed.utils import TimeoutError as DaskTimeoutError

from dask_hoplite.core.events import Key, Pushed, Released
from dask_hoplite.core.instructions import Pull
from dask_hoplite.exceptions import ObjectTooLargeError, TransferError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import dump, pack
from dask_hoplite.transfer.push import push

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_hoplite.scheduler import Hoplite

logger = logging.getLogger(__name__)


@dataclass
class Put:
    """An object that is entering the cluster.

    Dask learns of it by :meth:`Copies.commit`, when a first worker has all of it. Until then
    whatever copies there are belong to the put, and go with it if it fails.
    """

    key: Key
    nbytes: int  #: on the wire
    client: str
    root: str
    epoch: int
    wish: Collection[str] | None  #: workers that are to keep a copy; None: all
    broadcast: bool
    task: TaskState | None = None  #: Dask's, once there is one
    held: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    copying: list[asyncio.Task[None]] = field(default_factory=list)


class Copies:
    """What Hoplite's scheduler plugin does for ``scatter``, ``replicate`` and ``broadcast``."""

    def __init__(self, hoplite: Hoplite, scheduler: Scheduler):
        self.hoplite = hoplite
        self.scheduler = scheduler
        self.puts: dict[Key, Put] = {}
        #: For each object that is being multiplied, how many copies are made
        self.planned: dict[Key, int] = {}
        self.plain_scatter = scheduler.scatter
        self.plain_replicate = scheduler.replicate
        self.plain_gather_on_worker = scheduler.gather_on_worker

    # Objects from outside

    async def place(
        self,
        client: str,
        nbytes: Mapping[Key, int],
        workers: Collection[str] | None = None,
        broadcast: bool | int = False,
        timeout: float | str | None = None,
    ) -> dict[Key, tuple[str, int]]:
        """Choose a worker for each object that a client is about to push.

        Copies that are wanted on other workers start at once: they follow the push.

        Parameters
        ----------
        client : str
            The client that will own the objects.
        nbytes : mapping of Key to int
            Sizes on the wire.
        workers : collection of str, optional
            Addresses or names of the workers that are asked for; default: all.
        broadcast : bool or int
            Whether to copy to all of these workers, or to how many.
        timeout : float, optional
            Seconds to wait for a first worker.

        Returns
        -------
        dict
            For each key the address of a worker, and the epoch that goes with the push.

        Raises
        ------
        TimeoutError
            If no worker comes in time.
        ObjectTooLargeError
            If no worker's memory limit allows for an object.
        """
        targets = await self._running(workers, timeout)
        arriving: Counter[str] = Counter()
        for put in self.puts.values():
            arriving[put.root] += put.nbytes
        # Evenly within a call, since what comes together is likely to be used together; between
        # calls by what Dask knows workers to hold, which is up to date as their memory is not.
        load = {ws: (0, ws.nbytes + arriving[ws.address], ws.address) for ws in targets}
        chosen: list[tuple[Key, int, WorkerState, list[WorkerState]]] = []
        for key, size in nbytes.items():
            able = _able(key, size, targets)
            n = len(able) if broadcast is True else max(int(broadcast), 1)
            root, *others = nsmallest(n, able, key=load.__getitem__)
            for ws in (root, *others):
                placed, held, address = load[ws]
                load[ws] = (placed + size, held, address)
            chosen.append((key, size, root, others))
        placement: dict[Key, tuple[str, int]] = {}
        try:
            for key, size, root, others in chosen:
                wish = None
                if workers is not None or broadcast is not True:
                    wish = [ws.address for ws in (root, *others)]
                put = Put(key, size, client, root.address, 0, wish, bool(broadcast))
                placement[key] = await self._begin(put, [ws.address for ws in others])
        except BaseException as error:
            await self.abort(placement, f"another object of the same call: {error}")
            raise
        return placement

    async def _begin(self, put: Put, others: list[str]) -> tuple[str, int]:
        [pull] = self.hoplite.handle(Pushed(put.key, put.root, put.nbytes, put.client))
        assert isinstance(pull, Pull)
        put.epoch = pull.epoch
        self.puts[put.key] = put
        answer = await self.scheduler.rpc(put.root).hoplite_expect(
            key=put.key, epoch=put.epoch, shares_host=pull.shares_host
        )
        if answer is None or answer["status"] != "OK":
            reason = "has no Hoplite" if answer is None else answer["reason"]
            await self.abort([put.key], reason)
            raise TransferError(put.key, f"{put.root}: {reason}")
        put.copying = [asyncio.create_task(self._copy(put, worker)) for worker in others]
        return put.root, put.epoch

    async def _copy(self, put: Put, worker: str) -> None:
        reason = await self.acquire(worker, {put.key: put.nbytes})
        if reason:
            put.failed[worker] = reason[put.key]
            return
        put.held.add(worker)
        if put.task is not None:
            self._announce(put, worker)

    def _announce(self, put: Put, worker: str) -> None:
        """Let Dask know of a copy; if the object is gone by now, so is the copy."""
        ws = self.scheduler.workers.get(worker)
        if ws is None:
            return
        if put.task is not None and self.scheduler.tasks.get(put.key) is put.task:
            self.scheduler.add_replica(put.task, ws)
        else:
            self._free(worker, put.key)

    def _free(self, worker: str, key: Key) -> None:
        if worker in self.scheduler.workers:
            stimulus_id = f"hoplite-free-{time.time()}"
            self.scheduler.worker_send(
                worker, {"op": "free-keys", "keys": [key], "stimulus_id": stimulus_id}
            )

    async def commit(self, client: str, nbytes: Mapping[Key, int]) -> dict[str, Any]:
        """Make pushed objects known to Dask, and wait for the copies that are to be made.

        Parameters
        ----------
        client : str
            The client that gets the references.
        nbytes : mapping of Key to int
            The objects, each held by its root by now, and their sizes there, as Dask measures them.

        Returns
        -------
        dict
            ``failed``: for each key the workers that could not get a copy, and why.

        Raises
        ------
        TransferError
            If an object was lost again before this call.
        """
        puts = [self._put(key) for key in nbytes]
        for put in puts:
            put.held.add(put.root)
            alive = [worker for worker in put.held if worker in self.scheduler.workers]
            if not alive:
                await self.abort([put.key], "its worker left")
                raise TransferError(put.key, f"{put.root} left before anybody else had it")
            if put.broadcast:
                self.hoplite.wishes.add(put.key, put.wish)
            self.scheduler.update_data(
                who_has={put.key: alive}, nbytes={put.key: nbytes[put.key]}, client=client
            )
            put.task = self.scheduler.tasks[put.key]
        try:
            if copying := [task for put in puts for task in put.copying]:
                await asyncio.wait(copying)
            # Workers that came while the others were being served.
            self.hoplite.fulfil([put.key for put in puts])
        finally:
            for put in puts:
                self.puts.pop(put.key, None)
        action = {"action": "scatter", "client": client, "count": len(puts)}
        self.scheduler.log_event([client, "all"], action)
        return {"failed": {put.key: put.failed for put in puts if put.failed}}

    def _put(self, key: Key) -> Put:
        if key not in self.puts:
            raise TransferError(key, "was given up before all of it had come")
        return self.puts[key]

    async def abort(self, keys: Iterable[Key], reason: str) -> None:
        """Give up objects on their way in, with all that there is of them."""
        for key in keys:
            put = self.puts.pop(key, None)
            if put is None or put.task is not None:
                continue
            logger.info("Hoplite: %r from %s is given up: %s", key, put.client, reason)
            for task in put.copying:
                task.cancel()
            self.hoplite.perform(self.hoplite.handle(Released(key)))
            for worker in (put.root, *put.held):
                self._free(worker, key)

    async def client_left(self, client: str) -> None:
        """Give up what a client was about to push."""
        keys = [key for key, put in self.puts.items() if put.client == client]
        await self.abort(keys, "the client left")

    # Dask's own operations

    async def scatter(
        self,
        data: dict[Key, Any],
        workers: Iterable[str] | None,
        client: str,
        broadcast: bool = False,
        timeout: float = 2,
    ) -> list[Key]:
        """In place of :meth:`distributed.Scheduler.scatter`, for clients without Hoplite.

        The data are here already, by one message. They go to a first worker, and from there on,
        while they still arrive.
        """
        buffers = {key: _buffer(value) for key, value in data.items()}
        large = {
            key: buffer
            for key, buffer in buffers.items()
            if buffer.nbytes >= self.hoplite.config.min_size and key not in self.scheduler.tasks
        }
        small = {key: value for key, value in data.items() if key not in large}
        workers = None if workers is None else list(workers)
        if small:
            await self.plain_scatter(
                data=small, workers=workers, client=client, broadcast=broadcast, timeout=timeout
            )
        if large:
            sizes = {key: buffer.nbytes for key, buffer in large.items()}
            placement = await self.place(client, sizes, workers, broadcast, timeout)
            try:
                async with asyncio.TaskGroup() as group:
                    pushes = {
                        key: group.create_task(
                            push(self.scheduler.rpc, worker, key, large[key], epoch)
                        )
                        for key, (worker, epoch) in placement.items()
                    }
            except* Exception as errors:
                await self.abort(large, f"push failed: {errors.exceptions[0]}")
                raise errors.exceptions[0] from None
            await self.commit(client, {key: task.result() for key, task in pushes.items()})
        return list(data)

    async def replicate(
        self,
        keys: list[Key],
        n: int | None = None,
        workers: Iterable[str] | None = None,
        branching_factor: int = 2,
        delete: bool = True,
        stimulus_id: str | None = None,
    ) -> dict[str, Any] | None:
        """In place of :meth:`distributed.Scheduler.replicate`: all new copies are made at once.

        The copies stay until the key is released, or replicated to fewer workers.
        """
        scheduler = self.scheduler
        large = [key for key in keys if self.hoplite.is_large(key)]
        small = [key for key in keys if key not in large]
        workers = None if workers is None else list(workers)
        outcome = None
        if small or not large:
            outcome = await self.plain_replicate(
                keys=small,
                n=n,
                workers=workers,
                branching_factor=branching_factor,
                delete=delete,
                stimulus_id=stimulus_id,
            )
        if not large:
            return outcome
        targets = set(scheduler.running)
        if workers is not None:
            targets &= {scheduler.workers[w] for w in scheduler.workers_list(workers)}
        count = len(targets) if n is None else min(n, len(targets))
        if count == 0:
            raise ValueError("Can not use replicate to delete data")
        if missing := [key for key in large if not scheduler.tasks[key].who_has]:
            return {"status": "partial-fail", "keys": missing}
        async with scheduler._replica_lock(("replicate", object())):
            await asyncio.gather(*(self._multiply(key, count, targets) for key in large))
        crowded = [key for key in large if len(targets & set(self.hoplite.holding(key))) > count]
        if crowded and delete:
            addresses = [ws.address for ws in targets]
            await self.plain_replicate(keys=crowded, n=count, workers=addresses, delete=True)
        for key in large:
            if key in scheduler.tasks:
                holders = self.hoplite.holders(key)
                if n is None and workers is None:
                    self.hoplite.wishes.add(key, holders)
                else:
                    self.hoplite.wishes.replace(key, holders)
        action = {"action": "replicate", "workers": [ws.address for ws in targets]}
        scheduler.log_event("all", {**action, "key-count": len(large)})
        return outcome

    async def _multiply(self, key: Key, count: int, targets: set[WorkerState]) -> dict[str, str]:
        """Bring a key to ``count`` of ``targets``. A worker that fails is passed over.

        Returns
        -------
        dict
            Workers that failed, and why.
        """
        failed: dict[str, str] = {}
        while (ts := self.scheduler.tasks.get(key)) is not None and ts.who_has:
            candidates = [
                ws
                for ws in targets & self.scheduler.running - ts.who_has
                if ws.address not in failed
            ]
            wanted = count - len(ts.who_has & targets)
            if wanted <= 0 or not candidates:
                break
            candidates.sort(key=lambda ws: (ws.memory.process, ws.address))
            chosen = [ws.address for ws in candidates[:wanted]]
            who_has = [ws.address for ws in ts.who_has]
            self.planned[key] = len(chosen)
            try:
                lost = await asyncio.gather(
                    *(self.gather_on_worker(worker, {key: who_has}) for worker in chosen)
                )
            finally:
                self.planned.pop(key, None)
            for worker, keys in zip(chosen, lost, strict=True):
                if key in keys:
                    failed[worker] = "could not get it"
        return failed

    async def gather_on_worker(self, worker_address: str, who_has: dict[Key, list[str]]) -> set:
        """In place of :meth:`distributed.Scheduler.gather_on_worker`."""
        scheduler = self.scheduler
        tasks = {key: scheduler.tasks.get(key) for key in who_has if self.hoplite.is_large(key)}
        failed: set[Key] = set()
        if small := {key: where for key, where in who_has.items() if key not in tasks}:
            failed |= await self.plain_gather_on_worker(worker_address, small)
        if not tasks:
            return failed
        nbytes = {key: ts.nbytes for key, ts in tasks.items() if ts is not None}
        reasons = await self.acquire(worker_address, nbytes)
        for key, ts in tasks.items():
            ws = scheduler.workers.get(worker_address)
            if key in reasons or ws is None:
                failed.add(key)
            elif scheduler.tasks.get(key) is ts and ts is not None and ts.state == "memory":
                scheduler.add_replica(ts, ws)
            else:
                self._free(worker_address, key)
        return failed

    async def acquire(self, worker: str, nbytes: Mapping[Key, int]) -> dict[Key, str]:
        """Let a worker get objects; return those that it could not get, and why."""
        try:
            first = next(iter(nbytes))
            answer = await self.scheduler.rpc(worker).hoplite_acquire(
                nbytes=dict(nbytes), decided={first: self.hoplite.decide_ahead(first, worker)}
            )
        except OSError as error:
            logger.warning("Hoplite: %s left while it received: %s", worker, error)
            return dict.fromkeys(nbytes, f"left: {error}")
        if answer is None:
            return dict.fromkeys(nbytes, "has no Hoplite")
        if answer["status"] == "OK":
            return {}
        for key, reason in answer["reasons"].items():
            logger.warning("Hoplite: %s could not get %r: %s", worker, key, reason)
        return dict(answer["reasons"])

    async def broadcast(self, key: Key, workers: Collection[str] | None = None) -> dict[str, Any]:
        """Bring an object that Dask holds to all workers, or to some, and keep it there.

        Parameters
        ----------
        key : Key
            An object in memory.
        workers : collection of str, optional
            Addresses or names; default: all, also those that will come.

        Returns
        -------
        dict
            ``failed``: workers that could not get it, and why.

        Raises
        ------
        TransferError
            If the key is unknown or not in memory.
        ObjectTooLargeError
            If a worker that was named has too low a memory limit. Without names, such workers are
        left out.
        """
        ts = self.scheduler.tasks.get(key)
        if ts is None or not ts.who_has:
            state = "unknown, or was released" if ts is None else f"in state {ts.state!r}"
            raise TransferError(key, f"cannot be broadcast: it is {state}")
        targets = await self._running(workers, None)
        unable = {ws for ws in targets if ws not in ts.who_has and not _fits(ts.nbytes, ws)}
        if unable and workers is not None:
            raise _too_large(key, ts.nbytes, unable)
        wish = None if workers is None else [ws.address for ws in targets]
        self.hoplite.wishes.add(key, wish)
        goal = set(targets) - unable
        if self.hoplite.is_large(key):
            failed = await self._multiply(key, len(goal), goal)
            failed |= {ws.address: "its memory limit is too low" for ws in unable}
        else:
            failed = {}
            addresses = [ws.address for ws in goal]
            await self.plain_replicate(
                keys=[key],
                n=len(goal),
                workers=addresses,
                branching_factor=len(goal),
                delete=False,
            )
        if self.scheduler.tasks.get(key) is not ts:
            raise TransferError(key, "was released while it was broadcast")
        self.hoplite.fulfil([key])
        return {"failed": failed}

    # Workers

    async def _running(
        self, workers: Collection[str] | None, timeout: float | str | None
    ) -> list[WorkerState]:
        """The running ones among the workers that are meant; wait for a first one."""
        timeout = parse_timedelta(timeout)
        deadline = time.monotonic() + (timeout or 0)
        while True:
            if workers is None:
                found = list(self.scheduler.running)
            else:
                found = [self._worker(worker) for worker in workers]
                found = [ws for ws in found if ws.status == Status.running]
            if found:
                return found
            if time.monotonic() >= deadline:
                known = len(self.scheduler.workers)
                raise DaskTimeoutError(
                    f"No valid workers found: none of {known} known workers is running"
                    + ("" if workers is None else f" and among {list(workers)}")
                    + (f" after {timeout} s" if timeout else "")
                )
            await asyncio.sleep(0.05)

    def _worker(self, worker: str) -> WorkerState:
        address = self.scheduler.coerce_address(worker)
        if address not in self.scheduler.workers:
            raise ValueError(f"no such worker: {worker!r}")
        return self.scheduler.workers[address]


def _able(key: Key, nbytes: int, workers: Collection[WorkerState]) -> list[WorkerState]:
    """Those of the workers whose memory limit allows for an object at all."""
    able = [ws for ws in workers if _fits(nbytes, ws)]
    if workers and not able:
        raise _too_large(key, nbytes, workers)
    return able


def _fits(nbytes: int, ws: WorkerState) -> bool:
    return not ws.memory_limit or ws.memory_limit >= nbytes


def _too_large(key: Key, nbytes: int, workers: Collection[WorkerState]) -> ObjectTooLargeError:
    limits = {ws.address: f"memory limit of {ws.memory_limit} bytes" for ws in workers}
    return ObjectTooLargeError(key, f"an object of {nbytes} bytes fits no worker asked for", limits)


def _buffer(value: Any) -> Buffer:
    """The bytes of a value as it came in a message to the scheduler."""
    if isinstance(value, Serialized):
        return Buffer(*pack(value.header, value.frames))
    return Buffer(*dump(value.data if isinstance(value, Serialize) else value))
