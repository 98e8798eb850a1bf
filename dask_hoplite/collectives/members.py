"""The models of an ensemble: where they are, and which of them can be asked."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distributed import Client, Future

from dask_hoplite.client import extension
from dask_hoplite.exceptions import EnsembleError, NotInstalledError

#: Seconds after which a query that is not answered looks where the models are: who holds a future
#: is not told when that is moved.
LOOK = 0.2


@dataclass
class Query:
    """A query that is under way."""

    asked: Any  # the query, or its future
    deadline: float
    seconds: float  # that it may take
    places: dict[Hashable, str] = field(default_factory=dict)  # where models were asked
    predictions: dict[Hashable, Future] = field(default_factory=dict)
    failed: dict[Hashable, str] = field(default_factory=dict)
    cause: BaseException | None = None
    entering: asyncio.Task[None] | None = None  # what sends it

    def close(self) -> None:
        """Let go of all."""
        for prediction in self.predictions.values():
            prediction.release()
        if self.entering is not None:  # some may have no copy yet, and need none any more
            self.entering.cancel()
            self.asked.release()

    @property
    def left(self) -> float | None:
        """Seconds that it may still take; None if there is no end."""
        return None if self.deadline == math.inf else max(self.deadline - monotonic(), 0)

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


class Members:
    """Knows where the models of an ensemble are.

    Parameters
    ----------
    client : Client
        Whose futures they are.
    given : mapping of hashable to object
        By name, futures or values.
    quorum : int
        How many a query takes.
    """

    def __init__(self, client: Client, given: Mapping[Hashable, Any], quorum: int):
        self.client = client
        self.given = dict(given)
        self.quorum = quorum
        self.models: dict[Hashable, Future] = {}
        self.places: dict[Hashable, str] = {}
        self.late: dict[Hashable, tuple[str, Future]] = {}  # worker, and what it has to answer
        self._located = -math.inf
        self._starting: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Let go of all."""
        if self._starting is not None:
            self._starting.cancel()
        for _, echo in self.late.values():
            echo.release()
        self.late, self.models, self.given = {}, {}, {}

    async def _start(self) -> None:
        """Wait for all models, once."""
        await extension(self.client)
        values = {n: model for n, model in self.given.items() if not isinstance(model, Future)}
        keys = {name: f"model-{uuid.uuid4().hex}" for name in values}
        if values:
            entered = await self.client._scatter({keys[name]: values[name] for name in values})
            self.given |= {name: entered[key] for name, key in keys.items()}
        self.models = dict(self.given)
        await asyncio.gather(*(settled(model) for model in self.models.values()))

    async def locate(self) -> None:
        """Ask where the models are."""
        keys = [model.key for model in self.models.values()]
        located = await self.client.scheduler.hoplite_locate(keys=keys)
        if located is None:
            raise NotInstalledError("the scheduler has no Hoplite any more")
        self._located = monotonic()
        before, self.places = self.places, {}
        for name, model in self.models.items():
            if model.key in located:
                _, holders = located[model.key]
                stays = before.get(name) in holders
                self.places[name] = before[name] if stays else min(holders)

    async def look(self) -> None:
        """Ask where the models are, if that was not done just now."""
        if monotonic() - self._located >= LOOK:
            await self.locate()

    async def find(self, query: Query) -> None:
        """Find the models that can be asked; wait for some if there are too few."""
        if self._starting is None or (self._starting.done() and not self.models):
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.wait({self._starting}, timeout=query.left)
        if self._starting.done():
            self._starting.result()
        while True:
            there = {name for name, model in self.models.items() if model.status == "finished"}
            if not there <= self.places.keys():
                await self.locate()
            query.places = {name: self.places[name] for name in self.given if name in there}
            coming = [m for m in self.models.values() if m.status in ("pending", "lost")]
            if len(query.places) >= self.quorum or not coming or query.left == 0:
                break
            await asyncio.sleep(query.patience)
        for name, model in self.models.items():
            if name not in query.places:
                query.drop(name, "it is not in memory", error_of(model))
        if self.late:
            await self.look()
        self._leave_out_the_late(query)
        query.check(self.quorum)

    def _leave_out_the_late(self, query: Query) -> None:
        """Do not ask workers that may be frozen, if there are others."""
        for name, (place, echo) in list(self.late.items()):
            if echo.done() or self.places.get(name) != place:
                del self.late[name]
                echo.release()
        if len(query.places.keys() - self.late.keys()) >= self.quorum:
            for name in query.places.keys() & self.late.keys():
                query.drop(name, "it was too late before, and has not answered since")

    def give_up_late(self, query: Query) -> None:
        """Time is up: go on with what is there. That has as much time to be combined."""
        there = {n for n, future in query.predictions.items() if future.status == "finished"}
        for name in [n for n in query.places if n not in there] or list(query.places):
            place = query.places[name]
            query.drop(name, f"it was not there within {query.seconds} s")
            if name not in self.late:
                echo = self.client.submit(_echo, workers=[place], pure=False)
                self.late[name] = place, echo
        query.deadline += query.seconds


def _echo() -> None:
    """What a worker that was late has to answer."""


def error_of(future: Future) -> BaseException | None:
    """What a task has raised."""
    assert future._state is not None
    return future._state.exception if future.status == "error" else None


async def settled(future: Future) -> None:
    """Wait until a task has ended, however."""
    assert future._state is not None
    await future._state.wait()
