"""Trainings without a server: workers average with each other."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from time import monotonic
from typing import Any

from distributed import Client, Future

from dask_hoplite.collectives import api as collectives
from dask_hoplite.sgd import work
from dask_hoplite.sgd.loop import Contribution, Loop, Plan, State
from dask_hoplite.sgd.shares import Shares
from dask_hoplite.sgd.step import Step

logger = logging.getLogger(__name__)


class PeerLoop(Loop):
    """Each worker has parameters of its own, and averages with others."""

    def __init__(self, client: Client, plan: Plan, shares: Shares, state: State, nbytes: int):
        super().__init__(client, plan, shares, state, nbytes)
        self.models: dict[str, State] = {}  # by worker, the last that is known to be there
        self.newest = state
        self.groups: dict[str, frozenset[str]] = {}  # by worker, with whom it has averaged last
        self.lasted = 0.0  # seconds that the last average took
        self.told = monotonic()  # when a step was told last

    async def work(self) -> None:
        """Let those that are ready average."""
        telling: asyncio.Task[None] | None = None
        while self.plan.steps is None or self.number < self.plan.first + self.plan.steps:
            group = await self._group()
            number = self.number
            self.number += 1
            used = [self.take(worker) for worker in group]
            self.groups.update(dict.fromkeys(group, frozenset(group)))
            mean: Future = await collectives.allreduce(
                [one.future for one in used], "mean", client=self.client
            )
            state = State(number + 1, mean, nested=True)
            for one in used:
                self.go_on(one.worker, state)
            telling = self._spawn(self._end(telling, number, used, state, monotonic()))
            del used, mean
        if telling is not None:
            await telling

    def state_for(self, worker: str) -> State:
        """Those who come begin with what was averaged last."""
        return self.models.get(worker, self.newest)

    def drop(self, worker: str) -> None:
        """Do without what a worker computes, and has, if it has left."""
        super().drop(worker)
        if worker not in self.present:
            self.models.pop(worker, None)

    async def parameters(self) -> Any:
        """The mean of what all have."""
        models = {state.parameters.key: state.parameters for state in self.models.values()}
        located = await self.client.scheduler.hoplite_locate(keys=list(models))
        counts = Counter(state.parameters.key for state in self.models.values())
        for key in set(models).difference(located):
            del models[key], counts[key]
        if len(models) < 2:
            return await super().parameters()
        mean = await collectives.reduce(
            models.values(),
            client=self.client,
            weights=[counts[key] / counts.total() for key in models],
        )
        return (await self.client._gather(mean))[0]

    async def _group(self) -> list[str]:
        """Who averages next: the first that are ready, but not the same as the last time.

        Otherwise groups that keep time would never learn of each other. They wait for somebody else
        as long as an average takes: there may be nobody.
        """
        deadline = self.step_deadline()
        patience: float | None = None
        while True:
            await self.somebody()
            wanted = min(self.plan.num_objects, len(self.contributions))
            if len(self.finished) >= wanted:
                group = list(self.finished)[:wanted]
                again = self.groups.get(group[0]) == frozenset(group)
                if not again or wanted == len(self.contributions):
                    return group
                if len(self.finished) > wanted:
                    return [*group[:-1], list(self.finished)[wanted]]
                patience = patience or monotonic() + self.lasted
                if monotonic() >= patience:
                    return group
            await self.something(deadline, patience)

    async def _end(
        self,
        before: asyncio.Task[None] | None,
        number: int,
        used: list[Contribution],
        state: State,
        began: float,
    ) -> None:
        """Tell of an average, once it is there, and all before it are told."""
        workers = tuple(one.worker for one in used)
        if await self.outcome(state.parameters, workers):
            self.lasted = monotonic() - began
            self.newest = state
            self.models.update(dict.fromkeys(workers, state))
            reporting = self.submit(work.report, state.parameters, worker=workers[0])
            loss = await self.loss_of(reporting, workers[0])
            await self.settle(state.parameters, workers[0])
            staleness = tuple(number - one.version for one in used)
        else:
            logger.info("Hoplite: an average could not be made: %s", state.parameters.status)
            for worker in workers:
                told = self.contributions.get(worker)
                if told is not None and told.state is state:
                    self.drop(worker)
            self.alarm.set()
            state, loss, workers, staleness = self.newest, float("nan"), (), ()
        if before is not None:
            await before
        now = monotonic()
        seconds, self.told = now - self.told, now
        parameters = state.parameters
        if state.nested:  # the user is to get what is in it
            parameters = self.client.submit(work.item, parameters, 0, pure=False)
        step = Step(number, loss, workers, staleness, self.nbytes, seconds, parameters)
        await self.tell(step, state)
