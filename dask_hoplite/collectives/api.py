"""Reductions on futures, as clients ask for them."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from time import monotonic
from typing import Any

import dask
import numpy as np
from dask.utils import parse_timedelta
from distributed import Client, Future
from distributed.protocol.pickle import dumps, loads

from dask_hoplite.batch import Batch
from dask_hoplite.client import check, extension, or_current
from dask_hoplite.collectives.operands import Op, block_of, combine_here, weigh
from dask_hoplite.collectives.starting import ANNOTATION
from dask_hoplite.exceptions import NotInstalledError, TransferError

Operation = str | np.ufunc | Callable[[Any, Any], Any]

#: Whoever waits for a reduction has waited for all of its operands already: it goes first.
PRIORITY = 100

#: Seconds in which the scheduler has heard of what a client has submitted
GRAPHS = 3.0


def reduce(
    futures: Iterable[Future],
    op: Operation = "sum",
    num_objects: int | None = None,
    root: str | None = None,
    timeout: float | str | None = None,
    client: Client | None = None,
    *,
    ordered: bool = False,
    weights: Iterable[float] | None = None,
) -> Any:
    """Combine the values of futures to one, on the way from worker to worker.

    Parameters
    ----------
    futures : iterable of Future
        The operands: NumPy arrays of any dtype and shape, numbers, Torch tensors in the memory of
        the CPU, or nested dicts, lists and tuples of those; all of the same structure and shapes.
        With a callable as ``op``, any objects.
    op : str, numpy.ufunc or callable
        "sum", "prod", "min", "max", "mean", a binary NumPy ufunc, or a function of two values. It
        must be associative and commutative. NaN, overflow, and mixed item sizes are treated as by
        :meth:`numpy.ufunc.reduce` over the stacked operands; a mean is divided by the number of
        operands that went in.
    num_objects : int, optional
        Take so many operands, the first that are ready, and leave the others alone. Which ones, is
        said by :func:`contributors`. Default: all.
    root : str, optional
        Address or name of the worker that is to have the result. If it leaves, it is another one.
        Default: one that Dask chooses.
    timeout : float or str, optional
        Seconds, or such as "2 minutes", after which the reduction fails if it has no result.
    client : Client, optional
        Default: the current client; inside a task the worker's.
    ordered : bool
        Combine the operands in the order given, each with the sum of those before it, wherever
        they are: equal bits each time, also of floating-point numbers. May cross the network more
        often.
    weights : iterable of float, optional
        One finite real number for each of the futures. Each operand is multiplied by its own, where
        it is, before it is combined: whatever ``num_objects`` leaves out, and whatever is computed
        again, each keeps its weight. The operands themselves stay as they are.

    Returns
    -------
    Future
        That of the result, at once. It is a task of Dask like others: it can be an argument before
        it exists, is computed again if it is lost, and is given up with its last future. With an
        asynchronous client, an awaitable of it.

    Raises
    ------
    ValueError
        If there are no operands, one comes twice or is of another client; if ``num_objects`` is not
        from 1 to their number; if there is no such operation or worker; if ``weights`` are not as
        many as operands, or one is not finite.
    TypeError
        If ``op`` is nothing that combines two values, or an operand is no future; if there are
        ``weights``, and one is no real number or ``op`` is not of NumPy.
    CancelledError
        If an operand was released or cancelled.
    NotInstalledError
        If the cluster has no Hoplite.
    Exception
        That of an operand's task, if it has failed, and fewer than needed are left.

    Notes
    -----
    The future itself fails with :class:`~dask_hoplite.OperandError` (a ValueError that names both
    keys) if operands do not match, with :class:`~dask_hoplite.ReductionError` if too few of them
    are left, with :class:`TimeoutError`, or with what an operand's task or ``op`` has raised.

    Operands are combined in the order in which they become ready, those of one worker first, then
    those of one host. Sums go on block by block while they are formed (Hoplite, SIGCOMM 2021,
    section 3.4). The result has the dtype that ``ufunc.reduce`` gives; with weights, that of
    operands that were multiplied by a Python float: ``float32`` stays what it is, integers become
    ``float64``. A "mean" of those is their sum divided by their number, not by the sum of weights.
    What cannot be weighted (times, Python's objects) fails with an ``OperandError``.

    Examples
    --------
    >>> gradients = client.map(np.full, [1_000_000] * 3, [1.0, 2.0, 4.0])
    >>> total = hoplite.reduce(gradients)
    >>> float(total.result()[-1])
    7.0

    It is an argument as others are, also before it exists:

    >>> mean = hoplite.reduce(gradients, "mean", weights=[1, 0.5, 0.25])
    >>> client.submit(lambda mean: float(mean[0]), mean).result()
    1.0

    The first two that are ready, and which these were:

    >>> step = hoplite.reduce(gradients, num_objects=2)
    >>> used = hoplite.contributors(step)
    >>> float(step.result()[0]) == sum(float(gradient.result()[0]) for gradient in used)
    True
    """
    client = or_current(client)
    wish = _wish(Op.of(op), num_objects, timeout, ordered, weights)
    named = [] if root is None else [root]
    return client.sync(_submit, client, "reduce", futures, wish, named)


def allreduce(
    futures: Iterable[Future],
    op: Operation = "sum",
    num_objects: int | None = None,
    workers: Collection[str] | str | None = None,
    timeout: float | str | None = None,
    client: Client | None = None,
    *,
    ordered: bool = False,
    weights: Iterable[float] | None = None,
) -> Any:
    """Combine the values of futures to one that is on every worker that contributed.

    Parameters
    ----------
    futures, op, num_objects, timeout, client, ordered, weights
        As for :func:`reduce`.
    workers : collection of str, optional
        Addresses or names of the workers that are to have the result. Default: those that
        contributed.

    Returns
    -------
    Future
        That of the result, at once. It is finished when all have it. The copies stay until it is
        released. With an asynchronous client, an awaitable of it.

    Raises
    ------
    Exception
        As :func:`reduce`.

    Notes
    -----
    Large operands that are all ready go round in a ring, in which each worker combines a share and
    tells the others (reduce-scatter and allgather). Otherwise the result spreads from its root
    while it is still being formed there.

    Examples
    --------
    >>> address = list(client.nthreads())
    >>> models = [client.submit(np.full, 1_000_000, n, workers=address[n]) for n in range(3)]
    >>> mean = hoplite.allreduce(models, "mean")
    >>> float(mean.result()[-1])
    1.0
    >>> len(client.who_has()[mean.key])
    3
    """
    client = or_current(client)
    wish = _wish(Op.of(op), num_objects, timeout, ordered, weights)
    named = _named(workers)
    wish["spread"] = "workers" if named else "contributors"
    return client.sync(_submit, client, "allreduce", futures, wish, named)


def allgather(
    futures: Iterable[Future],
    workers: Collection[str] | str | None = None,
    client: Client | None = None,
) -> Any:
    """Bring the values of all futures to every worker that holds one of them.

    Parameters
    ----------
    futures : iterable of Future
        What is gathered: any objects.
    workers : collection of str, optional
        Addresses or names of the workers that are to have all. Default: those that hold one.
    client : Client, optional
        Default: the current client; inside a task the worker's.

    Returns
    -------
    Future
        That of the list of the values, in the order given. It is finished when all have it. The
        copies stay until it is released. With an asynchronous client, an awaitable of it.

    Raises
    ------
    Exception
        As :func:`reduce`.

    Examples
    --------
    >>> parts = client.map(np.full, [1_000_000] * 2, ["a", "b"])
    >>> everything = hoplite.allgather(parts)
    >>> client.submit(lambda parts: [str(part[0]) for part in parts], everything).result()
    ['a', 'b']
    """
    client = or_current(client)
    wish = _wish(None)
    named = _named(workers)
    wish["spread"] = "workers" if named else "contributors"
    return client.sync(_submit, client, "allgather", futures, wish, named)


def reduce_scatter(
    futures: Iterable[Future],
    op: Operation = "sum",
    workers: Collection[str] | str | None = None,
    client: Client | None = None,
) -> Any:
    """Combine the values of futures, and leave a block of the result on each worker.

    Parameters
    ----------
    futures, op, client
        As for :func:`reduce`; every array has at least one axis.
    workers : collection of str, optional
        Addresses or names of the workers that are to have a block each, in this order. Default:
        those that hold the operands, in the order of these; it waits until they do.

    Returns
    -------
    list of Future
        The blocks of the result along the first axis, as :func:`numpy.array_split` would make them,
        one for each worker. With an asynchronous client, an awaitable.

    Raises
    ------
    Exception
        As :func:`reduce`.

    Notes
    -----
    Where each worker that holds operands is to have a block, these go round in a ring, and each
    link carries ``(n-1)/n`` of the bytes. If the ring breaks, or others are to have the blocks,
    each block is a reduction of its own.

    Examples
    --------
    >>> operands = client.map(np.arange, [6_000_000] * 2, pure=False)
    >>> blocks = hoplite.reduce_scatter(operands, workers=list(client.nthreads()))
    >>> [len(block) for block in client.gather(blocks)]
    [2000000, 2000000, 2000000]
    """
    client = or_current(client)
    return client.sync(_reduce_scatter, client, futures, _wish(Op.of(op)), _named(workers))


async def _reduce_scatter(
    client: Client, futures: Iterable[Future], wish: dict[str, Any], named: list[str]
) -> list[Future]:
    await extension(client)
    futures = _operands(futures)
    await _check_operands(client, futures, len(futures))
    keys = [future.key for future in futures]
    if not named:
        for future in futures:
            assert future._state is not None
            await future._state.wait()
        await _check_operands(client, futures, len(futures))
        located = await client.scheduler.hoplite_locate(keys=keys)
        named = list(dict.fromkeys(sorted(located[key][1])[0] for key in keys if key in located))
    group = uuid.uuid4().hex
    answer = await client.scheduler.hoplite_hold(key=group, operands=[], workers=named)
    wish |= {"operands": keys, "count": len(keys)}
    blocks = len(named)
    return [
        _task(
            client,
            f"reduce-scatter-{group}-{number}",
            futures,
            {**wish, "block": (number, blocks, group)},
            [address],
        )
        for number, address in enumerate(answer["addresses"])
    ]


def contributors(future: Future, client: Client | None = None) -> Any:
    """The futures that went into a reduction; waits until it is known.

    Parameters
    ----------
    future : Future
        What :func:`reduce` or :func:`allreduce` gave.
    client : Client, optional
        Default: the current client; inside a task the worker's.

    Returns
    -------
    list of Future
        In the order in which they were given. With an asynchronous client, an awaitable.

    Raises
    ------
    ValueError
        If it is not the future of a reduction.
    Exception
        What the reduction failed with.

    Examples
    --------
    >>> operands = client.map(np.full, [1_000_000] * 3, [1.0, 2.0, 4.0])
    >>> len(hoplite.contributors(hoplite.reduce(operands, num_objects=2)))
    2
    """
    client = or_current(client)
    return client.sync(_contributors, client, future)


async def _contributors(client: Client, future: Future) -> list[Future]:
    await extension(client)
    check(client, [future])
    assert future._state is not None
    await future._state.wait()
    if future.status == "error":
        await future  # raises
    keys = await client.scheduler.hoplite_contributors(key=future.key)
    if keys is None:
        raise ValueError(f"{future.key!r} is not the result of a reduction")
    return [Future(key, client) for key in keys]


def _named(workers: Collection[str] | str | None) -> list[str]:
    """Workers that are to have a result; none if the user did not say."""
    if workers is None:
        return []
    named = [workers] if isinstance(workers, str | int) else list(workers)
    if not named:
        raise ValueError("there are no workers to have the result")
    return named


def _wish(
    op: Op | None,
    num_objects: int | None = None,
    timeout: float | str | None = None,
    ordered: bool = False,
    weights: Iterable[float] | None = None,
) -> dict[str, Any]:
    """What a reduction's task tells the scheduler, apart from its operands."""
    if num_objects is not None:
        if ordered:
            raise ValueError("the first that are ready have no fixed order: num_objects or ordered")
        if isinstance(num_objects, bool) or not isinstance(num_objects, int | np.integer):
            raise TypeError(f"num_objects is a number of operands, not {num_objects!r}")
        num_objects = int(num_objects)
    if weights is not None and op is not None and op.ufunc is None:
        raise TypeError(f"weights are for numbers, and {op.name} may combine anything")
    return {
        "count": num_objects,
        "op": None if op is None else dumps(op),
        "timeout": None if timeout is None else _seconds(timeout),
        "ordered": ordered,
        "weights": None if weights is None else [_weight(weight) for weight in weights],
        "spread": None,
        "block": None,
    }


def _weight(weight: Any) -> float:
    if not isinstance(weight, Real):
        raise TypeError(f"a weight is a real number, not {weight!r}")
    try:
        number = float(weight)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"a weight is a finite number, not {weight!r}")
    return number


