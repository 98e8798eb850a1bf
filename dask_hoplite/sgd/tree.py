"""Nested parameters: dicts, lists and tuples of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dask_hoplite.collectives.operands import flatten, unflatten


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to each array of nested ones.

    Parameters
    ----------
    function : callable
        Takes an array of each tree; gives one of the same shape.
    tree, *others : nested dicts, lists and tuples of arrays
        All of one structure.

    Returns
    -------
    object
        Nested as ``tree``.

    Raises
    ------
    OperandError
        If a leaf is no array or number.
    ValueError
        If structures differ.

    Examples
    --------
    >>> tree_map(lambda w, g: w - g / 2, {"w": np.ones(2)}, {"w": np.ones(2)})
    {'w': array([0.5, 0.5])}
    """
    signature, arrays = flatten(tree)
    columns = [arrays]
    for other in others:
        theirs, more = flatten(other)
        if (how := signature.differs(theirs)) is not None:
            raise ValueError(f"the trees differ: {how}")
        columns.append(more)
    results = (np.asarray(function(*leaves)) for leaves in zip(*columns, strict=True))
    return unflatten(signature, results)
