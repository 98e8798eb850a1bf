"""The scheduler's part in reductions: each is a task; its plan is made by the core."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from dask._task_spec import Task
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import ToPickle

from dask_hoplite.collectives.account import REMEMBERED, Account
from dask_hoplite.collectives.blocks import Group
from dask_hoplite.collectives.gatherings import Gatherings
from dask_hoplite.collectives.reducer import result_of
from dask_hoplite.collectives.spread import Spread, answered, move
from dask_hoplite.collectives.starting import ANNOTATION
from dask_hoplite.core.events import (
    Combined,
    Due,
    Gone,
    Key,
    Look,
    Promoted,
    Pushed,
    Ready,
    ReductionEvent,
    Released,
    Returned,
    Rooted,
    Silent,
    WorkerLeft,
)
from dask_hoplite.core.instructions import (
    Ask,
    Combine,
    Done,
    Fail,
    Forget,
    Later,
    Pull,
    ReductionInstruction,
)
from dask_hoplite.core.reduction import Reduction
from dask_hoplite.exceptions import ReductionError
from dask_hoplite.messages import encode
from dask_hoplite.targets import worker_named
from dask_hoplite.transfer.patience import stop

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from dask_hoplite.scheduler import Hoplite

logger = logging.getLogger(__name__)

#: What begins the names of clients that hold operands
HOLDER = "hoplite-reduction-"

#: Seconds for which a client is not told yet that operands are unknown
SOON = 0.1

#: Seconds in which a client that has asked for operands to be held asks for their reduction
HOLD = 30.0


class Run:
    """One attempt to make the result of a reduction, from when Dask wants it until it is there."""

    def __init__(self, hoplite: Hoplite, key: Key, wish: dict[str, Any]):
        self.key = key
        #: What the client has asked for; see :func:`dask_hoplite.collectives.submit`
        self.wish = wish
        self.operands: tuple[Key, ...] = tuple(wish["operands"])
        self.events: list[ReductionEvent] = []  # to be handled together
        self.plan: Reduction
        self.root: str | None = None
        self.error: Any = None
        self.why = ""  # it has failed
        self.workers: set[str] = set()  # that have been told something
        self.made = False  # and contributors are known
        self.timers: list[asyncio.TimerHandle] = []
        self.watch: asyncio.TimerHandle | None = None
        self.asked: dict[str, asyncio.Task[None]] = {}  #: workers that are to answer
        self.spread = Spread(hoplite, key)
        self.group: Group | None = None
        self.preferred = False  # whether we have told Dask where
        self.parked = False  # while its group decides, or does its work
        self.account = Account(key, len(self.operands))

    def take_events(self) -> list[ReductionEvent]:
        """What is to be handled. The root first: what is ready is placed with a view to it."""
        events, self.events = self.events, []
        return sorted(events, key=lambda event: not isinstance(event, Rooted))

    def silence(self) -> None:
        """Wait for nothing any more."""
        for timer in (*self.timers, self.watch):
            if timer is not None:
                timer.cancel()
        for asking in self.asked.values():
            asking.cancel()

    @property
    def spreads(self) -> bool:
        """Whether others than the root are to have the result, too."""
        return self.wish["spread"] is not None


class Reductions:
    """All reductions of a cluster.

    A reduction is a task with an annotation. If all of its operands go into it, they are its
    dependencies, so that Dask computes them again if they are lost. If some do, it has none before
    it is known which; they are held for it meanwhile.
    """

    def __init__(self, hoplite: Hoplite, scheduler: Scheduler):
        self.hoplite = hoplite
        self.scheduler = scheduler
        self.runs: dict[Key, Run] = {}
        self.users: defaultdict[Key, set[Key]] = defaultdict(set)  # reductions by operand
        self.groups: dict[Key, Group] = {}
        self.gatherings = Gatherings(hoplite, scheduler)
        self.contributors: dict[Key, tuple[Key, ...]] = {}
        self.ended: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)  #: for people
        self.number = itertools.count(1).__next__
        #: From how many others each worker takes; None: as the cost model recommends
        self.degree: int | None = None

    # What Dask tells

    def transition(self, key: Key, start: str, finish: str) -> None:
        """See operands and results come and go. Called for every task: must cost nothing."""
        if key in self.users:
            self._operand(key, finish)
        if key in self.runs:
            self._result(self.runs[key], start, finish)
        elif key in self.gatherings.gatherings:
            self.gatherings.transition(key, start, finish)
        elif start == "released" and finish == "waiting":
            ts = self.scheduler.tasks[key]
            if ts.annotations and ANNOTATION in ts.annotations:
                self._begin(ts)
        if finish == "forgotten":
            self.contributors.pop(key, None)

    def _begin(self, ts: TaskState) -> None:
        assert ts.annotations is not None
        wish = ts.annotations[ANNOTATION]
        ts._queueable = False  # it needs no slot
        if wish["op"] is None:
            self.gatherings.begin(ts, wish)
            return
        known = self.contributors.get(ts.key)
        if known is not None:  # the result was there, and is lost: once more of the same
            wish = {**wish, "operands": known, "count": len(known)}
        run = self.runs[ts.key] = Run(self.hoplite, ts.key, wish)
        for operand in run.operands:
            self.users[operand].add(ts.key)
        if not ts.dependencies:  # it is not known yet which they will be
            held = [operand for operand in run.operands if operand in self.scheduler.tasks]
            self.scheduler.client_desires_keys(keys=held, client=holder(ts.key))
        if wish["timeout"] is not None and known is None:
            loop = asyncio.get_running_loop()
            run.timers.append(loop.call_later(wish["timeout"], self._overdue, run))
        if wish["block"] is not None and known is None:
            number, blocks, key = wish["block"]
            group = self.groups.setdefault(key, Group(self, key, blocks))
            group.join(run, number)
        self.plan(run)

    def plan(self, run: Run) -> None:
        """Begin with a plan."""
        hoplite = self.hoplite
        run.made = False
        run.plan = Reduction(
            run.key,
            run.operands,
            run.wish["count"],
            hoplite.holders,
            hoplite.directory.hosts,
            self._nbytes,
            self.number,
            cost=hoplite.directory.cost,
            ordered=run.wish["ordered"],
            ring=run.wish["spread"] == "contributors",
            stall_timeout=hoplite.config.stall_timeout,
            degree=self.degree,
        )
        for operand in run.operands:
            ts = self.scheduler.tasks.get(operand)
            if ts is None:
                self._later(run, Gone(run.key, operand, "it was released, or never known"))
            elif ts.state == "memory":
                self._later(run, Ready(run.key, operand))
            elif ts.state == "erred":
                self._later(run, Gone(run.key, operand, "its task has failed"))
        if run.root is not None:
            self._later(run, Rooted(run.key, run.root))

    def _operand(self, operand: Key, finish: str) -> None:
        reasons = {"erred": "its task has failed", "forgotten": "it was lost or cancelled"}
        for key in self.users[operand]:
            if finish == "memory":
                self._prefer(self.scheduler.tasks[key], self.hoplite.holders(operand))
                self._later(self.runs[key], Ready(key, operand))
            elif finish in reasons:
                self._later(self.runs[key], Gone(key, operand, reasons[finish]))

    def _prefer(self, ts: TaskState, workers: Collection[str]) -> None:
        """Let Dask choose the last worker that had an operand to add: what others have comes there
        in any case."""
        run = self.runs[ts.key]
        free = not ts.worker_restrictions or run.preferred
        if ts.state == "waiting" and not ts.waiting_on and free:
            run.preferred = True
            ts.worker_restrictions, ts.loose_restrictions = set(workers), True

    def _result(self, run: Run, start: str, finish: str) -> None:
        ts = self.scheduler.tasks[run.key]
        if finish == "processing" and ts.processing_on is not None:
            self._root(run, ts.processing_on.address)
        elif start == "processing" and finish in ("released", "waiting", "no-worker"):
            self._root(run, None)
        elif finish == "memory":
            self._arrived(run, ts)
        elif finish in ("erred", "forgotten"):
            self._end(run, "failed" if finish == "erred" else "released")

    def _root(self, run: Run, worker: str | None) -> None:
        run.root = worker
        if run.group is not None and run.group.ring is not None:
            run.group.dissolve()  # what it was, it is no more
        if worker is None:
            self._recall(run)
        if run.plan.over and not run.error:  # it was made, but then the root was lost
            self.forget(run)
            self.hoplite.record.replan(key=run.key, reason="the result was lost")
            self.plan(run)
        else:
            self._later(run, Rooted(run.key, worker))
        if worker is not None and run.error:
            self.hoplite.send(worker, "hoplite-fail", key=run.key, error=run.error)

    def _arrived(self, run: Run, ts: TaskState) -> None:
        """The result is there: others who have made it, or got it, may keep it."""
        if run.spreads:
            named = run.wish["spread"]
            run.spread.keep(ts, () if named == "contributors" else named)
        for operand in self.contributors.get(run.key, ()):
            # From now on, it is known of what Dask would have to make it again.
            if (dts := self.scheduler.tasks.get(operand)) is not None:
                ts.add_dependency(dts)
        self._end(run, "finished")

    def _end(self, run: Run, status: str = "released") -> None:
        """Leave nothing behind of a run, but what people may want to know of it."""
        if self.runs.pop(run.key, None) is None:
            return
        self.hoplite.record.end(status, key=run.key, reason=run.why)
        self.ended.append(run.account.row(status, len(self.contributors.get(run.key, ()))))
        if run.group is not None and run.parked:  # a block is not wanted any more
            run.parked = False
            run.group.dissolve()
        run.silence()
        for operand in run.operands:
            self.users[operand].discard(run.key)
            if not self.users[operand]:
                del self.users[operand]
        self.forget(run)
        client = holder(run.key)
        if client in self.scheduler.clients:
            # Not now: Dask is in the middle of something.
            self.hoplite.spawn(self._release(client))

    async def _release(self, client: str) -> None:
        self._let_go(client)

    def _let_go(self, client: str) -> None:
        """Hold operands for a reduction no longer."""
        if (state := self.scheduler.clients.get(client)) is not None:
            keys = [ts.key for ts in state.wants_what]
            self.scheduler.client_releases_keys(keys=keys, client=client)
            self.scheduler.clients.pop(client, None)

    def forget(self, run: Run) -> None:
        """Let workers drop what they have of a run."""
        for worker in run.workers | ({run.root} if run.root is not None else set()):
            self.hoplite.send(worker, "hoplite-forget", key=run.key)
        run.workers = set()
        self._recall(run)

    def _recall(self, run: Run) -> None:
        """Whatever others have, or are about to get, of a result that is not to be."""
        run.spread.drop(run.root)
        if run.spreads and run.key in self.hoplite.directory.trees:
            self.hoplite.perform(self.hoplite.handle(Released(run.key)))

    def worker_left(self, worker: str) -> None:
        """Count a worker out."""
        for run in list(self.runs.values()):
            run.spread.copies.discard(worker)
            self.now(run, WorkerLeft(worker))

    def restart(self) -> None:
        """Forget all."""
        self.gatherings.restart()
        for run in list(self.runs.values()):
            self._end(run)

    def close(self) -> None:
        """Hoplite is uninstalled: what is under way is left to Dask."""
        self.restart()
        for client in list(self.scheduler.clients):
            if client.startswith(HOLDER):
                self._let_go(client)

    def task_to_msg(self, ts: TaskState, message: dict[str, Any]) -> None:
        """Change what a worker gets to do: not to fetch the operands, but to wait."""
        message["annotations"] = {**message["annotations"], ANNOTATION: True}
        message["who_has"], message["nbytes"] = {}, {}
        message["run_spec"] = ToPickle(Task(ts.key, result_of, ts.key))

    # What workers tell

    def tell(self, event: ReductionEvent) -> None:
        """Take in what a worker reports."""
        run = self.runs.get(event.key)  # type: ignore[union-attr]
        if run is None:
            return
        if isinstance(event, Combined):
            self._learn(run, event)
            run.account.end(event.node)
        self.now(run, event)

    def _learn(self, run: Run, event: Combined) -> None:
        node = run.plan.nodes.get(event.node)
        if node is not None and node.sources and not node.done:
            nbytes = max((self._nbytes(key) for key in run.operands), default=0)
            cost = self.hoplite.directory.cost
            cost.learn(latency=cost.latency, nbytes=nbytes, seconds=event.seconds)

    # Events and instructions

    def _later(self, run: Run, event: ReductionEvent) -> None:
        """Handle an event when Dask is through with what it does, together with others."""
        if not run.events:
            asyncio.get_running_loop().call_soon(self._drain, run)
        run.events.append(event)

    def _drain(self, run: Run) -> None:
        if run.parked:
            assert run.group is not None
            run.group.assemble()
            return
        for event in run.take_events():
            self.now(run, event)

    def now(self, run: Run, event: ReductionEvent) -> None:
        """Handle an event, unless the run's group is to decide first."""
        if run.parked:
            run.events.append(event)
        elif self.runs.get(run.key) is run:
            told = run.plan.handle(event, monotonic())
            if any(isinstance(one, Forget) for one in told):
                self.hoplite.record.replan(key=run.key, reason=_because(event, run.plan))
            self._perform(run, told)

    def _perform(self, run: Run, instructions: Iterable[ReductionInstruction]) -> None:
        for told in instructions:
            if run.group is not None and run.group.ring is run:
                run.group.perform(told)
                if run.group.over:
                    return
            if isinstance(told, Combine):
                self.combine(run, told)
            elif isinstance(told, Forget):
                run.account.end(told.node, f"given up: {run.plan.reason or 'a worker left'}")
                self.hoplite.send(told.worker, "hoplite-forget", key=told.key, node=told.node)
            elif isinstance(told, Later):
                loop = asyncio.get_running_loop()
                due = Due(run.key)
                run.timers.append(loop.call_later(told.seconds, self.now, run, due))
            elif isinstance(told, Ask):
                self._ask(run, told.worker)
            elif isinstance(told, Done):
                self._done(run, told)
            elif isinstance(told, Fail):
                self._fail(run, told)

    def combine(
        self, run: Run, told: Combine, order: list[int] | None = None, result: Key | None = None
    ) -> None:
        """Let a worker make a sum; in a ring for blocks, of which one is its own ``result``."""
        directory = self.hoplite.directory
        serve = None
        if told.count and run.spreads:
            self._recall(run)
        if told.count and run.spreads and not told.ring:
            nbytes = self.size(run)
            pushed = Pushed(run.key, told.worker, nbytes, "reduction", ahead=True)
            [pull] = self.hoplite.handle(pushed)
            assert isinstance(pull, Pull)
            serve = pull.epoch
        weights = run.wish["weights"]
        self.hoplite.send(
            told.worker,
            "hoplite-combine",
            combine=encode(told),
            terms={
                "how": run.wish["op"],
                "result": run.key if result is None else result,
                "serve": serve,
                "shares_host": directory.crowds[directory.hosts.get(told.worker, "")] > 1,
                "block": run.wish["block"],
                "order": order,
                "weights": weights and [weights[operand] for operand in told.operands],
            },
        )
        run.account.begin(told)
        run.workers.add(told.worker)
        if result is not None:
            self.runs[result].workers.add(told.worker)  # it may be there, and not be wanted
        if serve is not None:
            self._spread(run, told.worker)
        if told.count:
            self.watch(run)

    # Workers that do not answer

    def watch(self, run: Run) -> None:
        """From now on, see to it that those who make the result are alive."""
        if run.watch is None:
            loop = asyncio.get_running_loop()
            run.watch = loop.call_later(self.hoplite.config.stall_timeout, self._look, run)

    def _look(self, run: Run) -> None:
        run.watch = None
        if self.runs.get(run.key) is not run:
            return
        self.now(run, Look(run.key))
        if run.plan.over and run.root is not None:  # it says no more, but Dask has no result yet
            self._ask(run, run.root)
        self.watch(run)

    def _ask(self, run: Run, worker: str) -> None:
        """Find out whether a worker answers."""
        if worker not in run.asked:
            run.asked[worker] = task = self.hoplite.spawn(self._answer(run, worker))
            task.add_done_callback(lambda _: run.asked.pop(worker, None))

    async def _answer(self, run: Run, worker: str) -> None:
        echo = asyncio.ensure_future(self.scheduler.rpc(worker).echo(data="hoplite"))
        try:
            if not await answered(echo, self.hoplite.config.stall_timeout):
                self.now(run, Silent(run.key, worker))
                if run.root == worker:
                    silent = run.plan.suspects.keys() | run.asked.keys()
                    move(self.hoplite, run.key, worker, silent)
            await echo
        except OSError:
            return  # it has left, as Dask is about to learn
        finally:
            await stop(echo)
        self.now(run, Returned(run.key, worker))

    def _done(self, run: Run, told: Done) -> None:
        self.contributors[run.key] = told.contributors
        run.made = True
        if run.spreads and run.spread.task is None:
            assert run.root is not None
            self._spread(run, run.root)
        else:
            self._release_result(run)

    def _release_result(self, run: Run) -> None:
        """Let the root give the result to Dask, if it is made, and all others have it."""
        if run.made and run.root is not None and (run.spread.over or not run.spreads):
            self.hoplite.send(run.root, "hoplite-release", key=run.key)

    def _fail(self, run: Run, told: Fail) -> None:
        error: Any = told.error
        run.why = told.reason
        if not error:
            failed = [self.scheduler.tasks.get(key) for key in told.operands]
            erred = [ts for ts in failed if ts is not None and ts.state == "erred"]
            if erred and erred[0].exception is not None:
                error = erred[0].exception  # as Dask has it: only who gets it looks into it
            else:
                error = dumps(ReductionError(run.key, told.reason))
        self.give_up(run, error)

    def give_up(self, run: Run, error: Any) -> None:
        """Let the task fail: with a pickled error, or one as Dask has it."""
        run.error = error
        run.plan.over = True
        run.spread.stop()
        self.watch(run)
        if run.root is not None:
            self.hoplite.send(run.root, "hoplite-fail", key=run.key, error=error)
        else:  # not now: Dask may be in the middle of something
            asyncio.get_running_loop().call_soon(self._fail_here, run)

    def _fail_here(self, run: Run) -> None:
        """Let the task fail that no worker has: there is none."""
        ts = self.scheduler.tasks.get(run.key)
        if ts is not None and ts.state in ("no-worker", "queued"):
            stimulus_id = f"hoplite-fail-{time()}"
            told = self.scheduler.transition(
                run.key, "erred", exception=run.error, cause=run.key, stimulus_id=stimulus_id
            )
            self.scheduler.transitions(told, stimulus_id=stimulus_id)

    def _overdue(self, run: Run) -> None:
        if not run.plan.over:
            seconds = run.wish["timeout"]
            late = [key for key in run.operands if key not in run.plan.ready]
            why = f"{len(late)} of {len(run.operands)} operands are not ready: {late}"
            text = f"{run.key!r} was not there within {seconds} s" + (f"; {why}" if late else "")
            run.why = text
            self.give_up(run, dumps(TimeoutError(text)))

    # Results that several workers are to have

    def _spread(self, run: Run, root: str) -> None:
        """Let all who are to have the result get it, and then let the root give it to Dask."""
        named = run.wish["spread"]
        if named == "contributors":
            # The last ones are still busy with what they take for the sum, and so come last.
            nodes = (run.plan.nodes[number] for number in sorted(run.plan.nodes))
            workers = dict.fromkeys(node.worker for node in nodes if node.operands)
        else:
            workers = dict.fromkeys(named)
        there = [w for w in workers if w != root and w in self.scheduler.workers]
        nbytes = self.size(run)

        async def bring(worker: str) -> bool:
            return not await self.hoplite.copies.acquire(worker, {run.key: nbytes})

        run.spread.begin(root, there, bring, lambda: self._release_result(run))

    def size(self, run: Run) -> int:
        """Bytes that a result will have, or about so many."""
        return max(map(self._nbytes, run.operands), default=0)

    # What clients ask

    async def hold(
        self, key: Key, operands: Collection[Key], workers: Collection[str] = ()
    ) -> dict[str, Any]:
        """Keep operands for a reduction that is about to be asked for.

        Returns
        -------
        dict
            ``missing``: keys that are unknown; ``busy``: whether there are graphs that are not yet
            taken in; ``addresses`` of the workers.

        Raises
        ------
        ValueError
            If there is no such worker.
        """
        addresses = [worker_named(self.scheduler, worker).address for worker in workers]
        deadline = monotonic() + SOON
        while missing := [key for key in operands if key not in self.scheduler.tasks]:
            # What was submitted just before goes another way, and may be slower.
            if monotonic() > deadline:
                break
            await asyncio.sleep(0.001)
        if operands and not missing:
            self.scheduler.client_desires_keys(keys=list(operands), client=holder(key))
            asyncio.get_running_loop().call_later(HOLD, self._expire, key)
        busy = bool(self.scheduler._active_graph_updates)
        return {"missing": missing, "busy": busy, "addresses": addresses}

    def _expire(self, key: Key) -> None:
        """Hold nothing for a client that has not gone on to ask for its reduction."""
        if key not in self.scheduler.tasks:
            self._let_go(holder(key))

    def accounts(self, key: Key) -> list[dict[str, Any]]:
        """The runs of a reduction that are remembered, in order of time."""
        found = [dict(row) for row in self.ended if row["key"] == key]
        if (run := self.runs.get(key)) is not None:
            found.append(run.account.row())
        return found

    async def contributors_of(self, key: Key) -> tuple[Key, ...] | None:
        """The operands that went into a result."""
        return self.contributors.get(key)

    def _nbytes(self, key: Key) -> int:
        ts = self.scheduler.tasks.get(key)
        return max(ts.nbytes, 0) if ts is not None else 0


def _because(event: ReductionEvent, plan: Reduction) -> str:
    """Why sums have to be made again."""
    if isinstance(event, WorkerLeft):
        return f"{event.worker} left"
    if isinstance(event, Silent):
        return f"{event.worker} is silent"
    if isinstance(event, Rooted):
        return "the result is made elsewhere"
    if isinstance(event, Promoted):
        return "operands are of several item sizes"
    return plan.reason


def holder(key: Key) -> str:
    """As which client operands are held for a reduction."""
    return f"{HOLDER}{key}"
