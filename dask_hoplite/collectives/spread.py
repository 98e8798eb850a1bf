"""Results that several workers are to have by the time that they are given to Dask."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from time import time
from typing import TYPE_CHECKING, Any

from dask_hoplite.core.events import Key
from dask_hoplite.transfer.patience import answered, stop

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from dask_hoplite.scheduler import Hoplite

logger = logging.getLogger(__name__)

#: Of recalls
NUMBERS = itertools.count(1)


class Spread:
    """Copies of one result, beside the one that its task gives to Dask.

    They are made before Dask has the result, and counted in as soon as it has. So whoever is told
    that it is there finds all of them. If it is made anew, so are they: it may be of other operands
    then.

    Parameters
    ----------
    hoplite : Hoplite
        The scheduler's plugin.
    key : Key
        The result.
    """

    def __init__(self, hoplite: Hoplite, key: Key):
        self.hoplite = hoplite
        self.key = key
        self.copies: set[str] = set()  #: workers that have one
        self.silent: set[str] = set()  #: that are to have one, and did not answer
        self.begun: set[str] = set()  #: that may have one, perhaps of a result that was given up
        self.recalls: dict[str, int] = {}  #: what workers were told last to drop copies
        self.over = False  #: whether all have one that can
        self.task: asyncio.Task[None] | None = None

    def begin(
        self,
        root: str,
        workers: Collection[str],
        bring: Callable[[str], Awaitable[bool]],
        then: Callable[[], None],
    ) -> None:
        """Let workers have copies, in place of what was begun before.

        Parameters
        ----------
        root : str
            Who gives it to Dask, and so has none beside.
        workers : collection of str
            To whom it is brought.
        bring : callable
            Lets one have it; gives whether that has.
        then : callable
            Called when all have it that can.
        """
        self.stop()
        self.copies, self.silent, self.over = set(), set(), False
        self.begun = self.begun.union(workers) - {root}

        async def one(worker: str) -> bool:
            if worker in self.recalls:
                await self._recalled(worker)
            return await bring(worker)

        async def all_of_them() -> None:
            await asyncio.gather(*(self._one(worker, one) for worker in workers))
            self.over = True
            then()

        self.task = self.hoplite.spawn(all_of_them())

    async def _one(self, worker: str, bring: Callable[[str], Coroutine[Any, Any, bool]]) -> None:
        """Let one have a copy, unless it falls silent."""
        doing = asyncio.ensure_future(bring(worker))
        try:
            if not await comes(self.hoplite, worker, doing):
                logger.warning("Hoplite: %s is silent, and has no %r", worker, self.key)
                self.silent.add(worker)
            elif doing.result():
                self.copies.add(worker)
        except Exception:
            logger.exception("Hoplite: %s could not get %r", worker, self.key)
        finally:
            await stop(doing)

    async def _recalled(self, worker: str) -> None:
        """Wait until a worker has dropped its copy of what was given up."""
        try:
            await self.hoplite.scheduler.rpc(worker).hoplite_wait_for_recall(
                number=self.recalls[worker]
            )
        except OSError:
            logger.debug("Hoplite: %s left before it was told", worker)

    def stop(self) -> None:
        """Bring no more."""
        self.over = False
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def keep(self, ts: TaskState, wished: Collection[str]) -> None:
        """Dask has the result: now it learns of the copies, which are to stay."""
        self.stop()
        scheduler = self.hoplite.scheduler
        for worker in self.copies:
            if (ws := scheduler.workers.get(worker)) is not None:
                scheduler.add_replica(ts, ws)
        # Those that are silent get theirs when they come back.
        self.hoplite.wishes.add(self.key, {*self.copies, *self.silent, *wished})
        self.copies, self.silent, self.begun = set(), set(), set()

    def drop(self, root: str | None = None) -> None:
        """Dask will not have this result: the copies are of no use.

        Parameters
        ----------
        root : str, optional
            Whose task makes it anew. Without a key, there would be none.
        """
        self.stop()
        self.copies = set()
        for worker in self.begun - {root}:
            self.recalls[worker] = number = next(NUMBERS)
            self.hoplite.send(worker, "hoplite-recall", key=self.key, number=number)


async def comes(hoplite: Hoplite, worker: str, doing: asyncio.Future[Any]) -> bool:
    """Wait for what a worker does, however long; or until it does not even answer."""
    timeout = hoplite.config.stall_timeout
    while not (await asyncio.wait({doing}, timeout=2 * timeout))[0]:
        if not await answers(hoplite.scheduler, worker, timeout):
            return False
    return True


async def answers(scheduler: Scheduler, worker: str, timeout: float) -> bool:
    """Whether a worker answers."""
    asking = asyncio.ensure_future(scheduler.rpc(worker).echo(data="hoplite"))
    try:
        return await answered(asking, timeout) and not asking.exception()
    finally:
        await stop(asking)


def move(hoplite: Hoplite, key: Key, root: str, silent: Collection[str]) -> None:
    """Let another worker have a result, in place of one that does not answer.

    That one will learn of it if it ever comes back; what it says until then is of an earlier run of
    the task, and Dask does not listen to it.
    """
    scheduler = hoplite.scheduler
    ts = scheduler.tasks.get(key)
    others = {ws.address for ws in scheduler.running}.difference(silent, [root])
    if ts is None or ts.state != "processing" or not others:
        return
    logger.warning("Hoplite: %r goes to another worker, as %s is silent", key, root)
    wanted = ts.worker_restrictions, ts.loose_restrictions
    ts.worker_restrictions, ts.loose_restrictions = others, False
    try:
        scheduler._reschedule(key, root, stimulus_id=f"hoplite-move-{time()}")
    finally:
        ts.worker_restrictions, ts.loose_restrictions = wanted
