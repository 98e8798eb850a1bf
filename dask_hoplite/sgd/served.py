"""Trainings with a server: one worker has the parameters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from distributed import Client, Future

from dask_hoplite.collectives import api as collectives
from dask_hoplite.exceptions import HopliteError
from dask_hoplite.sgd import work
from dask_hoplite.sgd.loop import LOSSES, Contribution, Loop, Plan, State
from dask_hoplite.sgd.rules import Rule
from dask_hoplite.sgd.shares import Shares
from dask_hoplite.sgd.step import GradientError, Step, TrainingError
from dask_hoplite.transfer.patience import stop

logger = logging.getLogger(__name__)

#: Updates go before gradients that wait for a thread on the same worker
PRIORITY = 10


@dataclass
class Taken:
    """What a step is made of.

    Parameters
    ----------
    totals : list of Future
        The sum of contributions, or all of these.
    contributions : list of Contribution
    state : State, optional
        What comes of it, if it is applied now.
    """

    totals: list[Future]
    contributions: list[Contribution]
    state: State | None


class ServedLoop(Loop):
    """One worker, the server, has the parameters."""

    server: str
    reserved = False  #: whether it is for nothing else
    previous: State | None = None  #: what there is if the server is lost
    failures = 0  #: how many sums in a row could not be made

    def __init__(self, client: Client, plan: Plan, shares: Shares, state: State, nbytes: int):
        super().__init__(client, plan, shares, state, nbytes)
        self.pending: list[tuple[Future, int]] = []  # totals to be applied, and of how many
        self.told = state  # the newest that is known to have been there

    def aside(self) -> list[str]:
        """The server, if it does nothing else."""
        return [*self.plan.aside, self.server] if self.reserved else self.plan.aside

    async def work(self) -> None:
        """Make all steps: the next sum is under way while the parameters go out, and the step
        before is told."""
        telling: asyncio.Task[None] | None = None
        began = monotonic()
        try:
            while self.plan.steps is None or self.number < self.plan.first + self.plan.steps:
                taken = await self._first()
                number, version = self.number, self.state.version
                self.number += 1
                reporting = self.submit(work.report, *taken.totals, worker=self.server)
                self._adopt(taken)
                for one in taken.contributions:
                    if self.contributions.get(one.worker) is one:
                        self.drop(one.worker)
                        self.go_on(one.worker, self.state)
                now = monotonic()
                step = partial(
                    Step,
                    number=number,
                    contributors=tuple(one.worker for one in taken.contributions),
                    staleness=tuple(version - one.version for one in taken.contributions),
                    nbytes=self.nbytes,
                    seconds=now - began,
                )
                began = now
                del taken
                if telling is not None:
                    await telling
                telling = self._spawn(self._tell(step, reporting, self.server, self.state))
                del reporting, step
            if telling is not None:
                await telling
        except HopliteError:
            if telling is not None:  # the step before is made, in any case
                await telling
            raise
        finally:
            self.previous = None
            self.pending.clear()

    def _adopt(self, taken: Taken) -> None:
        """Go on from what a step has made."""
        if taken.state is None:  # it is applied with a later one
            self.pending.append((taken.totals[0], len(taken.contributions)))
            if len(self.pending) > 1:
                futures, counts = zip(*self.pending, strict=True)
                both = self.submit(work.add, *futures, worker=self.server)
                self.pending = [(both, sum(counts))]
            return
        self.pending.clear()
        self.previous, self.state = self.state, taken.state
        for future in (taken.state.parameters, taken.state.memory):
            if future is not None:
                self._spawn(self.settle(future, self.server, keep=True))

    def _update(self, totals: list[Future], count: int) -> State | None:
        """Let the server apply totals, as soon as they are there; None if it is not their turn."""
        state, rule, server = self.state, self.rule, self.server
        if not rule.gathers:
            if not rule.applies(self.number):
                return None
            count += sum(earlier for _, earlier in self.pending)
            totals = [*(total for total, _ in self.pending), *totals]
            if len(totals) > 1:
                totals = [self.submit(work.add, *totals, worker=server, priority=PRIORITY)]
        new = self.submit(
            work.update,
            rule,
            self.number,
            count,
            state.parameters,
            state.memory,
            *totals,
            worker=server,
            name="parameters" if state.memory is None else "update",
            priority=PRIORITY,
        )
        memory = None
        if state.memory is not None:
            new, memory = (
                self.submit(work.item, new, index, worker=server, name=name, priority=PRIORITY)
                for index, name in enumerate(("parameters", "memory"))
            )
        return State(state.version + 1, new, memory)

    async def _tell(self, step: Any, reporting: Future, server: str, state: State) -> None:
        """Tell of a step, once its parameters are there; if they are lost, of those there were."""
        loss = await self.loss_of(reporting, server)
        del reporting
        future = state.parameters
        if not await self.outcome(future, [server]):
            if future.status == "error" and not isinstance(
                error := await future._exception(), LOSSES
            ):
                number = step.keywords["number"]
                reason = f"{type(error).__name__}: {error}"
                self.failure = TrainingError(number, f"the rule failed: {reason}")
                self.alarm.set()
                raise self.failure
            state = self.told
        self.told = state
        await self.tell(step(loss=loss, parameters=state.parameters), state)

    # The first that are ready

    async def _first(self) -> Taken:
        """The first contributions that are ready, as their sum, or as a list."""
        while True:
            await self.somebody()
            if self.server not in self.present:
                await self._move()
                continue
            found = await (self._gathered() if self.rule.gathers else self._reduced())
            if found is not None:
                self.failures = 0
                return found

    async def _gathered(self) -> Taken | None:
        deadline = self.step_deadline()
        while len(self.finished) < min(self.plan.num_objects, len(self.contributions)):
            await self.something(deadline)
            if not self.contributions or self.server not in self.present:
                return None
        first = list(self.finished.values())[: self.plan.num_objects]
        futures = [one.future for one in first]
        return Taken(futures, first, self._update(futures, len(first)))

    async def _reduced(self) -> Taken | None:
        """The sum, as soon as it is there; None if another one must be asked for."""
        asked = dict(self.contributions)
        count = min(self.plan.num_objects, len(asked))
        weights = None
        if type(self.rule).weight is not Rule.weight:
            now = self.state.version
            weights = [self.rule.weight(now - one.version) for one in asked.values()]
        futures = [one.future for one in asked.values()]
        total = collectives.first_of(self.batch, futures, count, self.server, weights)
        state = self._update([total], count)  # it follows at once, when nobody has to be asked
        assert total._state is not None
        waiting = asyncio.ensure_future(total._state.wait())
        waiting.add_done_callback(lambda _: self.alarm.set())
        deadline = self.step_deadline()
        try:
            while not waiting.done():
                await self.something(deadline)
                able = [w for w, one in asked.items() if self.contributions.get(w) is one]
                if not waiting.done() and (self.server not in self.present or len(able) < count):
                    return None
        finally:
            await stop(waiting)
        if total.status != "finished":
            await self._again(await total._exception() if total.status == "error" else None)
            return None
        keys = await self.client.scheduler.hoplite_contributors(key=total.key)
        owners = {one.future.key: worker for worker, one in asked.items()}
        # One of them may have left since; what it has contributed is in the sum, and counts.
        return Taken([total], [asked[owners[key]] for key in keys or () if key in owners], state)

    async def _again(self, error: BaseException | None) -> None:
        """A sum could not be made: if that is for a reason that passes, wait for that."""
        if self.failure is not None:
            raise self.failure
        lost = [one for one in self.contributions.values() if one.future.status == "error"]
        for one in lost:
            failed = await one.future._exception()
            if isinstance(failed, GradientError):
                raise failed
        logger.info("Hoplite: a sum is asked for again: %s", error)
        self.failures += 1
        if self.failures > len(self.present) + 3:
            raise TrainingError(self.number, f"there is no sum of gradients: {error}")
        await self.something(until=monotonic() + 0.05 * self.failures)

    # A server that leaves

    async def _move(self) -> None:
        """Choose another server, with the newest parameters that there are."""
        states = [self.state, self.previous, self.told, self.last.state]
        states += [one.state for one in self.contributions.values()]
        candidates = sorted((s for s in states if s), key=lambda s: s.version, reverse=True)
        located = await self.client.scheduler.hoplite_locate(
            keys=[state.parameters.key for state in candidates]
        )
        for state in candidates:
            _, holders = located.get(state.parameters.key, (0, ()))
            if not set(self.present).isdisjoint(holders):
                break
        else:
            at = self.last.step.number
            raise TrainingError(
                self.number,
                f"the server, {self.server}, left with the only copy of the parameters; "
                f"those of step {at} may be in a checkpoint",
            )
        self.server = server_among(self.present, self.shares.workers)
        logger.warning("Hoplite: %s is the server now", self.server)
        if state.memory is not None:
            memory = self.submit(work.begin, self.rule, state.parameters, worker=self.server)
            state = State(state.version, state.parameters, memory)
        self.state, self.previous = state, None
        self.pending.clear()  # these were there
        self.reserved = self.reserved and self.server not in self.shares.workers
        await self.client.scheduler.hoplite_keep(key=state.parameters.key, worker=self.server)
        for worker, one in list(self.contributions.items()):
            if one.version > state.version:  # of parameters that never were
                self.drop(worker)
        self.follow_workers()


def server_among(present: Collection[str], busy: Collection[str]) -> str:
    """A worker for the parameters: one that has nothing else to do, if there is one."""
    return min(present, key=lambda worker: (worker in busy, worker))
