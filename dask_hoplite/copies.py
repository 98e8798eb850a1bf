"""The scheduler's side of copies: objects that enter the cluster, and those that are multiplied."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dask.utils import parse_timedelta
from distributed.core import Status
from distributed.protocol.serialize import Serialize, Serialized
from distributed.utils import TimeoutError as DaskTimeoutError

from dask_hoplite.core.events import Key, Pushed, Released
from dask_hoplite.core.instructions import Cancel, Pull
from dask_hoplite.entry import enter
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
    broadcast: bool = False
    wish: Collection[str] | None = None  #: workers that are to keep a copy; None: all
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
        self.plain_gather_on_worker = scheduler.gather_on_worker

    # Objects from outside

    async def place(
        self,
        client: str,
        nbytes: Mapping[Key, int],
        workers: Collection[str] | None = None,
        broadcast: bool | int = False,
        timeout: float | str | None = None,
        avoid: Collection[str] = (),
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
        avoid : collection of str, optional
            Addresses of workers to which objects could not be sent. They are the last to be chosen;
            and of ``workers``, those that have left meanwhile are left out.

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
        if workers is not None and avoid:
            workers = [
                w for w in workers if self.scheduler.coerce_address(w) in self.scheduler.workers
            ]
            if not workers:
                raise ValueError("none of the workers that were asked for is there any more")
        targets = await self._running(workers, timeout)
        arriving: Counter[str] = Counter()
        for put in self.puts.values():
            arriving[put.root] += put.nbytes
        # Evenly within a call, since what comes together is likely to be used together; between
        # calls by what Dask knows workers to hold, which is up to date as their memory is not.
        load = {
            ws: (ws.address in avoid, 0, ws.nbytes + arriving[ws.address], ws.address)
            for ws in targets
        }
        chosen: list[tuple[Key, int, list[str]]] = []
        for key, size in nbytes.items():
            ranked = sorted(_able(key, size, targets), key=load.__getitem__)
            n = len(ranked) if broadcast is True else max(int(broadcast), 1)
            for ws in ranked[:n]:
                avoided, placed, held, address = load[ws]
                load[ws] = (avoided, placed + size, held, address)
            chosen.append((key, size, [ws.address for ws in ranked]))
        everywhere = workers is None and broadcast is True
        placement: dict[Key, tuple[str, int]] = {}
        try:
            for key, size, able in chosen:
                put = await self._begin(key, size, client, able)
                placement[key] = put.root, put.epoch
                put.broadcast = bool(broadcast)
                n = len(able) if broadcast is True else max(int(broadcast), 1)
                others = [worker for worker in able if worker != put.root][: n - 1]
                put.wish = None if everywhere else [put.root, *others]
                put.copying = [asyncio.create_task(self._copy(put, worker)) for worker in others]
        except BaseException as error:
            self.abort(placement, f"another object of the same call: {error}")
            raise
        return placement

    async def _begin(self, key: Key, nbytes: int, client: str, workers: list[str]) -> Put:
        """Let a worker expect an object: the first that answers."""
        tried: dict[str, str] = {}
        patience: float | None = 2 * self.hoplite.config.stall_timeout
        for worker in workers:
            if client not in self.scheduler.clients:  # nobody would ever give it up
                raise TransferError(key, f"client {client} left")
            [pull] = self.hoplite.handle(Pushed(key, worker, nbytes, client))
            assert isinstance(pull, Pull)
            self.puts[key] = put = Put(key, nbytes, client, worker, pull.epoch)
            if worker == workers[-1]:
                patience = None  # it may be slow, and there is no other
            try:
                async with asyncio.timeout(patience):
                    answer = await self.scheduler.rpc(worker).hoplite_expect(
                        key=key, epoch=put.epoch, shares_host=pull.shares_host
                    )
            except OSError as error:
                tried[worker] = f"{type(error).__name__}: {error}"
                self.abort([key], f"{worker} does not answer")
                continue
            if answer is None or answer["status"] != "OK":
                reason = "has no Hoplite" if answer is None else answer["reason"]
                self.abort([key], reason)
                raise TransferError(key, f"{worker}: {reason}")
            return self._put(key)  # unless it was given up meanwhile
        raise TransferError(key, "no worker answers", tried)

    async def _copy(self, put: Put, worker: str) -> None:
        reason = await self.acquire(worker, {put.key: put.nbytes})
        if reason:
            put.failed[worker] = reason[put.key]
            return
        put.held.add(worker)
        if put.task is not None or self.puts.get(put.key) is not put:
            self._announce(put, worker)

    def _announce(self, put: Put, worker: str) -> None:
        """Let Dask know of a copy; if the object is gone by now, so is the copy."""
        ws = self.scheduler.workers.get(worker)
        if ws is None:
            return
        ts = self.scheduler.tasks.get(put.key)
        if ts is not None and ts is put.task:
            self.scheduler.add_replica(ts, ws)
        elif put.key not in self.puts and (ts is None or ws not in (ts.who_has or ())):
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
            ``failed``: for each key the workers that could not get a copy, and why. ``lost``: keys
            whose worker left before anybody else had them, and that worker. If there are any, Dask
            knows of none of these objects yet.

        Raises
        ------
        TransferError
            If an object was given up.
        """
        puts = [self._put(key) for key in nbytes]
        alive = {}
        for put in puts:
            put.held.add(put.root)
            alive[put.key] = [worker for worker in put.held if worker in self.scheduler.workers]
        if lost := {put.key: put.root for put in puts if not alive[put.key]}:
            return {"failed": {}, "lost": lost}
        # All or none: who gets an error has no future by which to release the others.
        for put in puts:
            if put.broadcast:
                self.hoplite.wishes.add(put.key, put.wish)
            self.scheduler.update_data(
                who_has={put.key: alive[put.key]},
                nbytes={put.key: nbytes[put.key]},
                client=client,
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
        return {"failed": {put.key: put.failed for put in puts if put.failed}, "lost": {}}

    async def comes(self, key: Key, epoch: int) -> bool:
        """Whether an object is still to be pushed: it goes with its client, if not before."""
        put = self.puts.get(key)
        return put is not None and put.epoch == epoch and put.client in self.scheduler.clients

    def _put(self, key: Key) -> Put:
        if key not in self.puts:
            raise TransferError(key, "was given up before all of it had come")
        return self.puts[key]

    def abort(self, keys: Iterable[Key], reason: str) -> None:
        """Give up objects on their way in, with all that there is of them."""
        for key in keys:
            put = self.puts.pop(key, None)
            if put is None or put.task is not None:
                continue
            logger.info("Hoplite: %r from %s is given up: %s", key, put.client, reason)
            cancels = self.hoplite.handle(Released(key))
            self.hoplite.perform(cancel for cancel in cancels if cancel.receiver != put.root)
            self.hoplite.spawn(self._withdraw(put))
            for worker in put.held:
                self._announce(put, worker)

    async def _withdraw(self, put: Put) -> None:
        """Let the root drop what comes, and then what has come: nothing must slip through."""
        await self.hoplite.cancel(Cancel(put.key, put.root, put.epoch, "it was given up"))
        self._announce(put, put.root)

    def client_left(self, client: str) -> None:
        """Give up what a client was about to push."""
        keys = [key for key, put in self.puts.items() if put.client == client]
        self.abort(keys, "the client left")

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
            await self._enter(client, large, workers, broadcast, timeout)
        return list(data)

    async def _enter(
        self,
        client: str,
        buffers: dict[Key, Buffer],
        workers: Collection[str] | None,
        broadcast: bool | int,
        timeout: float | str | None,
    ) -> None:
        """Send objects that are here to workers."""

        async def place(
            nbytes: Mapping[Key, int], avoid: Collection[str]
        ) -> dict[Key, tuple[str, int]]:
            return await self.place(client, nbytes, workers, broadcast, timeout, avoid)

        async def abort(keys: Iterable[Key], reason: str) -> None:
            self.abort(keys, reason)

        send = partial(push, self.scheduler.rpc, timeout=self.hoplite.config.push_timeout)
        try:
            await enter(buffers, place, send, partial(self.commit, client), abort)
        except BaseException as error:
            self.abort(buffers, f"{type(error).__name__}: {error}")
            raise

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

        The copies of large objects stay until the key is released, or replicated to fewer workers.
        A worker that leaves is passed over; Dask would try it for ever, and nobody else could
        replicate anything meanwhile.
        """
        scheduler = self.scheduler
        targets = set(scheduler.running)
        workers = None if workers is None else scheduler.workers_list(workers)
        if workers is not None:
            # If there is none of them, it is an error, and Dask's.
            there = [w for w in workers if w in scheduler.workers] or workers
            targets &= {scheduler.workers[w] for w in there}
        count = len(targets) if n is None else min(n, len(targets))
        if count == 0:
            raise ValueError("Can not use replicate to delete data")
        if missing := [key for key in keys if not scheduler.tasks[key].who_has]:
            return {"status": "partial-fail", "keys": missing}
        for key in keys if workers is not None else ():
            ts = scheduler.tasks[key]
            if unable := [
                ws for ws in targets - set(self.hoplite.holding(key)) if not _fits(ts.nbytes, ws)
            ]:
                raise _too_large(key, ts.nbytes, unable)
        async with scheduler._replica_lock(("replicate", object())):
            await self._multiply(keys, count, targets)
            if delete:
                await self._thin_out(keys, count, targets)
        for key in filter(self.hoplite.is_large, keys):
            holders = self.hoplite.holders(key)
            if n is None and workers is None:
                self.hoplite.wishes.add(key, holders)
            else:
                self.hoplite.wishes.replace(key, holders)
        action = {"action": "replicate", "workers": [ws.address for ws in targets]}
        scheduler.log_event("all", {**action, "key-count": len(keys)})
        return None

    async def _multiply(
        self, keys: Collection[Key], count: int, targets: set[WorkerState]
    ) -> dict[Key, dict[str, str]]:
        """Bring each key to ``count`` of ``targets``. A worker that fails is passed over.

        Returns
        -------
        dict
            For each key the workers that failed, and why.
        """
        scheduler = self.scheduler
        failed: dict[Key, dict[str, str]] = {key: {} for key in keys}
        while True:
            wanted: defaultdict[str, dict[Key, list[str]]] = defaultdict(dict)
            for key in keys:
                who_has = set(self.hoplite.holding(key))
                candidates = [
                    ws
                    for ws in targets & scheduler.running - who_has
                    if who_has
                    and ws.address not in failed[key]
                    and _fits(scheduler.tasks[key].nbytes, ws)
                ]
                candidates.sort(key=lambda ws: (ws.memory.process, ws.address))
                chosen = candidates[: max(count - len(who_has & targets), 0)]
                for ws in chosen:
                    wanted[ws.address][key] = [holder.address for holder in who_has]
                    self.planned[key] = len(chosen)
            if not wanted:
                return failed
            try:
                lost = await asyncio.gather(
                    *(self.gather_on_worker(worker, who_has) for worker, who_has in wanted.items())
                )
            finally:
                for key in keys:
                    self.planned.pop(key, None)
            for worker, lost_keys in zip(wanted, lost, strict=True):
                for key in lost_keys:
                    failed[key][worker] = "could not get it"

    async def _thin_out(self, keys: Collection[Key], count: int, targets: set[WorkerState]) -> None:
        """Leave each key on ``count`` of ``targets``."""
        surplus: defaultdict[str, list[Key]] = defaultdict(list)
        for key in keys:
            holders = sorted(targets & set(self.hoplite.holding(key)), key=lambda ws: ws.address)
            for ws in random.sample(holders, max(len(holders) - count, 0)):
                surplus[ws.address].append(key)
        stimulus_id = f"hoplite-replicate-{time.time()}"
        await asyncio.gather(
            *(
                self.scheduler.delete_worker_data(worker, surplus_keys, stimulus_id)
                for worker, surplus_keys in surplus.items()
            )
        )

    async def gather_on_worker(self, worker_address: str, who_has: dict[Key, list[str]]) -> set:
        """In place of :meth:`distributed.Scheduler.gather_on_worker`."""
        scheduler = self.scheduler
        tasks = {key: scheduler.tasks.get(key) for key in who_has if self.hoplite.is_large(key)}
        failed: set[Key] = set()
        if small := {key: where for key, where in who_has.items() if key not in tasks}:
            failed |= await self.plain_gather_on_worker(worker_address, small)
            # What was released meanwhile, Dask would leave there.
            unknown = [key for key in small.keys() - failed if not self.hoplite.holding(key)]
            scheduler.add_keys(worker_address, unknown)
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
        failed = (await self._multiply([key], len(goal), goal))[key]
        failed |= {ws.address: "its memory limit is too low" for ws in unable}
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
