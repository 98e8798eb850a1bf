"""How large objects are of whose classes Dask knows nothing.

Dask takes each of these for some 56 bytes: a model of scikit-learn or XGBoost, or an object of the
user that holds an array. So it would count as small, and not go by Hoplite. What goes over the wire
is its pickle, so this is measured here, as far as that costs little, and without keeping the bytes.
"""

from __future__ import annotations

import pickle
import sys
import threading
import weakref
from contextlib import suppress
from time import monotonic
from types import FunctionType, ModuleType
from typing import Any

from dask.sizeof import sizeof

#: Of smaller objects, Dask's own figure stands: others decide by it what to send how.
SMALL = 100_000

#: So many bytes of a pickle are made at most. Who has more is large; how large, shows on the way;
#: arrays, which need not be copied, are counted in full.
ENOUGH = 8 * 2**20

#: Seconds for which a measurement holds, as Dask asks several times in a row. Objects change.
FRESH = 5.0

#: Packages whose objects are what Dask takes them for: scalars are small, and Dask's own messages
#: and tasks, which are measured for each message, count by themselves what is in them.
TRUSTED = frozenset({"builtins", "numpy", "datetime", "dask", "distributed"})

#: What uses this in the process, by identity: workers' plugins and clients
_users: set[int] = set()

#: Clients and workers come and go in threads of their own; and what is collected goes in any.
_lock = threading.RLock()

#: Sizes by the identities of objects, and until when they hold
_known: dict[int, tuple[weakref.ref[Any], int, float]] = {}

_plain = sizeof.dispatch(object)


def install(user: Any) -> None:
    """Measure objects of unknown classes, for as long as somebody in this process uses this."""
    with _lock:
        if id(user) not in _users:
            _users.add(id(user))
            # Clients are often dropped without a word.
            weakref.finalize(user, _leave, id(user)).atexit = False
        _replace(_plain, measure)


def uninstall(user: Any) -> None:
    """Leave it to Dask again, if nobody else uses this."""
    _leave(id(user))


def _leave(user: int) -> None:
    with _lock:
        _users.discard(user)
        if not _users:
            _replace(measure, _plain)


def _replace(old: Any, new: Any) -> None:
    """Let Dask find another function for unknown classes, and for those that it has looked up.

    Other threads look up meanwhile, so there is always one. What others have registered stays.
    """
    if sizeof.dispatch(object) is old:
        sizeof.register(object, new)
        for cls in [cls for cls, function in list(sizeof._lookup.items()) if function is old]:
            sizeof.register(cls, new)


def note(value: Any, nbytes: int) -> None:
    """Remember the size of an object that has just arrived, and so need not be measured."""
    if sizeof.dispatch(type(value)) is measure and nbytes >= SMALL:
        _remember(value, nbytes, float("inf"))


def measure(value: Any) -> int:
    """Bytes of an object as pickled, if that is large and can be told; otherwise as Dask has it."""
    if _is_trusted(type(value)):
        return sys.getsizeof(value)
    known = _known.get(id(value))
    if known is not None and known[0]() is value and monotonic() < known[2]:
        return known[1]
    nbytes = sys.getsizeof(value)
    pickled = _pickled(value)
    if pickled >= SMALL:
        nbytes = max(nbytes, pickled)
        _remember(value, nbytes, monotonic() + FRESH)
    return nbytes


def _is_trusted(cls: type) -> bool:
    module = cls.__module__
    # Of NumPy, scalars: in its subpackages there are objects that hold arrays.
    return module in TRUSTED or str(module).startswith(("dask.", "distributed."))


def _remember(value: Any, nbytes: int, until: float) -> None:
    identity = id(value)

    def forget(ref: weakref.ref[Any]) -> None:
        if (known := _known.get(identity)) is not None and known[0] is ref:
            del _known[identity]

    with suppress(TypeError):  # there are no such references to it, so it is measured each time
        _known[identity] = weakref.ref(value, forget), nbytes, until


def _pickled(value: Any) -> int:
    count = _Count()
    try:
        _Pickler(count, 5, buffer_callback=count.aside).dump(value)
    except _Enough:
        pass
    except Exception:  # of any kind, as classes may define how they are pickled
        return 0
    return count.nbytes


class _Enough(Exception):
    """There is no need to make more of a pickle."""


def _nothing() -> None:
    """Stands in a pickle for what is not measured."""


class _Pickler(pickle.Pickler):
    """Passes over code, which is small, but cannot always be pickled by its name.

    A worker does not have the main module of a notebook, whose classes and functions it got.
    """

    def reducer_override(self, value: Any) -> Any:
        """What is to be pickled in place of an object, if anything."""
        if isinstance(value, type | FunctionType | ModuleType) and value is not _nothing:
            return _nothing, ()
        return NotImplemented


class _Count:
    """A file that only counts what is written."""

    def __init__(self) -> None:
        self.written = self.nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Count some bytes."""
        size = memoryview(data).nbytes
        self.written += size
        self.nbytes += size
        if self.written > ENOUGH:
            raise _Enough
        return size

    def aside(self, buffer: pickle.PickleBuffer) -> None:
        """Count a buffer that need not be copied."""
        self.nbytes += memoryview(buffer).nbytes
