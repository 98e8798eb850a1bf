"""Which worker works on which data. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from dask_hoplite.core.events import Key


class Shares:
    """The parts of the data that each worker takes in turn.

    Parameters
    ----------
    holders : mapping of Key to collection of str
        By key of a part, the workers that have it.
    """

    def __init__(self, holders: Mapping[Key, Collection[str]]):
        self.parts: dict[str, deque[Key]] = {}
        for part, workers in holders.items():
            worker = min(workers, key=lambda w: (len(self.parts.get(w, ())), w))
            self.parts.setdefault(worker, deque()).append(part)

    @property
    def workers(self) -> list[str]:
        """Those that have something to work on."""
        return list(self.parts)

    def next(self, worker: str) -> Key:
        """The part that a worker takes next."""
        parts = self.parts[worker]
        parts.rotate(-1)
        return parts[-1]

    def drop(self, part: Key) -> list[str]:
        """Forget a part that is lost; return the workers that have nothing left."""
        for parts in self.parts.values():
            if part in parts:
                parts.remove(part)
        idle = [worker for worker, parts in self.parts.items() if not parts]
        for worker in idle:
            del self.parts[worker]
        return idle

    def follow(self, present: Collection[str], aside: Collection[str] = ()) -> list[str]:
        """Take in which workers there are.

        Those that have left leave their parts to others; those that have none take half of what
        the one with the most has.

        Parameters
        ----------
        present : collection of str
            All that there are.
        aside : collection of str
            Of these, those that get no parts of others, unless there is nobody else.

        Returns
        -------
        list of str
            Workers that had parts and are no more.
        """
        gone = [worker for worker in self.parts if worker not in present]
        present = sorted(set(present).difference(aside) or present)
        orphans = [part for worker in gone for part in self.parts.pop(worker)]
        for part in orphans:
            # Whoever has none comes first: it may be the one that has left, under another name.
            worker = min(present, key=lambda w: len(self.parts.get(w, ())), default=None)
            if worker is None:
                self.parts.setdefault("", deque()).append(part)  # until there is one
                continue
            self.parts.setdefault(worker, deque()).append(part)
        for worker in present:
            if worker in self.parts or not self.parts:
                continue
            richest = max(self.parts, key=lambda w: len(self.parts[w]))
            more = len(self.parts[richest]) // 2
            if more:
                self.parts[worker] = deque(self.parts[richest].pop() for _ in range(more))
        return [worker for worker in gone if worker]
