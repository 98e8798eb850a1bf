"""An ensemble that answers queries: each of its models predicts, and what they say is combined.

A query goes to the models' workers as one pipeline, each model predicts where it is, and the
predictions are combined on their way from worker to worker.

>>> from dask_hoplite import serving
>>> models = client.map(lambda seed: np.random.default_rng(seed).random((10, 3)), range(3))
>>> ask = lambda model, query: query @ model
>>> with serving.Ensemble(models, "argmax", predict=ask, quorum=2) as ensemble:
...     print(ensemble.predict(np.ones((5, 10))).value)
...     answers = [ensemble.submit(np.eye(10)[i]) for i in range(4)]  # all at a time
...     print([int(answer.result().value) for answer in answers])
[1 1 1 1 1]
[1, 2, 0, 1]
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed import Client, Future

from dask_hoplite.client import check, extension, gathered, or_current
from dask_hoplite.collectives.api import Operation, contributors, reduce
from dask_hoplite.collectives.members import Members, Query, error_of, settled
from dask_hoplite.collectives.operands import Op

#: Ways to combine that are a sum, and then the index of the largest along the last axis
CHOICES = ("argmax", "vote")

#: Answers whose seconds are remembered
HISTORY = 10_000


@dataclass(frozen=True)
class Answer:
    """What an ensemble says to a query.

    Parameters
    ----------
    value : object
        The predictions, combined.
    models : tuple
        Names of the models that are in it, in the order given.
    seconds : float
        How long it took, on the client.
    failed : dict
        By name, why a model is not in it, of those that could not predict in time.
    """

    value: Any
    models: tuple[Hashable, ...]
    seconds: float
    failed: dict[Hashable, str]


class Ensemble:
    """Models on workers that answer queries together.

    Parameters
    ----------
    models : iterable or mapping of hashable to object
        The models, perhaps by name; otherwise their names are numbers. Futures, or values, which
        are then scattered. Each stays where it is; it has a method ``predict`` or is called.
    combine : str, numpy.ufunc or callable
        An operation of :func:`dask_hoplite.reduce`, such as "mean" or "sum"; "argmax" of the sum
        along the last axis; or "vote": what most models have as their argmax, the first if several.
    client : Client, optional
        Default: the current client; inside a task the worker's.
    predict : callable, optional
        Makes a prediction, given a model and a query. It may change neither.
    num_objects : int, optional
        Answer with the first so many predictions; the others are given up. Default: all.
    timeout : float, optional
        Seconds after which a query is answered with those predictions that are there.
    quorum : int
        With fewer predictions there is no answer.

    Notes
    -----
    A query is handed out while it arrives; a future, from where it is. Queries do not wait for each
    other, but a worker makes one prediction after the other for each of its threads.

    The first query waits until all models are there. From then on, a model is left out as long as
    it is not in memory: lost with its worker, it is back when Dask has computed it again, which it
    can if it was given as the future of a task. A query that is under way is answered by those that
    are left. A model that was too late for one query is asked again when its worker has answered
    that it is not frozen, or if there are too few others. A worker that freezes is noticed by a
    ``timeout`` or ``num_objects`` only.

    With an asynchronous client, methods return awaitables; use ``async with``.
    """

    def __init__(
        self,
        models: Iterable[Any] | Mapping[Hashable, Any],
        combine: Operation = "mean",
        client: Client | None = None,
        *,
        predict: Callable[[Any, Any], Any] | None = None,
        num_objects: int | None = None,
        timeout: float | None = None,
        quorum: int = 1,
    ):
        self.client = or_current(client)
        named = dict(models) if isinstance(models, Mapping) else dict(enumerate(models))
        if not named:
            raise ValueError("there are no models")
        self.num_objects = len(named) if num_objects is None else num_objects
        if not 1 <= quorum <= self.num_objects <= len(named):
            wanted = f"quorum={quorum}, num_objects={num_objects}"
            raise ValueError(f"not 1 <= quorum <= num_objects <= {len(named)} models: {wanted}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"a timeout is a number of seconds, not {timeout!r}")
        check(self.client, [model for model in named.values() if isinstance(model, Future)])
        self.combine = combine if isinstance(combine, str) else None
        self.operation: Operation = "sum" if self.combine in CHOICES else combine
        Op.of(self.operation)  # or it is none
        self.quorum = quorum
        self.timeout = math.inf if timeout is None else timeout
        self.names = tuple(named)
        self._function = predict
        self.members = Members(self.client, named, quorum)
        self._running: set[asyncio.Task[Any]] = set()
        self._seconds: deque[float] = deque(maxlen=HISTORY)
        self._closed = False

    # For users

    def predict(self, query: Any) -> Any:
        """Answer a query.

        Parameters
        ----------
        query : object or Future
            What all models are asked.

        Returns
        -------
        Answer
            With an asynchronous client, an awaitable.

        Raises
        ------
        EnsembleError
            If fewer than ``quorum`` models predict; names each that does not, its worker, and why.
        OperandError
            If predictions cannot be combined.
        Exception
            That of the query's task, if the query is a future and that has failed.
        """
        return self.client.sync(self._answer, query)

    def submit(self, query: Any) -> Any:
        """Begin to answer a query; as :meth:`predict` otherwise.

        Returns
        -------
        concurrent.futures.Future
            That of the :class:`Answer`. With an asynchronous client, an :class:`asyncio.Task`.
        """
        answer = self._answer(query)
        if self.client.asynchronous:
            return asyncio.ensure_future(answer)
        return asyncio.run_coroutine_threadsafe(answer, self.client.loop.asyncio_loop)  # type: ignore

    def latencies(self) -> dict[str, float]:
        """Of the last answers: ``count``, ``p50``, ``p99`` and ``max``, in seconds."""
        seconds = list(self._seconds) or [math.nan]
        p50, p99, most = (float(p) for p in np.percentile(seconds, [50, 99, 100]))
        return {"count": len(self._seconds), "p50": p50, "p99": p99, "max": most}

    def close(self) -> Any:
        """Give up what is under way, and let go of the models."""
        return self.client.sync(self._close)

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    async def __aenter__(self) -> Ensemble:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._close()

    async def _close(self) -> None:
        self._closed = True
        for task in self._running:
            task.cancel()
        while self._running:
            await asyncio.wait(self._running)
        self.members.close()

    # A query

    async def _answer(self, asked: Any) -> Answer:
        if self._closed:
            raise RuntimeError("this ensemble was closed")
        task = self._beside(self._run(asked))
        try:
            return await asyncio.shield(task)
        finally:
            task.cancel()  # with us

    async def _run(self, asked: Any) -> Answer:
        begun = monotonic()
        query = Query(asked, begun + self.timeout, self.timeout)
        try:
            await self.members.find(query)
            if not isinstance(asked, Future):
                await self._enter(query)
            for name in query.places:
                self._ask(query, name)
            value, names = await self._combine(query)
            seconds = monotonic() - begun
            self._seconds.append(seconds)
            self._sort_out(query)
            failed = {name: why for name, why in query.failed.items() if name not in names}
            return Answer(value, names, seconds, failed)
        finally:
            query.close()

    async def _enter(self, query: Query) -> None:
        """Send a large query to all workers that have models, until the first has it."""
        if sizeof(query.asked) < (await extension(self.client)).min_size:
            return  # it is a part of the tasks
        key = f"query-{uuid.uuid4().hex}"
        value, query.asked = query.asked, Future(key, self.client)
        while True:
            places = set(query.places.values())
            query.entering = self._beside(self._scatter({key: value}, places))
            entered = asyncio.ensure_future(settled(query.asked))  # the scheduler tells
            try:
                both = {query.entering, entered}
                await asyncio.wait(both, timeout=query.left, return_when=asyncio.FIRST_COMPLETED)
                if query.entering.done():
                    await query.entering
                elif not entered.done():
                    self.members.give_up_late(query)
                    query.check(self.quorum)
                return
            except ValueError:  # a worker has left, and we had not heard of it
                await self.members.locate()
                await self.members.find(query)
                if places == set(query.places.values()):
                    raise
            finally:
                entered.cancel()

    async def _scatter(self, values: dict[str, Any], places: set[str]) -> None:
        await self.client._scatter(values, workers=list(places), broadcast=True)

    def _ask(self, query: Query, name: Hashable) -> None:
        """Let a model predict, where it is."""
        query.predictions[name] = self.client.submit(
            _predict,
            self._function,
            self.combine == "vote",
            self.members.models[name],
            query.asked,
            key=f"prediction-{uuid.uuid4().hex}",
            workers=[query.places[name]],
            pure=False,
        )

    async def _combine(self, query: Query) -> tuple[Any, tuple[Hashable, ...]]:
        """Combine predictions; with those that are left, whenever some cannot come."""
        while True:
            query.check(self.quorum)
            taken = dict(query.predictions)
            some = self.num_objects if self.num_objects < len(taken) else None
            total: Future | None = None
            try:
                total = await reduce(taken.values(), self.operation, some, client=self.client)
                getting = self._beside(self._get(total, taken, some))
                if await self._persist(query, getting):
                    value, names = await getting
                    if self.combine in CHOICES:
                        value = np.argmax(value, axis=-1)
                    return value, names
            except Exception:
                if isinstance(query.asked, Future) and query.asked.status == "error":
                    await query.asked  # raises
                if not self._sort_out(query):
                    raise
            finally:
                if total is not None:
                    total.release()  # this ends who gets it, too

    async def _get(
        self, total: Future, taken: dict[Hashable, Future], some: int | None
    ) -> tuple[Any, tuple[Hashable, ...]]:
        """A result, and the names of those that are in it."""
        value = await gathered(self.client, total)
        if some is None:
            return value, tuple(taken)
        used = {future.key for future in await contributors(total, client=self.client)}
        return value, tuple(name for name in taken if taken[name].key in used)

    async def _persist(self, query: Query, getting: asyncio.Task[Any]) -> bool:
        """Wait for a result. If it cannot come as things are, change them, and return False."""
        while not getting.done():
            await asyncio.wait({getting}, timeout=query.patience)
            if getting.done():
                break
            await self.members.look()
            before = set(query.predictions.values())
            for name, prediction in list(query.predictions.items()):
                place = self.members.places.get(name)
                if prediction.status == "finished" or place == query.places[name]:
                    continue
                if place is None:
                    query.drop(name, "it was lost")
                else:  # it was moved, or computed again
                    query.places[name] = place
                    prediction.release()
                    self._ask(query, name)
            if query.left == 0:
                self.members.give_up_late(query)
            if set(query.predictions.values()) != before:
                return False
        return True

    def _sort_out(self, query: Query) -> bool:
        """Drop models that have failed; return whether there are any."""
        before = len(query.predictions)
        for name, prediction in list(query.predictions.items()):
            if prediction.status in ("error", "cancelled", "lost"):
                query.drop(name, "it was lost", error_of(prediction))
        return len(query.predictions) < before

    def _beside(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something, until it ends or the ensemble is closed."""
        task = asyncio.ensure_future(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # who waits, has it
        return task


def _predict(function: Callable[[Any, Any], Any] | None, vote: bool, model: Any, query: Any) -> Any:
    """What one model has to say: the task."""
    if function is not None:
        said = function(model, query)
    else:
        said = model.predict(query) if hasattr(model, "predict") else model(query)
    if not vote:
        return said
    scores = np.asarray(said)
    return (np.arange(scores.shape[-1]) == scores.argmax(-1)[..., None]).astype(np.int64)
