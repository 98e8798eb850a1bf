"""Getting an object: ask for a source, take what it has, ask again when it fails."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import Any

from distributed.core import ConnectionPool, send_recv
from distributed.utils import offload

from dask_hoplite import sizes
from dask_hoplite.core.events import (
    Abandoned,
    Event,
    Finished,
    Key,
    Lagging,
    Measured,
    Progressed,
    SourceFailed,
    Stalled,
    Wanted,
)
from dask_hoplite.core.instructions import Instruction, NoSource, Pull, Wait
from dask_hoplite.core.watch import Finding, Watch
from dask_hoplite.exceptions import (
    CancelledPullError,
    CorruptedError,
    NotInstalledError,
    ObjectLostError,
    ObjectTooLargeError,
    SourceFailedError,
)
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.channel import counted, path, receive, receive_marks
from dask_hoplite.transfer.layout import Layout, load
from dask_hoplite.transfer.patience import stop
from dask_hoplite.transfer.relay import Connections
from dask_hoplite.transfer.room import Room
from dask_hoplite.transfer.shared import AttachedBuffer, affinity, make_room
from dask_hoplite.transfer.shelf import OFFLOAD, Entry, Shelf

#: Objects that a worker receives at a time. A pull has room before the directory hears of it, so
#: whoever is a source has it, and none waits for another's.
SLOTS = 16

#: Tells the directory of an event; gives what it decides for this receiver, if anything.
Tell = Callable[[Event], Awaitable[Instruction | None]]

#: Tells the directory of an event that needs no decision.
Report = Callable[[Event], None]


async def take(
    rpc: Connections,
    source: str,
    key: Key,
    *,
    receiver: str,
    buffer: Buffer | None,
    begin: Callable[[Layout, dict[str, Any] | None], Buffer],
    hops: int = 1,
    early: bool = False,
    share: bool = True,
    counts: Counter[str] | None = None,
) -> str:
    """Take from one source what is missing of an object.

    Parameters
    ----------
    rpc : ConnectionPool or Relay
        Where the connection is taken from, and goes back to.
    source : str
        Address of the worker that is asked.
    key : Key
        The object.
    receiver : str
        Who asks.
    buffer : Buffer or None
        What is there already.
    begin : callable
        Given the layout, and the handle of shared memory if there is one, makes the buffer. Called
        if there is none, or if the source's serialisation begins otherwise. May raise OSError
        if the memory cannot be had, and is then called without handle.
    hops : int
        How many receivers there may be in a row.
    early : bool
        Whether the source may not know yet that it will have the object.
    share : bool
        Whether shared memory will do.
    counts : Counter, optional
        Where the bytes that come are counted, by how they go; also those of a failed transfer.

    Returns
    -------
    str
        How the bytes went.

    Raises
    ------
    OSError
        If the source cannot be reached, leaves, or does not have the object.
    Exception
        If the source could not serialise it: what was raised there.
    """
    comm = await rpc.connect(source)
    try:
        request = {
            "op": "hoplite_pull",
            "key": key,
            "receiver": receiver,
            "offset": buffer.received if buffer is not None else 0,
            "identity": buffer.layout.identity if buffer is not None else "",
            "affinity": affinity() if share else "",
            "early": early,
        }
        answer = await send_recv(comm, **request)
        if answer is not None and answer["status"] == "other":
            assert buffer is not None
            fingerprint = await offload(buffer.fingerprint, buffer.received)
            answer = await send_recv(comm, **request, fingerprint=fingerprint)
        if answer is None:
            raise SourceFailedError("has no Hoplite")
        if answer["status"] == "gone":
            raise SourceFailedError(answer["reason"])
        if answer["status"] == "error":
            raise pickle.loads(answer["exception"])
        layout = Layout.from_message(answer)
        if handle := answer.get("shared"):
            try:
                buffer = begin(layout, handle)
            except OSError:
                await comm.write({"attached": False})
            else:
                await comm.write({"attached": True})
                with counted(counts, "shared memory", buffer):
                    await receive_marks(comm, buffer)
                return "shared memory"
        same = buffer is not None and buffer.layout.identity == layout.identity
        if buffer is None or not (same or answer["offset"]):
            buffer = begin(layout, None)
        buffer.layout = layout  # by which bytes it will have been completed
        how = path(comm, source)
        with counted(counts, how, buffer):
            await receive(comm, buffer, hops)
        return how
    except BaseException:
        comm.abort()  # what may still come on it is nobody's
        raise
    finally:
        rpc.reuse(source, comm)


async def unpack(buffer: Buffer) -> Any:
    """The object of a complete buffer."""
    if buffer.nbytes > OFFLOAD:
        value = await offload(load, buffer.layout, buffer.own_frames())
    else:
        value = load(buffer.layout, buffer.own_frames())
    sizes.note(value, buffer.nbytes)
    return value


class Incoming:
    """One object on its way to this worker, whoever may wait for it."""

    def __init__(self, puller: Puller, key: Key, nbytes: int, decided: Pull | None = None):
        self.puller = puller
        self.key = key
        self.nbytes = nbytes
        self.decided = decided
        self.entry: Entry = puller.shelf.promise(key)
        self.buffer: Buffer | None = None
        self.epoch = 0
        self.source = ""
        self.path = ""
        self.shares_host = self.early = False
        self.hops = 1
        self.rate: float | None = None
        self.doubtful: set[str] = set()  # sources of which something else came than was sent
        self.waiters = 0
        self.logged = False  #: whether Dask's logs have it
        self.asked = self.first_byte = self.stop = monotonic()
        self.task = asyncio.create_task(self._run(), name=f"hoplite-pull-{key}")
        self.task.add_done_callback(lambda _: self._end())

    @property
    def failed(self) -> bool:
        """Whether it ended without the object."""
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)

    @property
    def received(self) -> int:
        """Bytes that are there."""
        return self.buffer.received if self.buffer is not None else 0

    @property
    def arrived(self) -> int:
        """The same, or more, with what is not yet checked."""
        return self.buffer.arrived if self.buffer is not None else 0

    def _end(self) -> None:
        how = "cancelled" if self.task.cancelled() else "failed" if self.failed else "finished"
        self.puller.outcomes[how] += 1
        if not self.waiters:  # all have gone before it ended
            self.puller.forget(self)
        if not self.task.cancelled():
            self.task.exception()  # those who wait have it; if there are none, nobody cares

    def begin(self, layout: Layout, handle: dict[str, Any] | None) -> Buffer:
        """Make room for the object, for the first time or anew."""
        # Now, and not by the size that Dask knows, which may be far from the true one.
        self.puller.check(self.key, layout.nbytes)
        buffer: Buffer
        if handle is not None:
            buffer = AttachedBuffer(layout, handle)
        else:
            buffer = make_room(layout, self.shares_host)
        self._exchange(buffer)
        self.first_byte = monotonic()
        return buffer

    async def _run(self) -> Any:
        try:
            async with self.puller.room.take(self.nbytes):
                await self._get()
            assert self.buffer is not None
            value = await unpack(self.buffer)
        except BaseException as error:
            shelf = self.puller.shelf
            if shelf.entries.get(self.key) is self.entry:  # and not that of one after this
                shelf.discard(self.key, SourceFailedError(f"gave up: {_why(error)}"))
            if self.epoch and not isinstance(error, ObjectLostError | NotInstalledError):
                self.puller.report(self._report(Abandoned, reason=_why(error)))
            raise
        self.puller.shelf.settle(self.key)
        self.puller.report(
            Finished(
                self.key,
                self.puller.address,
                self.epoch,
                latency=self.first_byte - self.asked,
                seconds=self.stop - self.first_byte,
                path=self.path,
            )
        )
        return value

    async def _get(self) -> None:
        """Follow one source after the other until all bytes are there."""
        puller = self.puller
        told: Instruction | None = self.decided
        if told is None:
            told = await puller.tell(Wanted(self.key, puller.address, self.nbytes))
        while True:
            if isinstance(told, NoSource):
                raise ObjectLostError(self.key, told.reason, told.tried)
            if not isinstance(told, Pull):
                raise NotInstalledError("the scheduler has no Hoplite")
            self.source, self.epoch = told.source, told.epoch
            self.shares_host, self.hops, self.early = told.shares_host, told.hops, told.early
            self.rate = told.rate
            try:
                instead = await self._follow()
            except CorruptedError as error:
                if self.source in self.doubtful:
                    told = await puller.tell(self._report(SourceFailed, reason=_why(error)))
                else:  # it may have happened on the way
                    self.doubtful.add(self.source)
            except OSError as error:
                told = await puller.tell(self._report(SourceFailed, reason=_why(error)))
            else:
                if instead is None:
                    break
                told = instead
        self.stop = monotonic()

    async def _follow(self) -> Instruction | None:
        """Take from the present source; return what the directory says if it falls silent."""
        puller = self.puller
        self.asked = monotonic()
        if isinstance(self.buffer, AttachedBuffer):
            await self._detach(self.buffer)
        taking = asyncio.create_task(
            take(
                puller.rpc,
                self.source,
                self.key,
                receiver=puller.address,
                buffer=self.buffer,
                begin=self.begin,
                hops=self.hops,
                early=self.early,
                counts=puller.bytes_in,
            )
        )
        try:
            watch = Watch(puller.stall_timeout, self.rate, self.arrived, self.asked)
            while not taking.done():
                await asyncio.wait({taking}, timeout=watch.interval)
                finding = None if taking.done() else self._look(watch)
                if finding == "progressed":
                    puller.report(self._report(Progressed))
                elif finding is not None:
                    told = await self._tell(finding, watch, taking)
                    if not isinstance(told, Wait) and not taking.done():
                        return told
            self.path = taking.result()
            return None
        finally:
            await stop(taking)  # we may have been told to leave just as it failed

    def _look(self, watch: Watch) -> Finding | None:
        return watch.look(self.arrived, monotonic(), self.first_byte)

    async def _tell(self, finding: Finding, watch: Watch, taking: asyncio.Task[str]) -> Any:
        """Tell the directory what the watch has found, as often as it wants to hear it."""
        while True:
            if finding == "stalled":
                event = self._report(Stalled)
            else:
                kind = Measured if finding == "measured" else Lagging
                event = self._report(kind, rate=watch.rate)
            told = await self.puller.tell(event)
            if not isinstance(told, Wait) or taking.done():
                return told
            if told.rate and watch.expect(told.rate):
                finding = "lagging"
            elif told.again:
                await asyncio.wait({taking}, timeout=told.again)
            else:
                return told

    async def _detach(self, attached: AttachedBuffer) -> None:
        """Go on in memory of our own.

        What is still missing will not appear in the other process's file, which those who have
        attached to it by way of us would look at.
        """
        own = make_room(attached.layout, self.shares_host)
        done = await offload(own.copy_from, attached)
        self._exchange(own)
        own.advance(done)

    def _exchange(self, buffer: Buffer) -> None:
        if self.buffer is not None:
            self.buffer.fail(SourceFailedError("had to start again in other memory"))
            self.puller.shelf.discard(self.key)
            self.entry = self.puller.shelf.promise(self.key)
        self.buffer = buffer
        self.entry.buffer.set_result(buffer)

    def _report(self, event: type, **fields: Any) -> Event:
        return event(  # type: ignore[no-any-return]
            self.key, self.puller.address, self.epoch, received=self.received, **fields
        )


class Puller:
    """All that is on its way to this worker.

    Parameters
    ----------
    address : str
        This worker's.
    rpc : ConnectionPool
        This worker's connections.
    tell, report : callable
        Take events to the directory, and wait for what it decides, or do not.
    shelf : Shelf
        Where buffers stand while others read them.
    stall_timeout : float
        Seconds without a byte after which the directory is asked.
    memory_limit : int, optional
        What is larger is refused.
    bytes_limit : float
        Bytes that may be on their way at a time, unless it is a single object.
    """

    def __init__(
        self,
        address: str,
        rpc: ConnectionPool,
        tell: Tell,
        report: Report,
        shelf: Shelf,
        stall_timeout: float,
        memory_limit: int | None = None,
        bytes_limit: float = inf,
    ):
        self.address = address
        self.rpc = rpc
        self.tell = tell
        self.report = report
        self.shelf = shelf
        self.stall_timeout = stall_timeout
        self.incoming: dict[Key, Incoming] = {}
        #: Bytes that have come to this worker by Hoplite, by how they went; and those that left it
        self.bytes_in: Counter[str] = Counter()
        self.bytes_out: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter(finished=0, failed=0, cancelled=0)
        self.memory_limit = memory_limit
        self.room = Room(SLOTS, bytes_limit)

    def check(self, key: Key, nbytes: int) -> None:
        """Refuse what cannot be held here.

        Raises
        ------
        ObjectTooLargeError
            If it cannot.
        """
        if self.memory_limit and nbytes > self.memory_limit:
            raise ObjectTooLargeError(
                key,
                f"an object of {nbytes} bytes cannot be held here",
                {self.address: f"memory limit of {self.memory_limit} bytes"},
            )

    def begin(self, key: Key, nbytes: int, decided: Pull) -> bool:
        """Start to get an object, from a source that is decided on, for those who will join.

        Returns
        -------
        bool
            Whether it was started; not, if it is on its way already, or would have to wait.
        """
        incoming = self.incoming.get(key)
        if (incoming is not None and not incoming.failed) or not self.room.has(nbytes):
            return False
        self.incoming[key] = Incoming(self, key, nbytes, decided)
        return True

    async def pull(self, key: Key, nbytes: int) -> tuple[Any, Incoming]:
        """Get an object, or join those who wait for it already.

        Returns
        -------
        value : object
            The object.
        incoming : Incoming
            How it came.

        Raises
        ------
        ObjectLostError
            If nobody can give it.
        ObjectTooLargeError
            If it cannot be held here.
        NotInstalledError
            If the scheduler does not answer as Hoplite's.
        Exception
            Whatever its serialisation at the source, or deserialisation here, raised.
        """
        incoming = self.incoming.get(key)
        if incoming is None or incoming.failed:
            incoming = self.incoming[key] = Incoming(self, key, nbytes)
        incoming.waiters += 1
        try:
            # One who stops waiting must not end it for the others.
            return await asyncio.shield(incoming.task), incoming
        except asyncio.CancelledError:
            if incoming.task.cancelled():
                raise CancelledPullError(key, "no longer wanted on this worker") from None
            raise
        finally:
            incoming.waiters -= 1
            # Not before: one who comes while others are still being served is served too.
            if not incoming.waiters and incoming.task.done():
                self.forget(incoming)

    @contextmanager
    def kept(self, incoming: Incoming) -> Iterator[None]:
        """Let others join an object that has come, within the block."""
        self.incoming.setdefault(incoming.key, incoming)
        incoming.waiters += 1
        try:
            yield
        finally:
            incoming.waiters -= 1
            if not incoming.waiters:
                self.forget(incoming)

    def cancel(self, key: Key) -> None:
        """Stop receiving an object; whoever waits for it gets a CancelledPullError."""
        incoming = self.incoming.pop(key, None)
        if incoming is not None:
            incoming.task.cancel()

    def drop(self, key: Key) -> None:
        """One of those who wait for an object has no use for it any more."""
        incoming = self.incoming.get(key)
        if incoming is not None and incoming.waiters <= 1:
            self.cancel(key)

    async def close(self) -> None:
        """Stop all that is under way."""
        tasks = [incoming.task for incoming in self.incoming.values()]
        for key in list(self.incoming):
            self.cancel(key)
        if tasks:
            await asyncio.wait(tasks)

    def forget(self, incoming: Incoming) -> None:
        """Nobody waits for this any more."""
        if self.incoming.get(incoming.key) is incoming:
            del self.incoming[incoming.key]


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