def _seconds(timeout: float | str) -> float:
    try:
        seconds = float(parse_timedelta(timeout) if isinstance(timeout, str) else timeout)
    except (KeyError, ValueError, TypeError):
        seconds = -1
    if not seconds >= 0:
        raise ValueError(f"a timeout is a number of seconds, not {timeout!r}")
    return seconds


async def _submit(
    client: Client, name: str, futures: Iterable[Future], wish: dict[str, Any], named: list[str]
) -> Future:
    """Ask for a reduction."""
    await extension(client)
    futures = _operands(futures)
    # If not all are needed, it is not known yet what the task depends on.
    some = wish["count"] is not None or wish["timeout"] is not None
    wish["count"] = len(futures) if wish["count"] is None else wish["count"]
    await _check_operands(client, futures, wish["count"])
    key = f"{name}-{uuid.uuid4().hex}"
    _add_operands(wish, futures)
    addresses: list[str] = []
    if some or named:
        held = wish["operands"] if some else []
        answer = await client.scheduler.hoplite_hold(key=key, operands=held, workers=named)
        deadline = monotonic() + GRAPHS
        while answer["missing"]:
            # The scheduler has waited for them; but large graphs take longer.
            if monotonic() > deadline and not answer["busy"]:
                raise TransferError(answer["missing"][0], "it was released, and cannot be combined")
            await _check_operands(client, futures, wish["count"])
            answer = await client.scheduler.hoplite_hold(key=key, operands=held, workers=named)
        addresses = answer["addresses"]
        if wish["spread"] == "workers":
            wish["spread"] = addresses
    return _task(client, key, [] if some else futures, wish, addresses)


