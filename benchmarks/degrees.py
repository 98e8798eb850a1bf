"""The shape of the trees of reductions, forced."""

from __future__ import annotations


def degrees(n: int) -> dict[str, int | None]:
    """Degrees of the tree of a reduction of `n` operands."""
    return {"chain": 1, "degree 2": 2, "star": n, "chosen": None}


def set_degree(degree: int | None, dask_scheduler) -> None:
    """Force the degree of the trees of reductions; None leaves it to the cost model."""
    dask_scheduler.extensions["hoplite"].reductions.degree = degree
