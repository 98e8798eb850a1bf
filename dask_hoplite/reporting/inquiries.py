"""What people ask the scheduler of some objects: how far they are, and what became of them."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from dask_hoplite.core.events import Key
from dask_hoplite.targets import fits

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from dask_hoplite.scheduler import Hoplite


#: So many names of workers are remembered.
NAMES = 10_000


class Inquiries:
    """What :func:`dask_hoplite.progress` and :func:`dask_hoplite.report` ask."""

    def __init__(self, hoplite: Hoplite, scheduler: Scheduler):
        self.hoplite = hoplite
        self.scheduler = scheduler
        self.names: dict[str, Any] = {}  #: of workers, also of those that have left

    def joined(self, worker: str) -> None:
        """Remember how a worker is called."""
        self.names[worker] = self.scheduler.workers[worker].name
        if len(self.names) > NAMES:
            del self.names[next(iter(self.names))]

    async def report(self, keys: Collection[Key]) -> dict[str, Any]:
        """All that is remembered of some objects, and who the workers are.

        Returns
        -------
        dict
            ``now``, in seconds since the epoch, as all times; ``workers``: by address their
            ``name`` and whether they are ``there``; ``objects``: for each key its ``rows`` of
            transfers, its ``reductions``, and what Dask knows of it.
        """
        offset = time() - monotonic()
        rows = await self.hoplite.transfers()
        names = self.names | {ws.address: ws.name for ws in self.scheduler.workers.values()}
        return {
            "now": time(),
            "workers": {
                address: {"name": name, "there": address in self.scheduler.workers}
                for address, name in names.items()
            },
            "objects": [
                {
                    "key": key,
                    "rows": [row for row in rows if row["key"] == key],
                    "reductions": [
                        _later(row, offset) for row in self.hoplite.reductions.accounts(key)
                    ],
                    **self._known(key),
                }
                for key in keys
            ],
        }

    def _known(self, key: Key) -> dict[str, Any]:
        ts = self.scheduler.tasks.get(key)
        nbytes = self.hoplite.nbytes(key) if ts is None else max(ts.nbytes, 0)
        return {
            "state": None if ts is None else ts.state,
            "nbytes": nbytes,
            "min_size": self.hoplite.config.min_size,
            "holders": list(self.hoplite.holders(key)),
        }

    async def progress(self, keys: Collection[Key]) -> dict[str, Any]:
        """How far copies of some objects are, all together.

        Returns
        -------
        dict
            ``status`` is "running", "finished" or "error", that with a ``reason``; ``all`` and
            ``remaining``: bytes of all copies that are wanted; ``wanted`` and ``copies``: how many
            of them, and how many are there; ``waiting``: how many objects are not made yet;
            ``unknown``: keys that Dask does not know, not yet or no longer.
        """
        told: dict[str, Any] = {"status": "finished", "unknown": []}
        counts = dict.fromkeys(("all", "remaining", "wanted", "copies", "waiting"), 0)
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is not None and ts.state == "erred":
                reason = ts.exception_text or "its task has failed"
                return {**told, **counts, "status": "error", "reason": f"{key!r}: {reason}"}
            if ts is None and key not in self.hoplite.puts.pending:
                told["unknown"].append(key)
            for name, number in self._count(key, ts).items():
                counts[name] += number
        if counts["copies"] < counts["wanted"] or counts["waiting"] or told["unknown"]:
            told["status"] = "running"
        return {**told, **counts}

    def _count(self, key: Key, ts: TaskState | None) -> dict[str, int]:
        """Copies of one object, and their bytes."""
        there = set(self.hoplite.holders(key))
        tree = self.hoplite.directory.trees.get(key)
        coming = {} if tree is None else {w: t.received for w, t in tree.transfers.items()}
        wanted = there | coming.keys() | self._wanted(key, ts)
        nbytes = self._known(key)["nbytes"] or (tree.nbytes if tree is not None else 0)
        done = nbytes * len(there)
        done += sum(min(received, nbytes) for w, received in coming.items() if w not in there)
        return {
            "all": nbytes * len(wanted),
            "remaining": nbytes * len(wanted) - done,
            "wanted": len(wanted),
            "copies": len(there),
            "waiting": int(not there and not coming),
        }

    def _wanted(self, key: Key, ts: TaskState | None) -> set[str]:
        """Workers that are to have an object: for good, or for a task that they are to run."""
        if ts is None or not ts.who_has:
            return set()
        tasks = {user.processing_on for user in ts.waiters or () if user.processing_on is not None}
        wanted = {ws.address for ws in tasks}
        if key in self.hoplite.wishes:  # or each of thousands of keys would look at all workers
            running = {ws.address for ws in self.scheduler.running if fits(ts.nbytes, ws)}
            wanted |= self.hoplite.wishes.targets(key, running)
        return wanted


def _later(row: dict[str, Any], offset: float) -> dict[str, Any]:
    """An account with times since the epoch."""

    def moved(row: dict[str, Any]) -> dict[str, Any]:
        stop = None if row["stop"] is None else row["stop"] + offset
        return {**row, "start": row["start"] + offset, "stop": stop}

    return {**moved(row), "sums": [moved(one) for one in row["sums"]]}
