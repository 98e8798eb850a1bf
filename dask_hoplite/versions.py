"""Whether the versions of Dask and of Hoplite that are installed go together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import distributed
from packaging.version import Version

from dask_hoplite.seams import Seam

#: The first and the last release of distributed with which all tests have passed
OLDEST, NEWEST = "2025.1.0", "2026.8.0"

#: How many names of workers are read
MOST = 3


def check(seams: Iterable[Seam], server: Any = None) -> str | None:
    """Why Hoplite cannot work with the installed distributed, if it cannot.

    Parameters
    ----------
    seams : iterable of Seam
        What it needs.
    server : Scheduler, Worker or Client, optional
        Where it is to be installed.

    Returns
    -------
    str or None
        A sentence that says what is wrong, and what to do.
    """
    installed = distributed.__version__
    if Version(installed).major > 0 and Version(installed) < Version(OLDEST):
        problem: str | None = "is too old"
    else:
        problems = (seam.problem(server) for seam in seams)
        problem = next((found for found in problems if found), None)
    if problem is None:
        return None
    return (
        f"distributed {installed} {problem}: Hoplite steps aside, and plain Dask goes on. "
        f"This dask-hoplite is tested with distributed {OLDEST} to {NEWEST}; "
        "install one of these, or another dask-hoplite"
    )


def differing(whose: Mapping[str, str]) -> str | None:
    """Who has which version of this package, if they are not all the same.

    Parameters
    ----------
    whose : mapping of str to str
        Versions by whose they are: "the scheduler", "this client", or a worker's address.

    Returns
    -------
    str or None
        One sentence.
    """
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, has in whose.items():
        groups[has].append(name)
    if len(groups) < 2:
        return None
    parts = [f"{_listed(names)} {has}" for has, names in groups.items()]
    return "Versions of dask-hoplite differ: " + "; ".join(parts)


def _listed(names: list[str]) -> str:
    more = len(names) - MOST
    named = names if more <= 0 else [*names[:MOST], f"{more} more"]
    return ", ".join(named) + (" has" if len(names) == 1 else " have")
