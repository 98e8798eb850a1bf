"""The operands of reductions: their sum is exact, in whatever order they are added.

They are whole numbers of 0 to 255 in float32. The first ones tell whose operand it is, so a sum
tells what is in it. This needs nothing but numpy: the peers' processes may have no Dask.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np


def operand(nbytes: int, index: int, n: int, seed: int) -> np.ndarray:
    """Make the operand of one of `n` workers, always the same one for a seed."""
    values = np.random.default_rng([seed, index]).bytes(nbytes // 4)
    array = np.frombuffer(values, "u1").astype("f4")
    array[:n] = 0
    array[index] = 1
    return array


def total(nbytes: int, indices: Iterable[int], n: int, seed: int) -> np.ndarray:
    """The sum of the operands of some workers."""
    result = np.zeros(nbytes // 4, "f4")
    for index in indices:
        result += operand(nbytes, index, n, seed)
    return result


def checksum(array: np.ndarray) -> int:
    """Read all of an array."""
    return zlib.crc32(array.data)
