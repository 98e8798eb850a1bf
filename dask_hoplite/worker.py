"""Hoplite on a worker: Dask's fetches of large objects go through :mod:`dask_hoplite.transfer`."""

from __future__ import annotations

import asyncio
import logging
import time as clock
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import Client, Worker, WorkerPlugin
from distributed.comm.core import Comm
from distributed.core import context_meter_to_server_digest, error_message
from distributed.metrics import context_meter, time
from distributed.worker import WORKER_ANY_RUNNING
from distributed.worker_state_machine import (
    FreeKeysEvent,
    GatherDepBusyEvent,
    GatherDepFailureEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    StateMachineEvent,
)

import dask_hoplite
from dask_hoplite import metrics, seams, sizes, versions
from dask_hoplite.arrivals import Arrivals
from dask_hoplite.collectives.gatherer import Gatherer
from dask_hoplite.collectives.reducer import Reducer
from dask_hoplite.collectives.starting import ANNOTATION, StartEvent
from dask_hoplite.core.events import Declined, Event, Key, ReductionEvent
from dask_hoplite.core.instructions import Instruction, Pull
from dask_hoplite.exceptions import CancelledPullError, HopliteError, ObjectTooLargeError
from dask_hoplite.failed_dependency import FailedDependencyEvent
from dask_hoplite.messages import decode, encode
from dask_hoplite.transfer.pull import Incoming, Puller
from dask_hoplite.transfer.serve import NoReply, serve
from dask_hoplite.transfer.shelf import Shelf

if TYPE_CHECKING:
    from dask_hoplite.client import ClientExtension

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Dask's event log has what workers report to the directory under this topic. What people may want
#: to read is under another one.
TOPIC = "hoplite-workers"

#: States of a task that Dask is fetching, in its worker's state machine
FLYING = ("flight", "resumed", "cancelled")

#: States of a task that runs here
RUNNING = ("executing", "long-running")

#: Seconds for which messages are ignored that came too late
IGNORE = 10.0

#: How often a peer that is busy with small keys is asked again, and after how long (as Dask does).
BUSY_RETRIES, BUSY_DELAY = 40, 0.15


def ignore(**message: Any) -> None:
    """Take in what the scheduler has said before it knew that Hoplite is not here any more."""


