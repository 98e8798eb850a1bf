"""Values that follow from their names, so that each can be checked wherever it arrives."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np


def make(tag: str, nbytes: int) -> Any:
    """The value of that name: an array, a dict of two, or bytes."""
    seed = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest())
    words = np.random.SFC64(seed).random_raw(nbytes // 8 + 1)
    array = words.view("u1")[:nbytes].copy()
    if seed % 8 == 0:
        return array.tobytes()
    if seed % 8 == 1 and nbytes > 1:
        return {"a": array[: nbytes // 3], "b": array[nbytes // 3 :]}
    return array


def digest(value: Any) -> str:
    """A checksum of all the bytes, and the type."""
    parts = list(value.values()) if isinstance(value, dict) else [value]
    sums = [f"{zlib.crc32(part):08x}/{len(part)}" for part in parts]
    return f"{type(value).__name__} {' '.join(sums)}"


def same(a: Any, b: Any) -> bool:
    """Whether two values agree in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)
