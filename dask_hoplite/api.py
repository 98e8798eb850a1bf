"""Collectives on futures."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distributed import Client, Future
from distributed.client import futures_of, no_default

from dask_hoplite.client import ask, check, extension, or_current
from dask_hoplite.exceptions import TransferError
from dask_hoplite.reporting.representations import Status, Transfers


def broadcast(
    x: Any,
    workers: Collection[str] | str | None = None,
    client: Client | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """Bring an object to all workers, and keep it there until its future is released.

    Parameters
    ----------
    x : object or Future
        A value, or the future of one. A future's value goes from worker to worker and touches
        neither the client nor the scheduler.
    workers : collection of str, optional
        Addresses or names. Default: all workers, those that join later included.
    client : Client, optional
        Default: the current client; inside a task the worker's.
    timeout : float, optional
        Seconds to wait for a first worker. Default: the client's.

    Returns
    -------
    Future
        The given one, or one for the given value. With an asynchronous client, an awaitable.

    Raises
    ------
    TransferError
        If the future was released meanwhile.
    ObjectTooLargeError
        If the memory limit of a worker that was named, or of every worker, is below the size.
    TimeoutError
        If there is no worker in time.
    NotInstalledError
        If the cluster has no Hoplite.
    ValueError
        If there is no such worker, or the future is another client's.
    Exception
        That of the future's task, if it failed.

    Notes
    -----
    Receivers form a pipeline: each sends on what it has while the rest still comes. Whoever leaves
    is replaced; who comes is fed. A value scattered this way has a key of its own each time.

    Examples
    --------
    >>> weights = hoplite.broadcast(np.arange(1_000_000.0))
    >>> len(client.who_has()[weights.key])  # there are three workers
    3
    >>> client.submit(lambda weights, i: float(weights[i]), weights, 7).result()
    7.0
    """
    client = or_current(client)
    return client.sync(_broadcast, client, x, _workers(workers), timeout)


async def _broadcast(
    client: Client, x: Any, workers: list[str] | None, timeout: float | None
) -> Future:
    await extension(client)
    if not isinstance(x, Future):
        [x] = await client._scatter(
            [x],
            workers=workers,
            broadcast=True,
            timeout=no_default if timeout is None else timeout,
            hash=False,
        )
        await client.scheduler.hoplite_broadcast(key=x.key, workers=workers)
        return x
    check(client, [x])
    assert x._state is not None
    await x._state.wait()
    if x.status == "error":
        await x  # raises what the task raised
    if x.status != "finished":
        raise TransferError(x.key, f"cannot be broadcast: it is {x.status}")
    await client.scheduler.hoplite_broadcast(key=x.key, workers=workers)
    return x


def scatter(
    values: Any, workers: Collection[str] | str | None = None, client: Client | None = None
) -> Any:
    """Send values to workers, streamed.

    Parameters
    ----------
    values : object
        As for :meth:`distributed.Client.scatter`: a list, tuple, set or dict of values, or one
        value.
    workers : collection of str, optional
        Addresses or names. Default: any.
    client : Client, optional
        Default: the current client; inside a task the worker's.

    Returns
    -------
    list, tuple, set or dict of Future, or Future
        Of the same kind as ``values``. With an asynchronous client, an awaitable.

    Raises
    ------
    ObjectTooLargeError
        If an object fits no worker.
    TimeoutError
        If there is no worker within the client's timeout.
    NotInstalledError
        If the cluster has no Hoplite.

    Examples
    --------
    >>> ones, zeros = hoplite.scatter([np.ones(1_000_000), np.zeros(1_000_000)])
    >>> float(client.submit(np.sum, ones).result())
    1000000.0
    """
    client = or_current(client)
    return client.sync(_scatter, client, values, _workers(workers))


async def _scatter(client: Client, values: Any, workers: list[str] | None) -> Any:
    await extension(client)
    return await client._scatter(values, workers=workers)


def gather(futures: Any, client: Client | None = None) -> Any:
    """Get the values of futures, streamed from the workers that hold them.

    Parameters
    ----------
    futures : Future or nested container of Future
        What to get.
    client : Client, optional
        Default: the current client; inside a task the worker's.

    Returns
    -------
    object
        The values in place of the futures. With an asynchronous client, an awaitable.

    Raises
    ------
    NotInstalledError
        If the cluster has no Hoplite.
    ValueError
        If a future is another client's.
    Exception
        That of a future's task, if it failed.

    Examples
    --------
    >>> parts = client.map(np.full, [1_000_000, 2_000_000], [0.5, 1.5])
    >>> values = hoplite.gather({"small": parts[0], "large": parts[1:]})
    >>> values["small"].nbytes, values["large"][0].nbytes
    (8000000, 16000000)
    """
    client = or_current(client)
    return client.sync(_gather, client, futures)


async def _gather(client: Client, futures: Any) -> Any:
    await extension(client)
    check(client, futures_of(futures))
    return await client._gather(futures)


def transfers(client: Client | None = None) -> Any:
    """All transfers that are running, or that ended not too long ago.

    Parameters
    ----------
    client : Client, optional
        Default: the current client; inside a task the worker's.

    Returns
    -------
    list of dict
        ``key``, ``source`` and ``receiver`` (addresses; a client's id where it pushed), ``nbytes``,
        ``received`` (bytes), ``resumed_from`` (the byte at which this source took over), ``start``
        and ``stop`` (seconds since the epoch, by the scheduler's clock; ``stop`` is None while it
        runs), ``latency`` (seconds to the first byte from this source; None if that is not known),
        ``status`` ("running", "finished", or why it ended), ``path`` (how the bytes went),
        ``reason`` (why this source was chosen). It shows itself as a table. With an asynchronous
        client, an awaitable.

    Examples
    --------
    >>> weights = hoplite.broadcast(np.ones(1_000_000))
    >>> sum(t["nbytes"] for t in hoplite.transfers() if t["key"] == weights.key)
    24000000
    """
    client = or_current(client)
    return client.sync(_transfers, client)


def status(client: Client | None = None) -> Any:
    """What Hoplite is doing.

    Parameters
    ----------
    client : Client, optional
        Default: the current client; inside a task the worker's.

    Returns
    -------
    dict
        ``workers``: by address ``bytes_in`` and ``bytes_out`` by Hoplite, keys held ``whole``,
        ``partial`` (bytes by key), ``waiting`` (keys); ``objects``: by key ``nbytes``, ``holders``
        and the present ``tree`` (for each receiver its source, the bytes it has, and the reason
        for the choice); ``version``. It shows itself as tables. With an asynchronous client, an
        awaitable.

    Examples
    --------
    >>> weights = hoplite.broadcast(np.ones(1_000_000))
    >>> [weights.key in worker["whole"] for worker in hoplite.status()["workers"].values()]
    [True, True, True]
    """
    client = or_current(client)
    return client.sync(_status, client)


async def _transfers(client: Client) -> Transfers:
    return Transfers(await ask(client, "hoplite_transfers"))


async def _status(client: Client) -> Status:
    return Status(await ask(client, "hoplite_status"))


def _workers(workers: Collection[str] | str | None) -> list[str] | None:
    if workers is None:
        return None
    return [workers] if isinstance(workers, str | int) else list(workers)
