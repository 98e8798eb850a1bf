"""The loop of a training, on the client: who computes what, and what becomes of it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distributed import Client, Future, KilledWorker

from dask_hoplite.batch import Batch
from dask_hoplite.client import gathered
from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import HopliteError
from dask_hoplite.sgd import work
from dask_hoplite.sgd.rules import Rule
from dask_hoplite.sgd.shares import Shares
from dask_hoplite.sgd.step import Checkpoint, GradientError, Step, TrainingError
from dask_hoplite.transfer.patience import stop

logger = logging.getLogger(__name__)

#: Steps that may be told before somebody looks at the first of them
AHEAD = 1

#: What contributions end with when the cluster is at fault, and not the user's function
LOSSES = (HopliteError, KilledWorker, CancelledError, OSError)

#: Seconds for which a training waits for workers when there are none, unless told otherwise
PATIENCE = 30.0


@dataclass(eq=False)
class Contribution:
    """What one worker computes at the moment, or has computed.

    Parameters
    ----------
    worker : str
    version : int
        How many steps had been made when its parameters were.
    part : Key
        What it works on.
    future : Future
    state : State, optional
        Those parameters, while it is computed.
    """

    worker: str
    version: int
    part: Key
    future: Future
    state: State | None
    following: asyncio.Task[None] | None = None


@dataclass
class State:
    """Parameters that are there, or will be."""

    version: int
    parameters: Future
    memory: Future | None = None
    nested: bool = False  #: whether it is a contribution, which has the loss beside


@dataclass
class Reached:
    """A step that was made, for the user, and the state after it."""

    step: Step
    state: State


@dataclass
class Plan:
    """What a training was asked for with."""

    job: work.Job
    num_objects: int
    steps: int | None
    timeout: float | None
    seed: int
    first: int = 0  #: the number of the first step
    parts: dict[Key, Future] = field(default_factory=dict)
    aside: list[str] = field(default_factory=list)  #: workers that the user has given no data


class Loop:
    """Makes the steps of a training."""

    def __init__(self, client: Client, plan: Plan, shares: Shares, state: State, nbytes: int):
        self.client = client
        self.batch = Batch(client)
        self.plan = plan
        self.rule: Rule = plan.job.rule
        self.shares = shares
        self.state = state
        self.nbytes = nbytes
        self.last = Reached(  # what was told last
            Step(plan.first - 1, float("nan"), (), (), nbytes, 0.0, state.parameters), state
        )
        self.number = plan.first
        self.contributions: dict[str, Contribution] = {}  # by worker
        self.finished: dict[str, Contribution] = {}  # those that are there, in that order
        self.missing: set[Key] = set()  # data that was lost, and may come back
        self.present: list[str] = []  # workers that there are
        self.alarm = asyncio.Event()  # something has happened
        self.failure: BaseException | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.departures: dict[str, asyncio.Event] = {}  # of workers whose results are waited for
        self.steps: asyncio.Queue[Reached | BaseException | None] = asyncio.Queue()
        self.room = asyncio.Semaphore(AHEAD)  # in the queue
        self.over = False
        self.running: asyncio.Task[None] | None = None

    # For the user

    async def next(self) -> Step | None:
        """The next step, or None at the end."""
        if self.over:
            return None
        reached = await self.steps.get()
        if isinstance(reached, Reached):
            self.room.release()
            self.last = reached
            return reached.step
        self.over = True
        if reached is not None:
            raise reached
        return None

    async def parameters(self) -> Any:
        """Those after the last step that was told."""
        state = self.last.state
        value = await self.client._gather(state.parameters)
        return value[0] if state.nested else value

    async def checkpoint(self) -> Checkpoint:
        """All that is needed to go on from there."""
        state = self.last.state
        memory = None if state.memory is None else await self.client._gather(state.memory)
        return Checkpoint(self.last.step.number + 1, await self.parameters(), memory)

    async def close(self) -> None:
        """Stop."""
        self.over = True
        if self.running is not None:
            await stop(self.running)
            self.running = None
        self.steps = asyncio.Queue()
        self.steps.put_nowait(None)

    # Life

    def begin(self, present: list[str]) -> None:
        """Start to work."""
        self.present = present
        self.running = asyncio.create_task(self._run(), name="hoplite-training")

    async def _run(self) -> None:
        watching = self._spawn(self._watch())
        end: BaseException | None = None
        try:
            for worker in self.shares.workers:
                self.ask(worker, self.state)
            await self.work()
        except asyncio.CancelledError:
            self.steps.put_nowait(None)  # somebody may wait for it
            return  # here, since its traceback would hold all that there is for the collector
        except Exception as error:
            if not isinstance(error, HopliteError):
                logger.exception("Hoplite: a training has failed")
            end = error.with_traceback(None)
        finally:
            watching.cancel()
            for worker in list(self.contributions):
                self.drop(worker)
            await stop(*self.tasks)
            self.plan.parts.clear()
            self.failure = None
        self.steps.put_nowait(end)

    async def work(self) -> None:
        """Make all steps."""
        raise NotImplementedError

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Contributions

    def ask(self, worker: str, state: State) -> None:
        """Let a worker compute with some parameters, if there is any of its data."""
        plan = self.plan
        part = self._part_for(worker)
        if part is None:
            return
        plan.seed += 1000
        future = self.submit(
            work.contribution,
            plan.job,
            state.parameters,
            plan.parts[part],
            state.version,
            str(part),
            plan.seed,
            state.nested,
            worker=worker,
            name="contribution",
        )
        told = self.contributions[worker] = Contribution(worker, state.version, part, future, state)
        told.following = self._spawn(self._follow(told))

    def go_on(self, worker: str, state: State) -> None:
        """Let a worker that has contributed compute on, if it is still there."""
        if worker in self.present and worker in self.shares.parts:
            self.ask(worker, state)

    def _part_for(self, worker: str) -> Key | None:
        """What a worker takes next of its data: not what was lost, and is not there again."""
        for _ in range(len(self.shares.parts[worker])):
            part = self.shares.next(worker)
            if self.plan.parts[part].status == "finished":
                return part
            if part not in self.missing:
                self.missing.add(part)
                self._spawn(self._return_of(part))
        return None

    async def _return_of(self, part: Key) -> None:
        """Wait until data is there again, or is known to be lost for good."""
        state = self.plan.parts[part]._state
        assert state is not None
        await state.wait()
        self.missing.discard(part)
        self._do_without(part)
        self.alarm.set()

    def _do_without(self, part: Key) -> None:
        """Forget data that is lost for good."""
        if self._part_failed(part):
            logger.warning("Hoplite: data %r is lost, and not used any more", part)
            del self.plan.parts[part]
            self.shares.drop(part)
        if not self.plan.parts:
            self.failure = TrainingError(self.number, "all data is lost")

    def submit(
        self, function: Any, *args: Any, worker: str, name: str = "", priority: int = 0
    ) -> Future:
        """A task on a worker."""
        return self.batch.submit(
            function,
            *args,
            key=f"sgd-{name or function.__name__}-{uuid.uuid4().hex}",
            workers=[worker],
            allow_other_workers=False,
            priority=priority,
        )

    async def _follow(self, told: Contribution) -> None:
        """Learn what becomes of a contribution."""
        state = told.future._state
        assert state is not None
        await state.wait()
        if self.contributions.get(told.worker) is not told:
            return
        if told.future.status == "finished":
            self.finished[told.worker] = told
            told.state = None
        elif told.future.status == "error":
            error = await told.future._exception()
            if isinstance(error, GradientError):
                self.failure = error
            elif isinstance(error, LOSSES) or self._part_failed(told.part):
                self._lost(told, error)
            elif told.state is not None and told.state.parameters.status == "error":
                reason = f"{type(error).__name__}: {error}"
                self.failure = TrainingError(told.version - 1, f"the rule failed: {reason}")
            else:  # The function, or an argument, could not even be had there
                reason = f"{type(error).__name__}: {error}"
                self.failure = GradientError(told.version, reason, told.worker, str(told.part))
        else:
            self._lost(told, None)
        self.alarm.set()

    def _lost(self, told: Contribution, error: BaseException | None) -> None:
        """A contribution that is not the fault of the user's function cannot be had."""
        if self.client.status != "running":  # then all futures are cancelled
            self.failure = TrainingError(self.number, f"the client is {self.client.status}")
            return
        logger.info("Hoplite: no contribution of %s: %s", told.worker, error)
        self.drop(told.worker)
        self._do_without(told.part)

    def _part_failed(self, key: Key) -> bool:
        part = self.plan.parts.get(key)
        return part is not None and part.status in ("cancelled", "error")

    def drop(self, worker: str) -> None:
        """Do without what a worker computes."""
        told = self.contributions.pop(worker, None)
        self.finished.pop(worker, None)
        if told is not None and told.following is not None:
            if told.following is not asyncio.current_task():
                told.following.cancel()
            told.following = None

    def take(self, worker: str) -> Contribution:
        """What a worker has contributed is used now."""
        told = self.contributions[worker]
        self.drop(worker)
        return told

    # Workers that come and go

    async def _watch(self) -> None:
        """See workers come and go."""
        seen = -1
        while True:
            try:
                seen, present = await self.client.scheduler.hoplite_workers(seen=seen)
            except Exception as error:  # or the scheduler has no Hoplite any more
                self.failure = TrainingError(self.number, f"the scheduler does not answer: {error}")
                self.alarm.set()
                return
            self.present = present
            for worker in set(self.departures).difference(present):
                self.departures.pop(worker).set()
            self.alarm.set()

    async def outcome(self, future: Future, workers: Collection[str]) -> bool:
        """Wait until a result is there, or one of the workers that it takes is not any more.

        A task that is bound to a worker that has left is never done, and never fails.
        """
        assert future._state is not None
        if set(workers).issubset(self.present):
            departures = [self.departures.setdefault(w, asyncio.Event()) for w in workers]
            events: list[Any] = [future._state, *departures]
            waiting = [asyncio.create_task(event.wait()) for event in events]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await stop(*waiting)
        return bool(future.status == "finished")

    def follow_workers(self) -> None:
        """Let go of those that have left, and let those that have come take part."""
        for worker in self.shares.follow(self.present, self.aside()):
            logger.info("Hoplite: %s has left the training", worker)
            self.drop(worker)
        for worker in self.shares.workers:
            if worker in self.present and worker not in self.contributions:
                self.ask(worker, self.state_for(worker))

    def aside(self) -> list[str]:
        """Workers that take over no data."""
        return self.plan.aside

    def state_for(self, worker: str) -> State:
        """What a worker that has just come, or was lost, begins with."""
        return self.state

    async def something(
        self, deadline: float | None = None, until: float | None = None, what: str = ""
    ) -> None:
        """Wait until something has happened, or a time has come, and see to workers.

        Raises
        ------
        TrainingError
            If it cannot go on, or the step takes longer than it may.
        """
        moments = [moment for moment in (deadline, until) if moment is not None]
        timeout = max(min(moments) - monotonic(), 0.0) if moments else None
        try:
            async with asyncio.timeout(timeout):  # wait_for may overlook that it is cancelled
                await self.alarm.wait()
        except TimeoutError:
            if deadline is not None and monotonic() >= deadline:
                raise TrainingError(self.number, what or self._late()) from None
        self.alarm.clear()
        if self.failure is not None:
            raise self.failure
        self.follow_workers()

    async def somebody(self) -> None:
        """Wait until there is a worker that contributes."""
        self.follow_workers()
        patience = PATIENCE if self.plan.timeout is None else self.plan.timeout
        deadline = monotonic() + patience
        while not self.contributions:
            what = f"there is no worker, since {patience:g} s"
            await self.something(deadline, what=what)

    def step_deadline(self) -> float | None:
        """When the present step must be there."""
        return None if self.plan.timeout is None else monotonic() + self.plan.timeout

    def _late(self) -> str:
        """What is said if it is not."""
        busy = [worker for worker in self.contributions if worker not in self.finished]
        return f"not there within {self.plan.timeout:g} s; still busy: {busy}"

    # Results

    async def settle(self, future: Future, worker: str, keep: bool = False) -> None:
        """Let the scheduler forget how a state was made, once it is there, or it would remember all
        steps; and let it stay on the server, where Dask may see no use for it at the moment."""
        if await self.outcome(future, [worker]):
            with suppress(OSError):
                if keep:
                    await self.client.scheduler.hoplite_keep(key=future.key, worker=worker)
                await self.client.scheduler.hoplite_settle(key=future.key)

    async def loss_of(self, reporting: Future, worker: str) -> float:
        """What a report says that a worker makes; NaN if it is lost."""
        try:
            if await self.outcome(reporting, [worker]):
                return float(await gathered(self.client, reporting))
        except LOSSES as error:
            logger.info("Hoplite: the loss of a step is not known: %s", error)
        return float("nan")

    async def tell(self, step: Step, state: State) -> None:
        """Give a step to the user, once the one before is taken."""
        await self.room.acquire()
        self.steps.put_nowait(Reached(step, state))
