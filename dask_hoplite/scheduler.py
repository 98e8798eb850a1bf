"""Hoplite on the scheduler: Dask's hooks become events, the core's instructions become messages."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter, time
from typing import Any

from dask.utils import format_bytes
from distributed import Scheduler, SchedulerPlugin
from distributed.active_memory_manager import (
    ActiveMemoryManagerPolicy,
    ReduceReplicas,
    SuggestionGenerator,
)
from distributed.comm.core import Comm, CommClosedError
from distributed.core import Status
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState, WorkerState

import dask_hoplite
from dask_hoplite import dashboard, lost_object, metrics, seams, versions
from dask_hoplite.aside import NAME, Again, Aside
from dask_hoplite.collectives.reductions import Reductions
from dask_hoplite.collectives.starting import ANNOTATION
from dask_hoplite.config import Config
from dask_hoplite.copies import Copies
from dask_hoplite.core.directory import Directory
from dask_hoplite.core.events import (
    Event,
    Key,
    ReductionEvent,
    Released,
    Wanted,
    WorkerJoined,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Cancel, Instruction
from dask_hoplite.core.record import Record
from dask_hoplite.core.wishes import Wishes
from dask_hoplite.exceptions import ObjectLostError
from dask_hoplite.messages import decode, encode
from dask_hoplite.peers import Peers
from dask_hoplite.presence import Presence
from dask_hoplite.puts import Puts
from dask_hoplite.reporting.inquiries import Inquiries
from dask_hoplite.settled import settle
from dask_hoplite.targets import fits
from dask_hoplite.transfer.relay import relay
from dask_hoplite.transfer.serve import NoReply
from dask_hoplite.worker import TOPIC, HopliteWorker

logger = logging.getLogger(__name__)


class Hoplite(SchedulerPlugin):
    """Pipelined, fault-tolerant transfer of large objects, for all programs on a cluster.

    Parameters
    ----------
    min_size : int or str, optional
        Objects of fewer bytes take Dask's own path. Default: ``hoplite.min-size`` of the
        scheduler's configuration; likewise the others.
    stall_timeout : float or str, optional
        Seconds without a byte after which a receiver looks for another source.
    push_timeout : float or str, optional
        Seconds without a byte after which an object that comes from a client is given up.
    history : int, optional
        Ended transfers that :func:`dask_hoplite.transfers` remembers.

    Notes
    -----
    The method is that of Hoplite (Zhuang et al., SIGCOMM 2021, arXiv 2002.05814): schedules are
    computed as transfers are asked for, from what is ready and who is free at that moment, and
    receivers send on what they have while the rest still comes.

    Registering twice, also by several clients, is a no-op.

    Examples
    --------
    >>> client.register_plugin(Hoplite())

    With settings of one's own, before anybody else has registered it:

    >>> plugin = Hoplite(min_size="2 MiB", stall_timeout="5s")
    """

    name = NAME
    idempotent = True

    def __init__(
        self,
        min_size: int | str | None = None,
        stall_timeout: float | str | None = None,
        push_timeout: float | str | None = None,
        history: int | None = None,
    ):
        self.overrides = {
            "min_size": min_size,
            "stall_timeout": stall_timeout,
            "push_timeout": push_timeout,
            "history": history,
        }
        Config.read(**self.overrides)  # a mistake should show here, not on the scheduler

    # Installation

    async def start(self, scheduler: Scheduler) -> None:
        """Install on a scheduler, and on its present and future workers."""
        installing = scheduler.extensions.get(NAME)
        if installing is not None:  # by another name, or another client is just doing so
            self.__class__ = Again  # type: ignore[assignment]
            await installing.ready.wait()
            return
        if reason := versions.check(seams.SCHEDULER, scheduler):
            self._step_aside(scheduler, reason)
            return
        scheduler.extensions[NAME] = self
        self.ready = asyncio.Event()
        self.scheduler = scheduler
        self.config = Config.read(**self.overrides)
        if scheduler.address.startswith("inproc://"):
            # There, nothing is ever copied: all objects are small.
            self.config = replace(self.config, min_size=sys.maxsize)
        self.wishes = Wishes()
        self.losses: dict[Key, dict[str, str]] = {}  # where last copies were, and what happened
        self.tasks: set[asyncio.Task[Any]] = set()
        self.reductions = Reductions(self, scheduler)
        self.presence = Presence(scheduler)
        self.inquiries = Inquiries(self, scheduler)
        self.peers = Peers()
        self.record = Record(partial(scheduler.log_event, NAME))
        self._reset()
        for address in scheduler.workers:
            self.add_worker(scheduler, address)
        self.copies = Copies(self, scheduler)
        self.puts = Puts(self, scheduler, self.copies)
        self._install()
        plugin = HopliteWorker(
            self.config.min_size, self.config.stall_timeout, self.config.push_timeout
        )
        try:
            await scheduler.register_worker_plugin(None, dumps(plugin), name=NAME, idempotent=True)
        except OSError as error:  # of one that has left meanwhile; all others have it
            logger.warning("A worker could not be told of Hoplite: %s", error)
        finally:
            self.ready.set()  # or whoever registers it again would wait for ever

    def _step_aside(self, scheduler: Scheduler, reason: str) -> None:
        """Leave everything to Dask, and say why."""
        self.__class__ = Aside  # type: ignore[assignment]  # for Dask calls the hooks of whatever was registered
        Aside.stand(self, scheduler, reason)  # type: ignore[arg-type]

    def _reset(self) -> None:
        self.directory = Directory(
            self.holders,
            stall_timeout=self.config.stall_timeout,
            history=self.config.history,
            record=self.record,
        )

    def _install(self) -> None:
        scheduler, copies, puts = self.scheduler, self.copies, self.puts
        self.added: dict[str, Callable[..., Any]] = {
            "hoplite_hello": self.hello,
            "hoplite_meet": self.meet,
            "hoplite_tell": self.tell,
            "hoplite_place": puts.place,
            "hoplite_commit": puts.commit,
            "hoplite_abort": self.abort,
            "hoplite_comes": puts.comes,
            "hoplite_broadcast": copies.broadcast,
            "hoplite_hold": self.reductions.hold,
            "hoplite_gathers": self.reductions.gatherings.gathers,
            "hoplite_contributors": self.reductions.contributors_of,
            "hoplite_locate": self.locate,
            "hoplite_keep": self.keep,
            "hoplite_settle": self.settle,
            "hoplite_workers": self.presence.workers,
            "hoplite_relay": self.relay,
            "hoplite_transfers": self.transfers,
            "hoplite_status": self.status,
            "hoplite_report": self.inquiries.report,
            "hoplite_progress": self.inquiries.progress,
        }
        methods: dict[str, Callable[..., Any]] = {
            "scatter": puts.scatter,
            "adaptive_target": puts.adaptive_target,
            "replicate": copies.replicate,
            "gather_on_worker": copies.gather_on_worker,
            "_task_to_msg": self.task_to_msg,
            "remove_plugin": self.remove_plugin,
            "unregister_scheduler_plugin": self.unregister,
        }
        self.plain_remove_plugin = scheduler.remove_plugin
        self.plain_task_to_msg = scheduler._task_to_msg
        self.replaced: dict[str, Callable[..., Any]] = {}
        for name, method in methods.items():
            setattr(scheduler, name, method)
            if name in scheduler.handlers:
                self.replaced[name] = scheduler.handlers[name]
                scheduler.handlers[name] = method
        self.methods = methods
        scheduler.handlers.update(self.added)
        self.plain_status_change = scheduler.stream_handlers["worker-status-change"]
        scheduler.stream_handlers["worker-status-change"] = self.worker_status_change
        lost_object.install(scheduler, self.lost)
        metrics.SCHEDULERS.install(scheduler)
        self._replace_policies(
            ReduceReplicas, lambda policy: KeepWishedReplicas(policy, self.wishes)
        )
        dashboard.install(scheduler)

    def _uninstall(self) -> None:
        scheduler = self.scheduler
        if scheduler.extensions.pop(NAME, None) is None:
            return
        for name, method in self.methods.items():
            if scheduler.__dict__.get(name) == method:
                delattr(scheduler, name)
        scheduler.handlers.update(self.replaced)
        scheduler.stream_handlers["worker-status-change"] = self.plain_status_change
        for name in self.added:
            scheduler.handlers.pop(name, None)
        lost_object.uninstall(scheduler)
        dashboard.uninstall(scheduler)
        metrics.SCHEDULERS.uninstall(scheduler)
        self._replace_policies(KeepWishedReplicas, lambda policy: policy.policy)
        self.reductions.close()
        self.presence.change()  # nobody waits for more
        for task in self.tasks:
            task.cancel()

    def _replace_policies(self, kind: type, by: Callable[[Any], Any]) -> None:
        """Exchange policies of Dask's memory manager, if it has one."""
        manager: Any = self.scheduler.extensions.get("amm")
        for policy in list(manager.policies) if manager is not None else ():
            if isinstance(policy, kind):
                manager.policies.discard(policy)
                manager.add_policy(by(policy))

    def remove_plugin(self, name: str | None = None) -> None:
        """In place of :meth:`distributed.Scheduler.remove_plugin`, which has no hook."""
        if self._is_removed_by(name):
            self._uninstall()
            self.scheduler._ongoing_background_tasks.call_soon(self._leave_workers)

    async def unregister(self, name: str) -> None:
        """In place of :meth:`distributed.Scheduler.unregister_scheduler_plugin`."""
        if self._is_removed_by(name):
            self._uninstall()
            await self._leave_workers()

    def _is_removed_by(self, name: str | None) -> bool:
        """Remove a plugin, and say whether it was this one, which may have any name."""
        plugins = self.scheduler.plugins
        was_there = self in plugins.values()
        self.plain_remove_plugin(name)
        return was_there and self not in plugins.values()

    async def _leave_workers(self) -> None:
        if NAME in self.scheduler.worker_plugins:
            await self.scheduler.unregister_worker_plugin(None, NAME)

    async def close(self) -> None:
        """Stop what is under way, with the scheduler."""
        metrics.SCHEDULERS.uninstall(self.scheduler)
        for run in self.reductions.runs.values():
            run.silence()  # or its timers would go on for as long as the event loop does
        for task in self.tasks:
            task.cancel()

    # Dask's hooks

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Count a worker in."""
        self.handle(WorkerJoined(worker, scheduler.workers[worker].host))
        self.presence.change()
        self.inquiries.joined(worker)
        self.fulfil(self.wishes.of(worker))

    def worker_status_change(self, worker: str, **kwargs: Any) -> None:
        """In place of Dask's handler: who runs, again or at last, gets what is meant for it."""
        self.plain_status_change(worker=worker, **kwargs)
        self.presence.change()
        self.fulfil(self.wishes.of(worker))

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Count a worker out. Those that it fed are told when they next ask."""
        self.handle(WorkerLeft(worker))
        self.presence.change()
        self.peers.left(worker)
        self.reductions.worker_left(worker)

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Keep adaptive scaling from workers that are being sent objects, of which they hold none
        yet by what Dask knows."""
        roots = {put.root for put in self.puts.pending.values()}
        return [ws for ws in workers if ws.address not in roots]

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Give up what a client was about to push."""
        self.puts.client_left(client)

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all objects."""
        self.wishes.clear()
        self.reductions.restart()
        self._reset()
        for worker in scheduler.workers:
            self.add_worker(scheduler, worker)

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """See objects come and go. Called for every task of the cluster: must cost nothing."""
        self.reductions.transition(key, start, finish)
        if start == "memory" and key in self.directory.trees:
            self.perform(self.handle(Released(key)))
        if finish == "forgotten":
            self.wishes.drop(key)  # not before: a key that is only lost comes back
        elif finish == "memory" and key in self.wishes:
            self.spawn(self._fulfil_soon(key))

    async def _fulfil_soon(self, key: Key) -> None:
        self.fulfil([key])

    def task_to_msg(self, ts: TaskState, *args: Any) -> dict[str, Any]:
        """In place of :meth:`distributed.Scheduler._task_to_msg`: a task brings the decision about
        the large object that its worker will have to get.

        That worker need not ask, and since tasks are sent in the order of their priorities while
        questions come in any order, repeated work takes the same ways, whose connections exist.
        """
        message = self.plain_task_to_msg(ts, *args)
        if ts.annotations and ANNOTATION in ts.annotations:
            self.reductions.task_to_msg(ts, message)
            return message
        ws = ts.processing_on
        if ws is not None and ws.status == Status.running:
            missing = [
                dts
                for dts in ts.dependencies
                if dts.nbytes >= self.config.min_size and ws not in (dts.who_has or ())
            ]
            # With several, Dask decides when it gets which.
            if len(missing) == 1 and (pull := self.decide_ahead(missing[0].key, ws.address)):
                message["annotations"] = {**message["annotations"], NAME: pull}
        return message

    def decide_ahead(self, key: Key, worker: str) -> dict[str, Any] | None:
        """A source, perhaps, for a worker that does not know yet that it will get an object."""
        nbytes = self.nbytes(key)
        if nbytes is None:
            return None
        return self._decide(Wanted(key, worker, nbytes, ahead=True))

    # Events and instructions

    def handle(self, event: Event) -> list[Instruction]:
        """Let the core decide."""
        begun = perf_counter()
        instructions = self.directory.handle(event, monotonic())
        self.record.decided(perf_counter() - begun)
        return instructions

    async def tell(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """A worker tells of an event; the answer is what it is to do, if anything."""
        return self._decide(decode(event))

    def _decide(self, event: Any) -> dict[str, Any] | None:
        if isinstance(event, Wanted):
            event = replace(event, expected=self._expected(event.key))
        own = [i for i in self.handle(event) if i.receiver == event.receiver]
        return encode(own[0]) if own else None

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker reports what needs no answer; or Dask, that it removes a worker."""
        if topic == TOPIC:
            event = decode(msg["event"])
            if isinstance(event, ReductionEvent):
                self.reductions.tell(event)
            else:
                self.perform(self.handle(event))
        elif isinstance(msg, dict) and msg.get("action") == "remove-worker":
            how = "left" if msg.get("expected") else "died, or was cut off"
            for key in msg.get("lost-scattered-tasks", ()):
                self.losses[key] = {msg.get("worker", topic): how}

    def lost(self, ts: TaskState) -> Exception | None:
        """What the loss of an object is reported as."""
        where = self.losses.pop(ts.key, {})
        if ts.nbytes < self.config.min_size:
            return None
        self.record.lose(key=ts.key, nbytes=ts.nbytes, holders=where)
        reason = f"the last copy of these {format_bytes(ts.nbytes)} is lost"
        return ObjectLostError(ts.key, f"{reason}, and it was scattered, not computed", where)

    def perform(self, instructions: Iterable[Instruction]) -> None:
        """Carry out what the core decided for workers that did not ask."""
        for instruction in instructions:
            if isinstance(instruction, Cancel) and instruction.receiver in self.scheduler.workers:
                self.spawn(self.cancel(instruction))

    async def cancel(self, instruction: Cancel) -> None:
        """Tell a worker to drop what it has of an object, and wait until it has."""
        try:
            await self.scheduler.rpc(instruction.receiver).hoplite_cancel(
                key=instruction.key, epoch=instruction.epoch
            )
        except OSError:
            logger.debug("Hoplite: %s left before it was told", instruction.receiver)

    def send(self, worker: str, op: str, **message: Any) -> None:
        """Tell a worker, in the order of telling, and without waiting for one that is frozen."""
        comm = self.scheduler.stream_comms.get(worker)
        if comm is not None:
            with suppress(CommClosedError):  # it has left, as Dask is about to learn
                comm.send({"op": op, **message})

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside, for as long as the plugin is installed."""
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def fulfil(self, keys: Iterable[Key]) -> None:
        """Let workers acquire what they are meant to have and have not, without waiting."""
        running = {ws.address for ws in self.scheduler.running}
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state != "memory" or not ts.who_has:
                continue
            missing = self.wishes.targets(key, running) - {ws.address for ws in ts.who_has}
            for worker in missing:
                if fits(ts.nbytes, self.scheduler.workers[worker]):
                    with suppress(CommClosedError):  # it has left, as Dask is about to learn
                        self.scheduler.request_acquire_replicas(
                            worker, [key], stimulus_id=f"hoplite-wish-{time()}"
                        )

    # What the core needs to know of Dask

    def holding(self, key: Key) -> Collection[WorkerState]:
        """Workers with a complete copy, at this moment."""
        ts = self.scheduler.tasks.get(key)
        return ts.who_has or () if ts is not None else ()

    def holders(self, key: Key) -> Collection[str]:
        """Their addresses."""
        return [ws.address for ws in self.holding(key)]

    def is_large(self, key: Key) -> bool:
        """Whether Hoplite moves this key."""
        ts = self.scheduler.tasks.get(key)
        return ts is not None and ts.nbytes >= self.config.min_size and not ts.actor

    def nbytes(self, key: Key) -> int | None:
        """The size of an object that Hoplite moves."""
        if (put := self.puts.pending.get(key)) is not None:
            return put.nbytes
        if (run := self.reductions.runs.get(key)) is not None:
            return self.reductions.size(run)
        return self.scheduler.tasks[key].nbytes if self.is_large(key) else None

    def _expected(self, key: Key) -> int:
        """How many workers may want this object about now."""
        if (put := self.puts.pending.get(key)) is not None:
            return len(put.copying) + 1
        ts = self.scheduler.tasks.get(key)
        waiting = len(ts.waiters or ()) if ts is not None else 1
        return max(self.copies.planned.get(key, 0), min(waiting, len(self.scheduler.workers)))

    # Who takes part

    async def meet(self, worker: str, version: str, refused: str | None) -> None:
        """A worker has its half, or says why it cannot. What one cannot, none should."""
        if refused is None:
            if worker in self.scheduler.workers:  # and has not left meanwhile
                self.peers.tell(worker, version)
        elif self.scheduler.extensions.get(NAME) is self:
            self._uninstall()
            self.scheduler._ongoing_background_tasks.call_soon(self._leave_workers)
            self._step_aside(self.scheduler, f"on {worker}, {refused}")

    # What clients ask

    async def hello(self) -> dict[str, Any]:
        """What a client must know to take part."""
        return {
            "version": dask_hoplite.__version__,
            "workers": self.peers.versions,
            "min_size": self.config.min_size,
            "stall_timeout": self.config.stall_timeout,
            "push_timeout": self.config.push_timeout,
        }

    async def relay(self, comm: Comm, worker: str) -> NoReply:
        """A client has something to ask a worker that it does not reach itself."""
        scheduler = self.scheduler
        return await relay(comm, scheduler.rpc, worker, scheduler.workers, self.config.push_timeout)

    async def abort(self, keys: list[Key], reason: str) -> None:
        """A client gives up objects that it was about to push."""
        self.puts.abort(keys, reason)

    async def locate(self, keys: list[Key]) -> dict[Key, tuple[int, list[str]]]:
        """Sizes and holders of objects in memory."""
        found = {}
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is not None and ts.who_has and not ts.actor:
                found[key] = (ts.nbytes, [ws.address for ws in ts.who_has])
        return found

    async def keep(self, key: Key, worker: str) -> None:
        """Keep a copy of an object on a worker, where Dask may see no use for it at the moment."""
        if key in self.scheduler.tasks:
            self.wishes.add(key, [worker])

    async def settle(self, key: Key) -> bool:
        """Forget how a result was made. See :func:`~dask_hoplite.settled.settle`."""
        return settle(self.scheduler, key)

    async def transfers(self) -> list[dict[str, Any]]:
        """See :func:`dask_hoplite.transfers`."""
        offset = time() - monotonic()
        rows = self.directory.log()
        for row in rows:
            row["start"] += offset
            row["stop"] = None if row["stop"] is None else row["stop"] + offset
        return rows

    async def status(self) -> dict[str, Any]:
        """See :func:`dask_hoplite.status`."""
        directory = self.directory
        workers = {}
        for address in self.scheduler.workers:
            partial = [
                tree.transfers[address]
                for tree in directory.trees.values()
                if address in tree.transfers
            ]
            workers[address] = {
                "bytes_in": directory.bytes_in[address],
                "bytes_out": directory.bytes_out[address],
                "whole": [
                    ts.key
                    for ts in self.scheduler.workers[address].has_what
                    if ts.nbytes >= self.config.min_size
                ],
                "partial": {transfer.key: transfer.received for transfer in partial},
                "waiting": [transfer.key for transfer in partial if not transfer.received],
            }
        objects = {
            key: {
                "nbytes": tree.nbytes,
                "holders": list(self.holders(key)),
                "tree": {
                    receiver: {
                        "source": transfer.source,
                        "received": transfer.received,
                        "reason": transfer.reason,
                    }
                    for receiver, transfer in tree.transfers.items()
                },
            }
            for key, tree in directory.trees.items()
        }
        return {
            "version": dask_hoplite.__version__,
            "workers": workers,
            "objects": objects,
            "unreachable": list(directory.shunned),
        }


class KeepWishedReplicas(ActiveMemoryManagerPolicy):
    """What ReduceReplicas suggests, except where copies are meant to be.

    Parameters
    ----------
    policy : ReduceReplicas
        The policy in whose place this stands.
    wishes : Wishes
        What is to be left alone.
    """

    def __init__(self, policy: ReduceReplicas, wishes: Wishes):
        self.policy = policy
        self.wishes = wishes

    def run(self) -> SuggestionGenerator:
        """Suggest drops."""
        self.policy.manager = self.manager
        for suggestion in self.policy.run():
            if suggestion.ts.key not in self.wishes:
                yield suggestion
