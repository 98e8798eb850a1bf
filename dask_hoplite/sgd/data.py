"""What a user gives as data, as parts: futures that workers take in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dask
from dask.base import is_dask_collection
from dask.delayed import Delayed
from distributed import Client, Future

from dask_hoplite.client import check
from dask_hoplite.core.events import Key


async def parts_of(client: Client, data: Any) -> tuple[list[Future], dict[Key, str]]:
    """The parts of the data, in memory.

    Parameters
    ----------
    client : Client
    data : Future, list of Future, mapping of str to Future or list of Future, or Dask collection
        Or a tuple of Dask collections that are divided alike: then a part is a tuple of blocks.

    Returns
    -------
    parts : list of Future
    placed : dict of Key to str
        Who is to work on which, where the user says so.

    Raises
    ------
    TypeError
        If it is none of these.
    ValueError
        If there are no parts, or a worker is named that has none.
    Exception
        That of a part's task, if it failed.
    """
    placed: dict[Key, str] = {}
    futures = _futures(client, data, placed)
    if not futures:
        raise ValueError("there is no data to work on")
    for future in futures:
        if not isinstance(future, Future):
            kind = type(future).__name__
            raise TypeError(f"data is futures or a Dask collection, not a {kind}")
    check(client, futures)
    for future in futures:
        assert future._state is not None
        await future._state.wait()
        if future.status == "error":
            await future  # raises
        if future.status != "finished":
            raise ValueError(f"data {future.key!r} cannot be worked on: it is {future.status}")
    return futures, placed


def _futures(client: Client, data: Any, placed: dict[Key, str]) -> list[Any]:
    if isinstance(data, Future):
        return [data]
    if isinstance(data, tuple) and data and all(map(is_dask_collection, data)):
        columns = [_delayed(collection) for collection in data]
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            raise ValueError(f"the collections have different numbers of blocks: {lengths}")
        rows = [dask.delayed(tuple)(list(row)) for row in zip(*columns, strict=True)]
        return client.compute(rows)
    if is_dask_collection(data):
        return client.compute(_delayed(data))
    if isinstance(data, Mapping):
        parts: list[Any] = []
        for worker, given in data.items():
            given = [given] if isinstance(given, Future) else list(given)
            if not given:
                raise ValueError(f"there is no data for {worker}")
            parts += given
            placed.update((part.key, worker) for part in given if isinstance(part, Future))
        return parts
    try:
        return list(data)
    except TypeError:
        kind = type(data).__name__
        raise TypeError(f"data is futures or a Dask collection, not a {kind}") from None


def _delayed(collection: Any) -> list[Any]:
    """The blocks of a collection, each as a delayed value."""
    if isinstance(collection, Delayed) or not hasattr(collection, "to_delayed"):
        return [collection]
    blocks = collection.to_delayed()
    return list(blocks.ravel()) if hasattr(blocks, "ravel") else list(blocks)
