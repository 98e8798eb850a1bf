"""Trainings without a server: workers average with each other."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from distributed import Client, Future

from dask_hoplite.collectives import api as collectives
from dask_hoplite.sgd import work
from dask_hoplite.sgd.shares import Shares
from dask_hoplite.sgd.step import Step
from dask_hoplite.sgd.training import Contribution, Plan, State, Training, loss_of

logger = logging.getLogger(__name__)


class PeerTraining(Training):
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
                if one.worker in self.present and one.worker in self.shares.workers:
                    self.ask(one.worker, state)
            telling = self._spawn(self._end(telling, number, used, state, monotonic()))
            del used, mean
        if telling is not None:
            await telling

    def state_for(self, worker: str) -> State:
        """Those who come begin with what was averaged last."""
        return self.models.get(worker, self.newest)

    async def _parameters(self) -> Any:
        """The mean of what all have."""
        states = {state.parameters.key: state for state in self.models.values()}
        if len(states) < 2:
            return await super()._parameters()
        models = [state.parameters for state in states.values()]
        mean = await collectives.reduce(models, "mean", client=self.client)
        return (await self.client._gather(mean))[0]

    async def _group(self) -> list[str]:
        """Who averages next: the first that are ready, but not the same as the last time.

        Otherwise groups that keep time would never learn of each other. They wait for somebody else
        as long as an average takes: there may be nobody.
        """
        deadline, what = self.step_deadline()
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
            await self.something(deadline, what, patience)

    async def _end(
        self,
        before: asyncio.Task[None] | None,
        number: int,
        used: list[Contribution],
        state: State,
        began: float,
    ) -> None:
        """Tell of an average, once it is there, and all before it are told."""
        assert state.parameters._state is not None
        await state.parameters._state.wait()
        workers = tuple(one.worker for one in used)
        if state.parameters.status == "finished":
            self.lasted = monotonic() - began
            self.newest = state
            for worker in workers:
                self.models[worker] = state
            reporting = self.submit(work.report, state.parameters, worker=workers[0])
            loss = await loss_of(self.client, reporting)
            await self.settle(state.parameters)
        else:
            logger.info("Hoplite: an average could not be made: %s", state.parameters.status)
            loss = float("nan")
            state = self.newest
        staleness = tuple(number - one.version for one in used)
        if before is not None:
            await before
        now = monotonic()
        seconds, self.told = now - self.told, now
        step = Step(number, loss, workers, staleness, self.nbytes, seconds, state.parameters)
        await self.tell(step, state)
