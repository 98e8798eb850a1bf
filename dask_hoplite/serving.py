"""An ensemble that answers queries: each of its models predicts, and what they say is combined.

A query goes to the models' workers as one pipeline, each model predicts where it is, and the
predictions are combined on their way from worker to worker::

    models = client.map(train, seeds)
    with serving.Ensemble(models, "argmax", quorum=3, timeout=0.5) as ensemble:
        print(ensemble.predict(images).value)
        answers = [ensemble.submit(batch) for batch in batches]  # all are under way at a time
        print([answer.result().value for answer in answers], ensemble.latencies())
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed import Client, Future, get_client

from dask_hoplite.client import check, extension
from dask_hoplite.collectives.api import Operation, contributors, reduce
from dask_hoplite.collectives.operands import Op
from dask_hoplite.exceptions import EnsembleError, NotInstalledError

#: Ways to combine that are a sum, and then the index of the largest along the last axis
CHOICES = ("argmax", "vote")

#: Seconds after which a query that is not answered looks where the models are: who holds a future
#: is not told when that is moved.
LOOK = 0.2

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


@dataclass
class _Query:
    """A query that is under way."""

    asked: Any  # the query, or its future
    deadline: float
    seconds: float  # that it may take
    places: dict[Hashable, str] = field(default_factory=dict)  # where models were asked
    predictions: dict[Hashable, Future] = field(default_factory=dict)
    failed: dict[Hashable, str] = field(default_factory=dict)
    cause: BaseException | None = None

    @property
    def left(self) -> float | None:
        """Seconds that it may still take; None if there is no end."""
        return None if self.deadline == math.inf else max(self.deadline - monotonic(), 0)

    @property
    def over(self) -> bool:
        """Whether its time is up."""
        return self.left == 0

    @property
    def patience(self) -> float:
        """Seconds after which to look whether something has changed."""
        return min(LOOK, self.left or LOOK)

    def check(self, quorum: int) -> None:
        """See that there are enough models."""
        if len(self.places) < quorum:
            raise EnsembleError(self.failed, len(self.places), quorum) from self.cause

    def drop(self, name: Hashable, reason: str, cause: BaseException | None = None) -> None:
        """Go on without a model."""
        place = self.places.pop(name, None)
        where = "" if place is None else f" on {place}"
        why = f"{type(cause).__name__}: {cause}" if cause is not None else reason
        self.failed[name] = why + where
        self.cause = self.cause or cause
        if (prediction := self.predictions.pop(name, None)) is not None:
            prediction.release()


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

    A model is left out as long as it is not in memory: lost with its worker, it is back when Dask
    has computed it again, which it can if it was given as the future of a task. A query that is
    under way is answered by those that are left. A model that was too late for one query is asked
    again when its worker has answered that it is not frozen, or if there are too few others.

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
        self.client = client or get_client()
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
        self._given = named
        self._function = predict
        self._models: dict[Hashable, Future] = {}
        self._places: dict[Hashable, str] = {}
        self._located = -math.inf
        self._late: dict[Hashable, tuple[str, Future]] = {}  # worker, and what it has to answer
        self._starting: asyncio.Task[None] | None = None
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
        for _, echo in self._late.values():
            echo.release()
        self._late, self._models, self._given = {}, {}, {}

    # Where the models are

    async def _start(self) -> None:
        """Wait for all models, once."""
        await extension(self.client)
        values = {n: model for n, model in self._given.items() if not isinstance(model, Future)}
        keys = {name: f"model-{uuid.uuid4().hex}" for name in values}
        if values:
            entered = await self.client._scatter({keys[name]: values[name] for name in values})
            self._given |= {name: entered[key] for name, key in keys.items()}
        self._models = {name: self._given[name] for name in self.names}
        await asyncio.gather(*(_wait(model) for model in self._models.values()))

    async def _locate(self) -> None:
        """Ask where the models are."""
        keys = [model.key for model in self._models.values()]
        located = await self.client.scheduler.hoplite_locate(keys=keys)
        if located is None:
            raise NotInstalledError("the scheduler has no Hoplite any more")
        self._located = monotonic()
        before, self._places = self._places, {}
        for name, model in self._models.items():
            if model.key in located:
                _, holders = located[model.key]
                stays = before.get(name) in holders
                self._places[name] = before[name] if stays else min(holders)

    async def _find(self, query: _Query) -> None:
        """Find the models that can be asked; wait for some if there are too few."""
        if self._starting is None or (self._starting.done() and not self._models):
            self._starting = self._beside(self._start())
        await asyncio.wait({self._starting}, timeout=query.left)
        if self._starting.done():
            self._starting.result()
        while True:
            there = {name for name, model in self._models.items() if model.status == "finished"}
            if not there <= self._places.keys():
                await self._locate()
            query.places = {name: self._places[name] for name in self.names if name in there}
            coming = [m for m in self._models.values() if m.status in ("pending", "lost")]
            if len(query.places) >= self.quorum or not coming or query.over:
                break
            await asyncio.sleep(query.patience)
        for name, model in self._models.items():
            if name not in query.places:
                query.drop(name, "it is not in memory", _error(model))
        if self._late and monotonic() - self._located >= LOOK:
            await self._locate()
        self._leave_out_the_late(query)
        query.check(self.quorum)

    def _leave_out_the_late(self, query: _Query) -> None:
        """Do not ask workers that may be frozen, if there are others."""
        for name, (place, echo) in list(self._late.items()):
            if echo.done() or self._places.get(name) != place:
                del self._late[name]
                echo.release()
        if len(query.places.keys() - self._late.keys()) >= self.quorum:
            for name in query.places.keys() & self._late.keys():
                query.drop(name, "it was too late before, and has not answered since")

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
        query = _Query(asked, begun + self.timeout, self.timeout)
        entering: asyncio.Task[Any] | None = None
        try:
            await self._find(query)
            if not isinstance(asked, Future):
                entering = await self._enter(query)
            for name in query.places:
                self._ask(query, name)
            value, names = await self._combine(query)
            seconds = monotonic() - begun
            self._seconds.append(seconds)
            return Answer(value, names, seconds, query.failed)
        finally:
            for prediction in query.predictions.values():
                prediction.release()
            if entering is not None:  # some may have no copy yet, and need none any more
                entering.cancel()
                query.asked.release()

    async def _enter(self, query: _Query) -> asyncio.Task[Any] | None:
        """Send a large query to all workers that have models, until the first has it."""
        if sizeof(query.asked) < (await extension(self.client)).min_size:
            return None  # it is a part of the tasks
        key = f"query-{uuid.uuid4().hex}"
        value, query.asked = query.asked, Future(key, self.client)
        while True:
            places = set(query.places.values())
            entering = self._beside(self._scatter({key: value}, places))
            entered = asyncio.ensure_future(_wait(query.asked))  # the scheduler tells
            try:
                await asyncio.wait({entering, entered}, return_when=asyncio.FIRST_COMPLETED)
                if entering.done():
                    await entering
                return entering
            except ValueError:
                await self._locate()  # a worker has left: that we have not heard of it
                await self._find(query)
                if places == set(query.places.values()):
                    raise
            finally:
                entered.cancel()

    async def _scatter(self, values: dict[str, Any], places: set[str]) -> None:
        await self.client._scatter(values, workers=list(places), broadcast=True)

    def _ask(self, query: _Query, name: Hashable) -> None:
        """Let a model predict, where it is."""
        query.predictions[name] = self.client.submit(
            _predict,
            self._function,
            self.combine == "vote",
            self._models[name],
            query.asked,
            key=f"prediction-{uuid.uuid4().hex}",
            workers=[query.places[name]],
            pure=False,
        )

    async def _combine(self, query: _Query) -> tuple[Any, tuple[Hashable, ...]]:
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
                del taken, total

    async def _get(
        self, total: Future, taken: dict[Hashable, Future], some: int | None
    ) -> tuple[Any, tuple[Hashable, ...]]:
        """A result, and the names of those that are in it."""
        value = await self.client._gather(total)
        if some is None:
            return value, tuple(taken)
        used = {future.key for future in await contributors(total, client=self.client)}
        return value, tuple(name for name in taken if taken[name].key in used)

    async def _persist(self, query: _Query, getting: asyncio.Task[Any]) -> bool:
        """Wait for a result. If it cannot come as things are, change them, and return False."""
        while not getting.done():
            await asyncio.wait({getting}, timeout=query.patience)
            if getting.done():
                break
            if monotonic() - self._located >= LOOK:
                await self._locate()
            before = set(query.predictions.values())
            for name, prediction in list(query.predictions.items()):
                place = self._places.get(name)
                if prediction.status == "finished" or place == query.places[name]:
                    continue
                if place is None:
                    query.drop(name, "it was lost")
                else:  # it was moved, or computed again
                    query.places[name] = place
                    prediction.release()
                    self._ask(query, name)
            if query.over:
                self._give_up_late(query)
            if set(query.predictions.values()) != before:
                return False
        return True

    def _give_up_late(self, query: _Query) -> None:
        """Time is up: go on with what is there. That has as much time to be combined."""
        late = [n for n, future in query.predictions.items() if future.status != "finished"]
        for name in late or list(query.predictions):
            place = query.places[name]
            query.drop(name, f"it was not there within {query.seconds} s")
            if name not in self._late:
                echo = self.client.submit(_echo, workers=[place], pure=False)
                self._late[name] = place, echo
        query.deadline += query.seconds

    def _sort_out(self, query: _Query) -> bool:
        """Drop models that have failed; return whether there are any."""
        before = len(query.predictions)
        for name, prediction in list(query.predictions.items()):
            if prediction.status in ("error", "cancelled", "lost"):
                query.drop(name, "it was lost", _error(prediction))
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


def _echo() -> None:
    """What a worker that was late has to answer."""


def _error(future: Future) -> BaseException | None:
    """What a task has raised."""
    assert future._state is not None
    return future._state.exception if future.status == "error" else None


async def _wait(future: Future) -> None:
    assert future._state is not None
    await future._state.wait()
