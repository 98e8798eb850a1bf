"""The scheduler's side of copies: objects that are multiplied, and stay."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import TransferError
from dask_hoplite.targets import fits, running, too_large

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

    from dask_hoplite.scheduler import Hoplite

logger = logging.getLogger(__name__)


class Copies:
    """What Hoplite's scheduler plugin does for ``replicate`` and ``broadcast``."""

    def __init__(self, hoplite: Hoplite, scheduler: Scheduler):
        self.hoplite = hoplite
        self.scheduler = scheduler
        #: For each object that is being multiplied, how many copies are made
        self.planned: dict[Key, int] = {}
        self.plain_gather_on_worker = scheduler.gather_on_worker

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
                ws for ws in targets - set(self.hoplite.holding(key)) if not fits(ts.nbytes, ws)
            ]:
                raise too_large(key, ts.nbytes, unable)
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
                    and fits(scheduler.tasks[key].nbytes, ws)
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
                self.free(worker_address, key)
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
        targets = await running(self.scheduler, workers, None)
        unable = {ws for ws in targets if ws not in ts.who_has and not fits(ts.nbytes, ws)}
        if unable and workers is not None:
            raise too_large(key, ts.nbytes, unable)
        wish = None if workers is None else [ws.address for ws in targets]
        self.hoplite.wishes.add(key, wish)
        goal = set(targets) - unable
        failed = (await self._multiply([key], len(goal), goal))[key]
        failed |= {ws.address: "its memory limit is too low" for ws in unable}
        if self.scheduler.tasks.get(key) is not ts:
            raise TransferError(key, "was released while it was broadcast")
        self.hoplite.fulfil([key])
        return {"failed": failed}

    def free(self, worker: str, key: Key) -> None:
        """Let a worker drop its copy, which Dask does not know of."""
        if worker in self.scheduler.workers:
            stimulus_id = f"hoplite-free-{time.time()}"
            self.scheduler.worker_send(
                worker, {"op": "free-keys", "keys": [key], "stimulus_id": stimulus_id}
            )