def _add_operands(wish: dict[str, Any], futures: list[Future]) -> None:
    wish["operands"] = [future.key for future in futures]
    if (weights := wish["weights"]) is not None:  # by key, as it is not known which will be taken
        if len(weights) != len(futures):
            raise ValueError(f"there are {len(weights)} weights for {len(futures)} operands")
        wish["weights"] = dict(zip(wish["operands"], weights, strict=True))


def first_of(
    batch: Batch, futures: list[Future], count: int, root: str, weights: list[float] | None
) -> Future:
    """The sum of the first futures that are ready, submitted in a batch, as they may be too.

    Parameters
    ----------
    batch : Batch
    futures : list of Future
        The operands. Whoever asks keeps them until there is a result.
    count : int
        How many are taken.
    root : str
        Address of the worker that is to have the sum.
    weights : list of float, optional
        One for each of the futures.
    """
    wish = _wish(Op.of("sum"), count, weights=weights)
    _add_operands(wish, futures)
    call, annotations = _call([], wish, [root])
    return batch.submit(*call, key=f"reduce-{uuid.uuid4().hex}", **annotations)


def _task(
    client: Client, key: str, futures: list[Future], wish: dict[str, Any], addresses: list[str]
) -> Future:
    """The task that is a reduction, on one of some workers if it can be."""
    call, annotations = _call(futures, wish, addresses)
    with dask.annotate(**annotations):
        return client.submit(*call, key=key, pure=False)


