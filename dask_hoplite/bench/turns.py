"""The systems take turns: the loops over operations, sizes, repetitions and systems."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

#: In these, plain Dask's memory manager drops copies while others are being made, so that a single
#: repetition can take minutes.
SLOW_IN_PLAIN = ("scatter", "scatter-plain-client", "replicate")

Record = dict[str, Any]


class Side(Protocol):
    """What is compared: a system on a cluster."""

    system: str


AnySide = TypeVar("AnySide", bound=Side)


def compare(
    sides: Sequence[AnySide],
    measure: Callable[..., Record],
    ops: Sequence[str],
    sizes: Sequence[int],
    reps: int,
    slow_reps: int,
    later: float,
    cold: Collection[str] = (),
    slow: Collection[str] = SLOW_IN_PLAIN,
    least: int | None = None,
) -> Iterator[Record]:
    """Measure operations; a record is yielded as soon as it is there.

    Parameters
    ----------
    sides : sequence of Side
        What is compared.
    measure : callable
        Does an operation once, given a side and, by keyword, ``op``, ``nbytes`` and ``later``. An
        error is in its record, and then the next call finds the side as if it were fresh.
    ops : sequence of str
        Names of operations.
    sizes : sequence of int
        Bytes of an array.
    reps, slow_reps : int
        Repetitions, and those of plain Dask in the operations where it is slow.
    later : float
        Copies are counted at the end of an operation and again this many seconds later.
    cold : collection of str
        Operations that are not warmed up, by doing them once.
    slow : collection of str
        Operations in which plain Dask is slow.
    least : int, optional
        Size at which they are warmed up. Default: the smallest of ``sizes``.
    """
    for op in ops:
        warm_up = partial(measure, op=op, nbytes=least or min(sizes), later=0)
        for side in sides if op not in cold else ():
            warm_up(side)
        fewer = {"plain": slow_reps} if op in slow else {}
        for nbytes in sizes:
            once = partial(measure, op=op, nbytes=nbytes, later=later)
            for record in take_turns(sides, once, warm_up, reps, fewer):
                yield {"op": op, "nbytes": nbytes, **record}


def take_turns(
    sides: Sequence[AnySide],
    measure: Callable[[AnySide], Record],
    warm_up: Callable[[AnySide], Record],
    reps: int,
    slow: Mapping[str, int] | None = None,
) -> Iterator[Record]:
    """Repeat a measurement; each time, another system is the first.

    ``slow`` has, by system, how often it is measured at most. One that fails is given up.
    """
    given_up = set()
    for rep in range(reps):
        for side in sides[:: -1 if rep % 2 else 1]:
            if rep >= (slow or {}).get(side.system, reps) or side.system in given_up:
                continue
            record = measure(side)
            yield {"system": side.system, "rep": rep, **record}
            if "error" in record:
                given_up.add(side.system)
                warm_up(side)  # it is a fresh one by now


def once(
    call: Callable[..., Any],
    op: str,
    nbytes: int,
    later: float,
    timeout: float,
    around: AbstractContextManager[object] | None = None,
    **how: Any,
) -> Record:
    """Do an operation once, step by step; what is timed is done within ``around``.

    Parameters
    ----------
    call : callable
        Calls a method of a :class:`~dask_hoplite.bench.operations.Runner`, given by name, with
        arguments, and ``timeout`` in seconds.
    """
    call("prepare", op=op, nbytes=nbytes, **how)
    with around or nullcontext():
        record: Record = call("run", timeout=timeout)
    end = time.monotonic()
    record["correct"] = call("correct")
    if record["copies"] is not None:
        time.sleep(max(0, end + later - time.monotonic()))
        record["copies_later"] = call("copies")
    call("release")
    return record