class HopliteWorker(WorkerPlugin):
    """The worker's half. Installed by :class:`dask_hoplite.Hoplite`, not by users.

    Parameters
    ----------
    min_size : int
        Objects of fewer bytes take Dask's own path.
    stall_timeout : float
        Seconds without a byte after which the directory is asked for another source.
    push_timeout : float
        Seconds without a byte after which an object that is pushed from outside is given up.
    """

    name = "hoplite"
    idempotent = True

    def __init__(self, min_size: int, stall_timeout: float, push_timeout: float):
        self.min_size = min_size
        self.stall_timeout = stall_timeout
        self.push_timeout = push_timeout

    # Installation

    async def setup(self, worker: Worker) -> None:
        """Replace what fetches, and add what serves, if this worker's Dask is as it is known."""
        self.worker = worker
        refused = versions.check(seams.WORKER, worker)
        if refused is None:
            self._install(worker)
        self.installed = refused is None
        if refused is not None:
            logger.warning(refused)
        with suppress(OSError):  # who has lost the scheduler has other things to do
            await worker.scheduler.hoplite_meet(
                worker=worker.contact_address, version=dask_hoplite.__version__, refused=refused
            )

    def _install(self, worker: Worker) -> None:
        sizes.install(self)
        assert worker.contact_address is not None
        self.address = worker.contact_address
        self.shelf = Shelf(worker.data)
        bytes_limit = worker.state.transfer_incoming_bytes_limit  # as for Dask's own fetches
        self.puller = Puller(
            self.address,
            worker.rpc,
            self.tell,
            self.report,
            self.shelf,
            self.stall_timeout,
            memory_limit=worker.memory_manager.memory_limit,
            bytes_limit=bytes_limit,
        )
        self.arrivals = Arrivals(worker, self.puller, self.report, self.push_timeout, bytes_limit)
        self.reducer = Reducer(worker, self.puller, self.report, self.stall_timeout)
        self.gatherer = Gatherer(worker, self.puller, self.reducer, self.stall_timeout)
        self.landing: dict[Key, asyncio.Future[None]] = {}
        self.coming: defaultdict[Key, set[asyncio.Future[Any]]] = defaultdict(set)
        self.recalled, self.waiting = 0, asyncio.Event()
        self.client: ClientExtension | None = None  # of the client that tasks use
        self.plain_gather_dep = worker.gather_dep
        self.handlers: dict[str, Callable[..., Any]] = {
            "hoplite_pull": self.serve,
            "hoplite_push": self.arrivals.accept,
            "hoplite_expect": self.arrivals.expect,
            "hoplite_acquire": self.acquire,
            "hoplite_cancel": self.cancel,
            "hoplite_wait_for_recall": self.wait_for_recall,
            "hoplite_describe": self.gatherer.describe,
            "hoplite_gather": self.gather,
        }
        worker.handlers.update(self.handlers)
        self.plain_compute_task = worker.stream_handlers["compute-task"]
        worker.stream_handlers["compute-task"] = self.compute_task
        self.stream_handlers: dict[str, Callable[..., Any]] = {
            "hoplite-recall": self.recall,
            "hoplite-combine": self.reducer.combine,
            "hoplite-forget": self.reducer.forget,
            "hoplite-release": self.reducer.release,
            "hoplite-fail": self.reducer.fail,
        }
        worker.stream_handlers.update(self.stream_handlers)
        worker.gather_dep = self.gather_dep  # type: ignore[method-assign]
        # Dask's buffer tells what it spills; another mapping may not spill, or not tell.
        self.on_spill: list[Any] = getattr(worker.data, "fast_to_slow_callbacks", [])
        self.on_spill.append(self.spilled)
        self.plain_get_client = worker._get_client
        worker._get_client = self.get_client  # type: ignore[method-assign]
        metrics.WORKERS.install(worker)

    async def teardown(self, worker: Worker) -> None:
        """Put everything back."""
        if not self.installed:
            return
        metrics.WORKERS.uninstall(worker)
        sizes.uninstall(self)
        worker.__dict__.pop("gather_dep", None)
        worker.__dict__.pop("_get_client", None)
        if self.client is not None and self.client.fetch == self._pull:
            self.client.uninstall()  # it would ask us
        worker.stream_handlers["compute-task"] = self.plain_compute_task
        self.on_spill.remove(self.spilled)
        for name in self.handlers:
            worker.handlers.pop(name, None)
        # What is on its way already finds somebody: Dask gives a worker up that does not know it.
        worker.stream_handlers.update(dict.fromkeys(self.stream_handlers, ignore))
        asyncio.get_running_loop().call_later(IGNORE, self._ignore_no_more)
        self.arrivals.close()
        for landing in self.landing.values():
            landing.cancel()
        await self.reducer.close()
        await self.puller.close()
        self.shelf.close(ConnectionError("Hoplite was uninstalled"))

    def _ignore_no_more(self) -> None:
        for name in self.stream_handlers:
            if self.worker.stream_handlers.get(name) is ignore:  # and not a plugin after this
                del self.worker.stream_handlers[name]

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Let go of what Dask has no use for any more."""
        if not self.installed:
            return
        if key in self.landing and start in FLYING and finish not in FLYING:
            self.landing.pop(key).set_result(None)
        if start == "memory":
            self.shelf.discard(key)
        elif finish == "cancelled" and start == "flight":
            self.puller.drop(key)
        elif finish == "released" and start in ("executing", "long-running"):
            self.reducer.drop(key)  # it is cancelled, though plugins are not told this name

    def spilled(self, key: Key, value: object) -> None:
        """Dask moves an object to disk, to have its memory free."""
        self.shelf.spilled(key)

    async def tell(self, event: Event) -> Instruction | None:
        """Take an event to the directory; give what it decides for this worker."""
        answer = await self.worker.scheduler.hoplite_tell(event=encode(event))
        return decode(answer) if answer else None

    def report(self, event: Event | ReductionEvent) -> None:
        """Tell the directory, with whatever else this worker tells the scheduler about now.

        By Dask's event log, where people can see it too, and where it harms nobody if the
        scheduler has no Hoplite any more.
        """
        self.worker.log_event(TOPIC, {"event": encode(event)})

    def get_client(self, timeout: float | None = None) -> Client:
        """In place of :meth:`distributed.Worker._get_client`: the client that tasks use.

        What it gathers comes by this worker's own pulls, which others may have begun already.
        """
        from dask_hoplite.client import install  # it imports us, by way of the scheduler's plugin

        client = self.plain_get_client(timeout)
        self.client = install(
            client, self.min_size, self.stall_timeout, self.push_timeout, fetch=self._pull
        )
        return client

    def is_large(self, key: Key) -> bool:
        """Whether Hoplite moves this key."""
        ts = self.worker.state.tasks.get(key)
        return ts is not None and ts.get_nbytes() >= self.min_size

    # Fetching for Dask

    def compute_task(self, *, annotations: dict[str, Any], **message: Any) -> None:
        """In place of Dask's handler: a task may come with a source for its large dependency, or be
        a reduction, which only waits."""
        decided = annotations.pop(self.name, None)
        waits = annotations.pop(ANNOTATION, False)
        self.plain_compute_task(annotations=annotations, **message)
        if waits:
            stimulus_id = f"hoplite-start-{clock.time()}"
            self.worker.handle_stimulus(StartEvent(key=message["key"], stimulus_id=stimulus_id))
        if decided is not None:
            pull = decode(decided)
            ts = self.worker.state.tasks.get(pull.key)
            if (
                ts is None
                or ts.state != "flight"
                or not self.puller.begin(pull.key, ts.get_nbytes(), pull)
            ):
                self._decline(pull)

    def _decline(self, pull: Pull) -> None:
        """Tell that something decided ahead is of no use here."""
        self.shelf.announce(pull.key)  # those who wait for it here learn that it does not come
        self.report(Declined(pull.key, self.address, pull.epoch))

    async def gather_dep(
        self, worker: str, to_gather: Collection[Key], total_nbytes: int, *, stimulus_id: str
    ) -> StateMachineEvent:
        """Fetch keys: the large ones by Hoplite, the others from ``worker`` as Dask does.

        In place of :meth:`distributed.worker.Worker.gather_dep`, with the same events as outcome.
        Keys that Hoplite cannot get are left to Dask too.
        """
        large = [key for key in to_gather if self.is_large(key)]
        if not large or self.worker.status not in WORKER_ANY_RUNNING:
            return await self.plain_gather_dep(
                worker, to_gather, total_nbytes, stimulus_id=stimulus_id
            )
        self.worker.state.log.append(("request-dep", worker, set(large), stimulus_id, clock.time()))
        data: dict[Key, Any] = {}
        small = set(to_gather) - set(large)
        with context_meter.meter("network", func=time):
            plain = asyncio.create_task(self._gather_plainly(worker, small, stimulus_id))
            results = await asyncio.gather(
                *(self._pull(key) for key in large), return_exceptions=True
            )
            outcome = await plain
        left = set()
        for key, result in zip(large, results, strict=True):
            if isinstance(result, CancelledPullError):
                continue
            refused = isinstance(result, ObjectTooLargeError)
            if isinstance(result, HopliteError | OSError) and not refused:
                logger.info("%r could not be had by Hoplite, left to Dask: %s", key, result)
                left.add(key)
            elif isinstance(result, Exception):
                self.worker.handle_stimulus(
                    FailedDependencyEvent(
                        keys=[key], error=error_message(result), stimulus_id=stimulus_id
                    )
                )
                return self._failed(result, worker, to_gather, total_nbytes, stimulus_id)
            elif isinstance(result, BaseException):
                raise result
            else:
                data[key] = result
        for event in (outcome, await self._gather_plainly(worker, left, stimulus_id)):
            if isinstance(event, GatherDepSuccessEvent):
                data.update(event.data)
            elif event is not None and not data:
                event.total_nbytes = total_nbytes
                return event
        self.worker.state.log.append(("receive-dep", worker, set(data), stimulus_id, clock.time()))
        return GatherDepSuccessEvent(
            worker=worker,
            total_nbytes=total_nbytes,
            data=data,
            stimulus_id=f"gather-dep-success-{clock.time()}",
        )

    async def _gather_plainly(
        self, worker: str, keys: Collection[Key], stimulus_id: str
    ) -> (
        GatherDepSuccessEvent
        | GatherDepBusyEvent
        | GatherDepNetworkFailureEvent
        | GatherDepFailureEvent
        | None
    ):
        """Fetch keys by Dask's own means. Being refused is not yet an outcome for all of them."""
        if not keys:
            return None
        for _ in range(BUSY_RETRIES):
            event: Any = await self.plain_gather_dep(worker, keys, 0, stimulus_id=stimulus_id)
            if not isinstance(event, GatherDepBusyEvent):
                break
            await asyncio.sleep(BUSY_DELAY)
        return event  # type: ignore[no-any-return]

    def _failed(
        self,
        error: Exception,
        worker: str,
        to_gather: Collection[Key],
        total_nbytes: int,
        stimulus_id: str,
    ) -> GatherDepFailureEvent:
        logger.error("Fetching %r failed", list(to_gather), exc_info=error)
        self.worker.state.log.append(
            ("gather-dep-failed", worker, set(to_gather), stimulus_id, clock.time())
        )
        return GatherDepFailureEvent.from_exception(
            error,
            worker=worker,
            total_nbytes=total_nbytes,
            stimulus_id=f"gather-dep-failed-{clock.time()}",
        )

    async def _pull(self, key: Key, nbytes: int | None = None) -> Any:
        if nbytes is None:
            nbytes = self.worker.state.tasks[key].get_nbytes()
        value, incoming = await self.puller.pull(key, nbytes)
        self._log_received(key, value, incoming)
        return value

    def _log_received(self, key: Key, value: Any, incoming: Incoming) -> None:
        """Feed Dask's transfer logs and bandwidth figures, which its dashboard shows.

        Once, though several may have waited for it.
        """
        if key in self.worker.state.tasks and not incoming.logged:
            incoming.logged = True
            now, offset = clock.time(), clock.monotonic()
            self.worker._update_metrics_received_data(
                start=now - (offset - incoming.first_byte),
                stop=now - (offset - incoming.stop),
                data={key: value},
                cause=self.worker._get_cause([key]),
                worker=incoming.source,
            )

    # Copies that the scheduler asks for

    async def acquire(
        self, nbytes: dict[Key, int], decided: dict[Key, dict[str, Any] | None] | None = None
    ) -> dict[str, Any]:
        """Get and hold objects of the given sizes, some from sources that are decided on already.

        Returns
        -------
        dict
            ``status`` is "OK", or "partial-fail" with ``keys`` that failed and the reasons.
        """

        for key, told in (decided or {}).items():
            if told is not None:
                pull = decode(told)
                if key in self.worker.data or not self.puller.begin(key, nbytes[key], pull):
                    self._decline(pull)

        async def hold(key: Key) -> None:
            while key not in self.worker.data:
                if (value := self.reducer.have(key)) is not None:
                    self.worker.update_data({key: value}, stimulus_id=f"hoplite-{clock.time()}")
                    return
                value, incoming = await self.puller.pull(key, nbytes[key])
                self._log_received(key, value, incoming)
                ts = self.worker.state.tasks.get(key)
                if ts is not None and ts.state in RUNNING:
                    raise CancelledPullError(key, "it is made here")
                if ts is None or ts.state not in FLYING:
                    self.worker.update_data({key: value}, stimulus_id=f"hoplite-{clock.time()}")
                    self._log_received(key, value, incoming)
                    return
                # Dask's own fetch has begun meanwhile: it is what puts the object in its place.
                # It joins this pull, which is kept for that long.
                with self.puller.kept(incoming):
                    await self._landed(key)

        results = await asyncio.gather(
            *(self._revocably(key, hold(key)) for key in nbytes), return_exceptions=True
        )
        failed = {
            key: f"{type(result).__name__}: {result}"
            for key, result in zip(nbytes, results, strict=True)
            if isinstance(result, BaseException)
        }
        if failed:
            return {"status": "partial-fail", "keys": list(failed), "reasons": failed}
        return {"status": "OK"}

    async def _landed(self, key: Key) -> None:
        """Wait until Dask's state machine is through with a fetch."""
        landed = self.landing.setdefault(key, asyncio.get_running_loop().create_future())
        await asyncio.shield(landed)

    async def gather(self, key: Key, **how: Any) -> dict[str, str]:
        """Make a list of values. See :meth:`.Gatherer.gather`."""
        try:
            return await self._revocably(key, self.gatherer.gather(key, **how))
        except CancelledPullError as error:
            return {"status": "failed", "reason": str(error)}

    async def _revocably(self, key: Key, coming: Coroutine[Any, Any, T]) -> T:
        """Get something, unless it is recalled."""
        task = asyncio.ensure_future(coming)
        self.coming[key].add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self.coming[key].discard(task)
            if not self.coming[key]:
                del self.coming[key]
        if task.cancelled():
            raise CancelledPullError(key, "it was recalled")
        return task.result()

    def recall(self, key: Key, number: int) -> None:
        """Drop a result that was given up, and what is on its way here of it.

        ``number``: those of later ones are higher.
        """
        for task in self.coming.get(key, ()):
            task.cancel()
        self.puller.cancel(key)
        self.worker.handle_stimulus(
            FreeKeysEvent(keys=[key], stimulus_id=f"hoplite-recall-{clock.time()}")
        )
        self.recalled = number
        waiting, self.waiting = self.waiting, asyncio.Event()
        waiting.set()

    async def wait_for_recall(self, number: int) -> None:
        """Wait until a recall has come, which goes another way than questions do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.stall_timeout):
                while self.recalled < number:
                    await self.waiting.wait()

    async def cancel(self, key: Key, epoch: int) -> None:
        """Stop receiving an object, unless what is being received now is a later generation."""
        incoming = self.puller.incoming.get(key)
        if incoming is not None and incoming.epoch <= epoch:
            self.puller.cancel(key)
        self.arrivals.cancel(key, epoch)

    # Serving

    def digest_metric(self, name: Hashable, value: float) -> None:
        """Take figures on performance to the worker, which publishes them."""
        self.worker.digest_metric(name, value)

    @context_meter_to_server_digest("get-data")
    async def serve(
        self,
        comm: Comm,
        key: Key,
        receiver: str,
        offset: int = 0,
        identity: str = "",
        affinity: str = "",
        early: bool = False,
        fingerprint: bytes | None = None,
    ) -> dict[str, Any] | NoReply:
        """Send an object to ``receiver``, from ``offset`` on.

        ``early``: it may ask before this worker knows that it will have the object.
        """
        worker = self.worker
        expected, nbytes = self._size(key), 0
        how = ""

        def sent(path: str, count: int) -> None:
            nonlocal how, nbytes
            how, nbytes = path, count

        worker.transfer_outgoing_count += 1
        worker.transfer_outgoing_count_total += 1
        worker.transfer_outgoing_bytes += expected
        start = clock.time()
        try:
            if early:
                await self.shelf.announced(key, self.stall_timeout)
            with context_meter.meter("network", func=time):
                return await serve(
                    comm, self.shelf, key, offset, identity, affinity, fingerprint, sent
                )
        finally:
            worker.transfer_outgoing_count -= 1
            worker.transfer_outgoing_bytes -= expected
            if how:
                self.puller.bytes_out[how] += nbytes
                self._log_sent(key, receiver, start, nbytes)

    def _size(self, key: Key) -> int:
        """About how many bytes an object has, as far as Dask's worker knows."""
        ts = self.worker.state.tasks.get(key)
        return (ts.nbytes or 0) if ts is not None else 0

    def _log_sent(self, key: Key, receiver: str, start: float, nbytes: int) -> None:
        """Feed Dask's transfer logs: with what was sent, which may be the rest of an object."""
        worker, stop = self.worker, clock.time()
        duration = max(0.001, stop - start)
        worker.transfer_outgoing_bytes_total += nbytes
        worker.transfer_outgoing_log.append(
            {
                "start": start + worker.scheduler_delay,
                "stop": stop + worker.scheduler_delay,
                "middle": (start + stop) / 2,
                "duration": duration,
                "who": receiver,
                "keys": {key: nbytes},
                "total": nbytes,
                "compressed": nbytes,
                "bandwidth": nbytes / duration,
            }
        )
