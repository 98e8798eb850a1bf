"""The loop of a training, on the client: who computes what, and what becomes of it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distributed import Client, Future

from dask_hoplite.core.events import Key
from dask_hoplite.exceptions import HopliteError
from dask_hoplite.sgd import work
from dask_hoplite.sgd.rules import Rule
from dask_hoplite.sgd.shares import Shares
from dask_hoplite.sgd.step import Checkpoint, GradientError, Step, TrainingError
from dask_hoplite.transfer.patience import stop

logger = logging.getLogger(__name__)

#: Steps that may be made before somebody looks at the first of them
AHEAD = 1

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
    """

    worker: str
    version: int
    part: Key
    future: Future
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


class Training:
    """A training that is under way: an iterator of steps.

    Made by :func:`dask_hoplite.sgd.train`. It goes on by itself, one step ahead of who iterates. To
    be iterated with ``for``, or, with an asynchronous client, ``async for``; to be closed, or used
    in ``with`` (``async with``), if it is not iterated to its end.
    """

    def __init__(self, client: Client, plan: Plan, shares: Shares, state: State, nbytes: int):
        self.client = client
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
        self.present: list[str] = []  # workers that there are
        self.alarm = asyncio.Event()  # something has happened
        self.failure: BaseException | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.steps: asyncio.Queue[Reached | BaseException | None] = asyncio.Queue(AHEAD)
        self.over = False
        self.running: asyncio.Task[None] | None = None

    # For the user

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        reached = self.client.sync(self._next)
        if reached is None:
            raise StopIteration
        return reached

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        step = await self._next()
        if step is None:
            raise StopAsyncIteration
        return step

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    async def __aenter__(self) -> Training:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._close()

    @property
    def parameters(self) -> Any:
        """The parameters after the last step that was told; awaitable with an asynchronous client.

        Raises
        ------
        Exception
            If they are lost.
        """
        return self.client.sync(self._parameters)

    def checkpoint(self) -> Any:
        """All that is needed to go on later from the last step that was told.

        Returns
        -------
        Checkpoint
            To be given to :func:`train` as ``resume``. With an asynchronous client, an awaitable.
        """
        return self.client.sync(self._checkpoint)

    def close(self) -> Any:
        """Stop, and leave nothing behind. Parameters can still be had."""
        return self.client.sync(self._close)

    async def _next(self) -> Step | None:
        if self.over:
            return None
        reached = await self.steps.get()
        if isinstance(reached, Reached):
            self.last = reached
            return reached.step
        self.over = True
        if reached is not None:
            raise reached
        return None

    async def _parameters(self) -> Any:
        state = self.last.state
        value = await self.client._gather(state.parameters)
        return value[0] if state.nested else value

    async def _checkpoint(self) -> Checkpoint:
        state = self.last.state
        memory = None if state.memory is None else await self.client._gather(state.memory)
        return Checkpoint(self.last.step.number + 1, await self._parameters(), memory)

    async def _close(self) -> None:
        self.over = True
        if self.running is not None:
            await stop(self.running)
            self.running = None

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
            return  # here, since its traceback would hold all that there is for the collector
        except Exception as error:
            if not isinstance(error, HopliteError):
                logger.exception("Hoplite: a training has failed")
            end = error.with_traceback(None)
        finally:
            watching.cancel()
            for worker in list(self.contributions):
                self.drop(worker)
            for task in list(self.tasks):
                await stop(task)
            self.plan.parts.clear()
        await self.steps.put(end)

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
        """Let a worker compute with some parameters."""
        plan = self.plan
        part = self.shares.next(worker)
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
        told = self.contributions[worker] = Contribution(worker, state.version, part, future)
        told.following = self._spawn(self._follow(told))

    def submit(
        self, function: Any, *args: Any, worker: str, name: str = "", priority: int = 0
    ) -> Future:
        """A task on a worker."""
        name = name or function.__name__
        return self.client.submit(
            function,
            *args,
            key=f"sgd-{name}-{uuid.uuid4().hex}",
            workers=[worker],
            allow_other_workers=False,
            pure=False,
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
        elif told.future.status == "error":
            error = await told.future._exception()
            if isinstance(error, GradientError):
                self.failure = error
            else:  # its worker, or what it needed, is lost
                self._lost(told, error)
        else:
            self._lost(told, None)
        self.alarm.set()

    def _lost(self, told: Contribution, error: BaseException | None) -> None:
        """A contribution that is not the fault of the user's function cannot be had."""
        logger.info("Hoplite: no contribution of %s: %s", told.worker, error)
        self.drop(told.worker)
        part = self.plan.parts.get(told.part)
        if part is not None and part.status in ("cancelled", "error"):
            logger.warning("Hoplite: data %r is lost, and not used any more", told.part)
            del self.plan.parts[told.part]
            self.shares.drop(told.part)
        if not self.plan.parts:
            self.failure = TrainingError(self.number, "all data is lost")

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
            except OSError as error:
                self.failure = TrainingError(self.number, f"the scheduler is gone: {error}")
                self.alarm.set()
                return
            self.present = present
            self.alarm.set()

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
        return []

    def state_for(self, worker: str) -> State:
        """What a worker that has just come, or was lost, begins with."""
        return self.state

    async def something(
        self, deadline: float | None = None, what: str = "", until: float | None = None
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
            await asyncio.wait_for(self.alarm.wait(), timeout)
        except TimeoutError:
            if deadline is not None and monotonic() >= deadline:
                raise TrainingError(self.number, what) from None
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
            await self.something(deadline, f"there is no worker, since {patience:g} s")

    def step_deadline(self) -> tuple[float | None, str]:
        """When the present step must be there, and what is said if it is not."""
        timeout = self.plan.timeout
        if timeout is None:
            return None, ""
        late = [worker for worker in self.contributions if worker not in self.finished]
        return monotonic() + timeout, f"not there within {timeout:g} s; still busy: {late}"

    # Results

    async def settle(self, future: Future, server: str | None = None) -> None:
        """Let the scheduler forget how a state was made, once it is there, or it would remember all
        steps; and let it stay on the server, where Dask may see no use for it at the moment."""
        assert future._state is not None
        await future._state.wait()
        if future.status == "finished":
            with suppress(OSError):
                if server is not None:
                    await self.client.scheduler.hoplite_keep(key=future.key, worker=server)
                await self.client.scheduler.hoplite_settle(key=future.key)

    async def tell(self, step: Step, state: State) -> None:
        """Give a step to the user, once the one before is taken."""
        await self.steps.put(Reached(step, state))


async def loss_of(client: Client, reporting: Future) -> float:
    """What a report says; NaN if it is lost."""
    try:
        return float(await client._gather(reporting))
    except Exception as error:
        logger.info("Hoplite: the loss of a step is not known: %s", error)
        return float("nan")