def _call(
    futures: list[Future], wish: dict[str, Any], addresses: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a reduction's task calls with what, and its annotations."""
    where = {"workers": addresses, "allow_other_workers": True} if addresses else {}
    priority = dask.get_annotations().get("priority", PRIORITY)
    weights = None if wish["weights"] is None else list(wish["weights"].values())
    call = combine_plainly, wish["op"], wish["block"], weights, *futures
    return call, {ANNOTATION: wish, "priority": priority, **where}


def _operands(futures: Iterable[Future]) -> list[Future]:
    """What is to be combined, of whatever is given for it."""
    if isinstance(futures, Future) or not isinstance(futures, Iterable):
        raise TypeError(f"operands are several futures, as in a list, not one {futures!r}")
    return list(futures)


async def _check_operands(client: Client, futures: list[Future], count: int) -> None:
    """Refuse, at once and by name, what cannot come to a result."""
    if not futures:
        raise ValueError("there are no operands")
    seen: set[Any] = set()
    for future in futures:
        if not isinstance(future, Future):
            raise TypeError(f"an operand is a future, not a {type(future).__name__}: {future!r}")
        if future.key in seen:
            raise ValueError(f"{future.key!r} is given twice; each operand counts once")
        seen.add(future.key)
    if not 1 <= count <= len(futures):
        raise ValueError(f"num_objects must be from 1 to {len(futures)}, not {count}")
    await asyncio.sleep(0)  # what was released a moment ago is gone now
    check(client, futures)
    erred = [future for future in futures if future.status == "error"]
    if len(futures) - len(erred) < count:
        await erred[0]  # raises what the task raised


def combine_plainly(
    op: bytes | None,
    block: tuple[Any, ...] | None,
    weights: list[float] | None,
    *operands: Any,
) -> Any:
    """What the task of a reduction does if Hoplite was uninstalled before it ran."""
    if not operands:
        raise NotInstalledError("Hoplite was uninstalled before this reduction had a result")
    if op is None:
        return list(operands)
    if block is not None:
        operands = tuple(block_of(operand, *block[:2]) for operand in operands)
    if weights is not None:
        operands = tuple(map(weigh, operands, weights))
    return combine_here(loads(op), operands)
