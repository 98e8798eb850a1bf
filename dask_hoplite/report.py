"""``hoplite.report``: a page that shows how objects moved, and what bounded the time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from time import strftime
from typing import Any

from dask.core import iskey
from dask.utils import format_bytes
from distributed import Client
from distributed.client import futures_of

import dask_hoplite
from dask_hoplite.client import ask, or_current
from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import ReportError
from dask_hoplite.reporting.page import Names, part


def report(
    futures: Any,
    filename: str | os.PathLike[str] = "hoplite-report.html",
    client: Client | None = None,
) -> Any:
    """Write a page that shows how objects moved: one HTML file, which needs nothing else.

    For each object: the tree (who got it from whom), each link over time, which sources were
    replaced and at which byte their receivers went on, and what bounded the time, with the rule by
    which that is found. For the result of a reduction: its sums, those that were given up
    included. It shows what :func:`transfers` remembers, and the last 100 reductions; what is
    under way is shown as far as it is.

    Parameters
    ----------
    futures : Future, key, or nested container of Future
        The objects. Released ones are known by their keys (a str, or what else Dask takes) for as
        long as their transfers are remembered.
    filename : str or path
        What to write. A file that is there is replaced.
    client : Client, optional
        Default: that of the futures, or the current one; inside a task the worker's.

    Returns
    -------
    str
        The absolute path of the page. With an asynchronous client, an awaitable of it.

    Raises
    ------
    TypeError
        If that is neither futures nor a key.
    ReportError
        If an object is unknown, or nothing of it has moved. It is a ``ValueError``.
    OSError
        If the file cannot be written.
    NotInstalledError
        If the cluster has no Hoplite.

    Examples
    --------
    >>> path = hoplite.report(weights, "broadcast.html")  # doctest: +SKIP
    """
    found = futures_of(futures)
    if found:
        keys = list(dict.fromkeys(future.key for future in found))
    elif iskey(futures) and not isinstance(futures, bool) and futures != ():
        keys = [futures]
    else:
        raise TypeError(f"a report is of futures or of a key, not of a {type(futures).__name__}")
    path = Path(filename).absolute()
    client = or_current(client or (found[0].client if found else None))
    return client.sync(_report, client, keys, path)


async def _report(client: Client, keys: Sequence[Key], path: Path) -> str:
    told = await ask(client, "hoplite_report", keys=list(keys))
    # 10,000 transfers take more than a second, and this loop may be that of a worker.
    await asyncio.to_thread(lambda: path.write_text(page(told), encoding="utf-8"))
    return str(path)


def page(told: Mapping[str, Any]) -> str:
    """The page, from what the scheduler remembers of objects.

    Raises
    ------
    ReportError
        If there is an object of which it remembers nothing.
    """
    from jinja2 import Environment

    for one in told["objects"]:
        if not one["reductions"] and all(row["source"] is None for row in one["rows"]):
            raise ReportError(one["key"], _why_nothing(one))
    addresses = [
        address
        for one in told["objects"]
        for row in one["rows"]
        for address in (row["source"], row["receiver"])
        if address is not None and "://" in address
    ]
    names = Names(told["workers"], addresses)
    parts = [part(one, names, told["now"]) for one in told["objects"]]
    source = resources.files(dask_hoplite).joinpath("reporting/report.html")
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        source.read_text(encoding="utf-8")
    )
    what = "an object" if len(parts) == 1 else f"{len(parts)} objects"
    workers = sum(worker["there"] for worker in told["workers"].values())
    return template.render(
        title=f"Hoplite: how {what} moved",
        about=f"dask-hoplite {dask_hoplite.__version__}, {workers} workers, "
        f"{strftime('%Y-%m-%d %H:%M:%S')}",
        parts=parts,
    )


def _why_nothing(one: Mapping[str, Any]) -> str:
    """Why there is nothing to report of an object."""
    nbytes = one["nbytes"] or 0
    if one["state"] is None:
        return (
            "there is nothing to report: Dask does not know this key (any more), and no transfer "
            "of it is remembered"
        )
    if one["state"] != "memory":
        return (
            f"there is nothing to report: it is in state {one['state']!r}, and nothing of it moves"
        )
    if nbytes < one["min_size"]:
        return (
            f"there is nothing to report: its {format_bytes(nbytes)} are below hoplite.min-size "
            f"({format_bytes(one['min_size'])}), and left to Dask"
        )
    return (
        f"there is nothing to report: it is on {len(one['holders'])} worker(s), and no transfer of "
        "it is remembered"
    )
