"""The scheduler's part in allgather: a task, whose value several workers make for themselves."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import dumps

from dask_hoplite.collectives.spread import Spread, comes, move
from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import ReductionError
from dask_hoplite.transfer.patience import stop

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from dask_hoplite.scheduler import Hoplite

logger = logging.getLogger(__name__)


class Gathering:
    """Brings all operands to all workers that are to have them."""

    def __init__(self, hoplite: Hoplite, key: Key, wish: dict[str, Any]):
        self.key = key
        self.operands: tuple[Key, ...] = tuple(wish["operands"])
        #: Addresses of those that are to have all, or "contributors"
        self.workers: Collection[str] | str = wish["spread"]
        self.spread = Spread(hoplite, key)
        self.root: str | None = None
        self.number = 0  #: of the attempt that is going on

    @property
    def named(self) -> Collection[str]:
        """Workers that are to have all, whatever they hold."""
        return () if isinstance(self.workers, str) else self.workers


class Gatherings:
    """All that are going on.

    The task of a gathering has all operands as dependencies, so it begins when they are there.
    Those that hold one are in a ring, in which each sends its own and then what has come: so each
    link carries each operand once. Whoever has no place there, or if it breaks, gets them one by
    one, as other objects.
    """

    def __init__(self, hoplite: Hoplite, scheduler: Scheduler):
        self.hoplite = hoplite
        self.scheduler = scheduler
        self.gatherings: dict[Key, Gathering] = {}
        self.number = itertools.count(1).__next__

    def begin(self, ts: TaskState, wish: dict[str, Any]) -> None:
        """A task appears that is one."""
        self.gatherings[ts.key] = Gathering(self.hoplite, ts.key, wish)

    def transition(self, key: Key, start: str, finish: str) -> None:
        """See a result come and go."""
        gathering = self.gatherings.get(key)
        if gathering is None:
            return
        ts = self.scheduler.tasks[key]
        if finish == "processing" and ts.processing_on is not None:
            self._gather(gathering, ts.processing_on.address)
        elif start == "processing" and finish in ("released", "waiting", "no-worker"):
            gathering.root, gathering.number = None, 0
            gathering.spread.drop()
        elif finish == "memory":
            gathering.root = None
            gathering.spread.keep(ts, gathering.named)
            del self.gatherings[key]
        elif finish in ("erred", "forgotten"):
            gathering.root = None
            gathering.spread.drop()
            del self.gatherings[key]

    async def gathers(self, key: Key, number: int) -> bool:
        """Whether an attempt is still going on: workers may hear of it after its recall."""
        gathering = self.gatherings.get(key)
        return gathering is not None and gathering.number == number

    def restart(self) -> None:
        """Forget all."""
        for gathering in self.gatherings.values():
            gathering.spread.stop()
        self.gatherings.clear()

    def _gather(self, gathering: Gathering, root: str) -> None:
        holders = {key: sorted(self.hoplite.holders(key)) for key in gathering.operands}
        there = set(self.scheduler.workers)
        if gathering.workers == "contributors":
            workers = {worker for found in holders.values() for worker in found}
        else:
            workers = set(gathering.named) & there
        workers.add(root)
        gathering.root, gathering.number = root, (number := self.number())
        ring = self.hoplite.spawn(self._ring(gathering, holders, workers))

        async def bring(worker: str) -> bool:
            place = (await asyncio.shield(ring)).get(worker)
            bringing = self.hoplite.spawn(self._bring(gathering, number, worker, place))
            if worker == root:
                bringing.add_done_callback(forget)
            answer = await asyncio.shield(bringing)
            if answer["status"] == "OK":
                return worker != root
            logger.warning("Hoplite: %s could not get all of %r: %s", worker, gathering.key, answer)
            if worker == root and answer["status"] == "failed":
                error = dumps(ReductionError(gathering.key, answer["reason"]))
                self._send(root, "hoplite-fail", key=gathering.key, error=error)
            return False

        def forget(_: object) -> None:
            if gathering.root != root:  # nobody there waits for it any more
                self._send(root, "hoplite-forget", key=gathering.key)

        def finish() -> None:
            if root in gathering.spread.silent:
                move(self.hoplite, gathering.key, root, gathering.spread.silent)
            else:
                self._send(root, "hoplite-release", key=gathering.key)

        gathering.spread.begin(root, workers, bring, finish)

    async def _bring(
        self, gathering: Gathering, number: int, worker: str, ring: dict[str, Any] | None
    ) -> dict[str, Any]:
        how = {
            "number": number,
            "nbytes": {key: self._nbytes(key) for key in gathering.operands},
            "ring": ring,
            "hold": worker != gathering.root,
        }
        try:
            answer = await self.scheduler.rpc(worker).hoplite_gather(key=gathering.key, **how)
        except OSError as error:
            return {"status": "left", "reason": str(error)}
        return answer or {"status": "failed", "reason": "has no Hoplite"}

    async def _ring(
        self, gathering: Gathering, holders: dict[Key, list[str]], workers: set[str]
    ) -> dict[str, dict[str, Any]]:
        """What each worker must know to be in a ring; nothing if there is none."""
        own: dict[str, list[Key]] = {}
        for key, found in holders.items():
            if not (able := [worker for worker in found if worker in workers]):
                return {}
            fewest = min(able, key=lambda worker: (len(own.get(worker, ())), worker))
            own.setdefault(fewest, []).append(key)
        hosts = self.hoplite.directory.hosts
        members = sorted(own, key=lambda worker: (hosts.get(worker, ""), worker))
        if len({hosts.get(worker) for worker in members}) < 2:
            return {}  # they share memory, as far as they can
        try:
            described = await asyncio.gather(*(self._describe(w, own[w]) for w in members))
        except (OSError, KeyError, TypeError) as error:
            logger.info("Hoplite: no ring for %r: %s", gathering.key, error)
            return {}
        layouts = [layout for answer in described for layout in (answer or {}).items()]
        if len(layouts) < len(gathering.operands):
            return {}
        ring = {
            "members": [(worker, own[worker]) for worker in members],
            "layouts": dict(layouts),
            "number": self.number(),
        }
        return {worker: {**ring, "index": index} for index, worker in enumerate(members)}

    async def _describe(self, worker: str, keys: list[Key]) -> dict[Key, dict[str, Any]]:
        """How a worker would send what it holds; nothing if it does not answer."""
        asking = asyncio.ensure_future(self.scheduler.rpc(worker).hoplite_describe(keys=keys))
        try:
            return await asking if await comes(self.hoplite, worker, asking) else {}
        finally:
            await stop(asking)

    def _send(self, worker: str, op: str, **message: Any) -> None:
        self.hoplite.send(worker, op, **message)

    def _nbytes(self, key: Key) -> int:
        ts = self.scheduler.tasks.get(key)
        return max(ts.nbytes, 0) if ts is not None else 0
