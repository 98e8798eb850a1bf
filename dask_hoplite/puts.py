"""The scheduler's side of objects that enter the cluster, from clients or through itself."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.protocol.serialize import Serialize, Serialized

from dask_hoplite.copies import Copies
from dask_hoplite.core.events import Key, Pushed, Released
from dask_hoplite.core.instructions import Cancel, Pull
from dask_hoplite.entry import ATTEMPTS, enter
from dask_hoplite.exceptions import NotInstalledError, TransferError
from dask_hoplite.targets import fitting, running
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import dump, pack
from dask_hoplite.transfer.push import push

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_hoplite.scheduler import Hoplite

logger = logging.getLogger(__name__)

#: Why a worker does not expect an object that knows nothing of such a thing
_NOT_THERE = "has no Hoplite"


@dataclass
class Put:
    """An object that is entering the cluster.

    Dask learns of it by :meth:`Puts.commit`, when a first worker has all of it. Until then
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


class Puts:
    """What Hoplite's scheduler plugin does for ``scatter``."""

    def __init__(self, hoplite: Hoplite, scheduler: Scheduler, copies: Copies):
        self.hoplite = hoplite
        self.scheduler = scheduler
        self.copies = copies
        self.pending: dict[Key, Put] = {}
        self.waiting = 0  #: calls that wait for a first worker
        self.plain_scatter = scheduler.scatter
        self.plain_adaptive_target = scheduler.adaptive_target

    def adaptive_target(self, target_duration: float | None = None) -> int:
        """In place of :meth:`distributed.Scheduler.adaptive_target`, which sees tasks only.

        One worker is enough for data that wait to enter: copies are for those that come anyway.
        """
        target = self.plain_adaptive_target(target_duration)
        return max(target, 1) if self.waiting else target

    async def _targets(
        self, workers: Collection[str] | None, timeout: float | str | None
    ) -> list[WorkerState]:
        """Workers for objects that enter; while there is none, there is a demand for one."""
        self.waiting += 1
        try:
            return await running(self.scheduler, workers, timeout)
        finally:
            self.waiting -= 1

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
        NotInstalledError
            If there is no Hoplite on any of the workers.
        TransferError
            If no worker takes an object for other reasons.
        """
        if workers is not None and avoid:
            workers = [
                w for w in workers if self.scheduler.coerce_address(w) in self.scheduler.workers
            ]
            if not workers:
                raise ValueError("none of the workers that were asked for is there any more")
        targets = await self._targets(workers, timeout)
        arriving: Counter[str] = Counter()
        for put in self.pending.values():
            arriving[put.root] += put.nbytes
        # Evenly within a call, since what comes together is likely to be used together; between
        # calls by what Dask knows workers to hold, which is up to date as their memory is not.
        load = {
            ws: (ws.address in avoid, 0, ws.nbytes + arriving[ws.address], ws.address)
            for ws in targets
        }
        chosen: list[tuple[Key, int, list[str]]] = []
        for key, size in nbytes.items():
            ranked = sorted(fitting(key, size, targets), key=load.__getitem__)
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
            self.pending[key] = put = Put(key, nbytes, client, worker, pull.epoch)
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
            if answer is None:  # it broke off while it was to get it: there is nothing to withdraw
                tried[worker] = _NOT_THERE
                self._put(key)
                del self.pending[key]
                self.hoplite.handle(Released(key))
                continue
            if answer["status"] != "OK":
                self.abort([key], answer["reason"])
                raise TransferError(key, f"{worker}: {answer['reason']}")
            return self._put(key)  # unless it was given up meanwhile
        if set(tried.values()) == {_NOT_THERE}:
            raise NotInstalledError(f"{key!r} cannot be sent: none of {workers} has Hoplite")
        raise TransferError(key, "no worker takes it", tried)

    async def _copy(self, put: Put, worker: str) -> None:
        reason = await self.copies.acquire(worker, {put.key: put.nbytes})
        if reason:
            put.failed[worker] = reason[put.key]
            return
        put.held.add(worker)
        if put.task is not None or self.pending.get(put.key) is not put:
            self._announce(put, worker)

    def _announce(self, put: Put, worker: str) -> None:
        """Let Dask know of a copy; if the object is gone by now, so is the copy."""
        ws = self.scheduler.workers.get(worker)
        if ws is None:
            return
        ts = self.scheduler.tasks.get(put.key)
        if ts is not None and ts is put.task:
            self.scheduler.add_replica(ts, ws)
        elif put.key not in self.pending and (ts is None or ws not in (ts.who_has or ())):
            self.copies.free(worker, put.key)

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
                self.pending.pop(put.key, None)
        action = {"action": "scatter", "client": client, "count": len(puts)}
        self.scheduler.log_event([client, "all"], action)
        return {"failed": {put.key: put.failed for put in puts if put.failed}, "lost": {}}

    async def comes(self, key: Key, epoch: int) -> bool:
        """Whether an object is still to be pushed: it goes with its client, if not before."""
        put = self.pending.get(key)
        return put is not None and put.epoch == epoch and put.client in self.scheduler.clients

    def _put(self, key: Key) -> Put:
        if key not in self.pending:
            raise TransferError(key, "was given up before all of it had come")
        return self.pending[key]

    def abort(self, keys: Iterable[Key], reason: str) -> None:
        """Give up objects on their way in, with all that there is of them."""
        for key in keys:
            put = self.pending.pop(key, None)
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
        keys = [key for key, put in self.pending.items() if put.client == client]
        self.abort(keys, "the client left")

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
        if large:
            try:
                await self._enter(client, large, workers, broadcast, timeout)
            except NotInstalledError as error:
                logger.info("%s: scattered as by a plain Dask scheduler", error)
                small = data
        if small:
            await self._scatter_plainly(small, workers, client, broadcast, timeout)
        return list(data)

    async def _scatter_plainly(
        self,
        data: dict[Key, Any],
        workers: list[str] | None,
        client: str,
        broadcast: bool,
        timeout: float,
    ) -> None:
        """Dask's own scatter of small objects; again if a worker leaves with what it is sent.

        That is raised as if the client's connection had broken, which is then closed.
        """
        if workers is None:  # while Dask itself waits, adaptive scaling sees nothing
            await self._targets(None, timeout)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self.plain_scatter(
                    data=data, workers=workers, client=client, broadcast=broadcast, timeout=timeout
                )
                break
            except TimeoutError:
                raise  # there are no workers
            except OSError as error:
                if attempt == ATTEMPTS:
                    reason = f"could not be sent to any worker: {error}"
                    raise TransferError(next(iter(data)), reason) from error
            finally:
                if attempt > 1:  # what came to others before is not known to Dask
                    for key in data:
                        unknown = self.scheduler.workers.keys() - set(self.hoplite.holders(key))
                        for worker in unknown:
                            self.copies.free(worker, key)

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


def _buffer(value: Any) -> Buffer:
    """The bytes of a value as it came in a message to the scheduler."""
    if isinstance(value, Serialized):
        return Buffer(*pack(value.header, value.frames))
    return Buffer(*dump(value.data if isinstance(value, Serialize) else value))
