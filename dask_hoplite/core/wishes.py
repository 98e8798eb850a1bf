"""Which objects are meant to be where, for as long as they live."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dask_hoplite.core.events import Key


class Wishes:
    """Standing wishes: an object is to be on these workers, or on all, late ones included."""

    def __init__(self) -> None:
        self._wishes: dict[Key, frozenset[str] | None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._wishes

    def __iter__(self) -> Iterator[Key]:
        return iter(self._wishes)

    def __len__(self) -> int:
        return len(self._wishes)

    def add(self, key: Key, workers: Collection[str] | None) -> None:
        """Wish for copies on ``workers`` (None: on all). Wishes for one object add up."""
        known = self._wishes.get(key, frozenset())
        both = None if workers is None or known is None else known | frozenset(workers)
        self._wishes[key] = both

    def replace(self, key: Key, workers: Collection[str]) -> None:
        """Wish for copies on these workers, and no longer on others."""
        self._wishes[key] = frozenset(workers)

    def drop(self, key: Key) -> None:
        """The object is gone, or nobody cares any more where it is."""
        self._wishes.pop(key, None)

    def clear(self) -> None:
        """Forget all wishes."""
        self._wishes.clear()

    def targets(self, key: Key, workers: Collection[str]) -> set[str]:
        """Those of ``workers`` that are to have the object."""
        wish = self._wishes.get(key, frozenset())
        return set(workers) if wish is None else set(workers) & wish

    def of(self, worker: str) -> list[Key]:
        """The objects that a worker is to have."""
        return [key for key, wish in self._wishes.items() if wish is None or worker in wish]
