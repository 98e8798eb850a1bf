"""The worker's part in reductions: makes sums, serves them, and gives the result to its task."""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
from distributed import Reschedule, Worker, get_worker
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.utils import host_array
from distributed.worker_state_machine import SecedeEvent

from dask_hoplite.core.events import (
    Abandoned,
    Broken,
    Combined,
    Combining,
    Event,
    Finished,
    Key,
    Missing,
    Promoted,
    ReductionEvent,
    Unfit,
)
from dask_hoplite.core.instructions import Combine
from dask_hoplite.exceptions import CorruptedError, NotInstalledError, SourceFailedError
from dask_hoplite.messages import decode
from dask_hoplite.operands import (
    Op,
    OperandError,
    Signature,
    accumulators,
    as_bytes,
    check,
    flatten,
    prepare,
    promote,
    results,
    streamable,
    unflatten,
)
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.combine import Combination, Mirror, Part
from dask_hoplite.transfer.layout import Layout, dump
from dask_hoplite.transfer.patience import stop
from dask_hoplite.transfer.pull import Puller, take, unpack

logger = logging.getLogger(__name__)

#: In place of a signature, where whole objects are combined
WHOLE = "whole"


def stream_key(key: Key, node: int) -> tuple[str, Key, int]:
    """The name of a sum on the wire."""
    return ("hoplite-sum", key, node)


async def result_of(key: Key) -> Any:
    """What a reduction's task runs: it waits, without a thread or a slot, for its result."""
    plugin = get_worker().plugins.get("hoplite")
    if plugin is None:
        raise NotInstalledError("Hoplite is not on this worker any more")
    return await plugin.reducer.wait(key)  # type: ignore[attr-defined]


@dataclass
class Result:
    """What this worker is to have of a reduction."""

    value: asyncio.Future[Any]
    released: asyncio.Event = field(default_factory=asyncio.Event)  #: all others have theirs, too


class Conflict(Exception):
    """An operand is of another item size than its sum. Leaves nobody."""

    def __init__(self, common: Signature | str):
        self.common = dumps(common)


class Reducer:
    """All sums that are made on this worker.

    Parameters
    ----------
    worker : Worker
        Whose values are combined.
    puller : Puller
        Its connections, and its shelf.
    report : callable
        Tells the scheduler of an event.
    stall_timeout : float
        Seconds after which each sum says how far it is.
    """

    def __init__(
        self,
        worker: Worker,
        puller: Puller,
        report: Callable[[Event | ReductionEvent], None],
        stall_timeout: float,
    ):
        self.worker = worker
        self.puller = puller
        self.shelf = puller.shelf
        self.address = puller.address
        self.report = report
        self.stall_timeout = stall_timeout
        self.sums: dict[int, Sum] = {}
        self.results: dict[Key, Result] = {}
        self._pool: ThreadPoolExecutor | None = None

    # What the scheduler tells

    def combine(self, combine: dict[str, Any], how: bytes, serve: int | None, wait: bool) -> None:
        """Make a sum.

        Parameters
        ----------
        combine : dict
            A :class:`~dask_hoplite.core.instructions.Combine`.
        how : bytes
            The :class:`~dask_hoplite.operands.Op`, pickled.
        serve : int or None
            The epoch under which the result is served while it grows, if it is.
        wait : bool
            Whether the result waits until others have it, too.
        """
        told: Combine = decode(combine)
        self.sums[told.node] = Sum(self, told, how, serve, wait)

    def forget(self, key: Key, node: int | None = None) -> None:
        """Drop a sum, or all sums and the result of a reduction."""
        for number in [n for n, s in self.sums.items() if s.key == key and node in (None, n)]:
            self.sums.pop(number).close()
        if node is None:
            self.drop(key)

    def release(self, key: Key) -> None:
        """All who are to have a result have it."""
        if (result := self.results.get(key)) is not None:
            result.released.set()

    def fail(self, key: Key, error: bytes | Exception) -> None:
        """There can be no result."""
        result = self.result(key)
        result.released.set()
        if result.value.done():  # others could not have theirs
            del self.results[key]
            result = self.result(key)
            result.released.set()
        result.value.set_exception(loads(error) if isinstance(error, bytes) else error)

    # Results

    def result(self, key: Key) -> Result:
        """Where a result is, or will be."""
        if key not in self.results:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda f: f.cancelled() or f.exception())
            self.results[key] = Result(future)
        return self.results[key]

    def drop(self, key: Key) -> None:
        """Nobody here has use for a result any more; who waits for it lets Dask decide."""
        result = self.results.pop(key, None)
        if result is not None:
            if not result.value.done():
                result.value.set_exception(Reschedule())
            result.released.set()

    async def wait(self, key: Key) -> Any:
        """The result, for the task that is it, once all who are to have it do."""
        result = self.result(key)
        if not (result.value.done() and result.released.is_set()):
            # Neither a thread nor a slot: those whom this waits for may need them.
            event = SecedeEvent(key=key, compute_duration=0.0, stimulus_id=f"secede-{uuid.uuid4()}")
            self.worker.handle_stimulus(event)
        while True:
            await asyncio.shield(result.value)
            await result.released.wait()
            now = self.results.get(key)
            if now is None or now is result:
                break
            result = now  # the first one came to nothing
        self.results.pop(key, None)
        return result.value.result()

    def have(self, key: Key) -> Any:
        """A result that was made here, for others than its task, or None."""
        result = self.results.get(key)
        if result is None or not result.value.done() or result.value.exception() is not None:
            return None
        return result.value.result()

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something that takes long, and is not Dask's to wait for."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="hoplite-combine")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def close(self) -> None:
        """Stop all."""
        tasks = [sum.task for sum in self.sums.values()]
        for sum in self.sums.values():
            sum.close()
        self.sums.clear()
        for key in list(self.results):
            self.drop(key)
        if tasks:
            await asyncio.wait(tasks)
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class Sum:
    """One node: what this worker makes of its operands and of what comes from others."""

    def __init__(self, reducer: Reducer, told: Combine, how: bytes, serve: int | None, wait: bool):
        self.reducer = reducer
        self.told = told
        self.key = told.key
        self.how = how
        self.serve = serve
        self.waits = wait
        self.name = stream_key(told.key, told.node)
        self.inputs: list[Buffer | None] = [None] * len(told.sources)
        self.out: Buffer | None = None
        self.combination: Combination | None = None
        self.signature: Signature | None = None
        self.into: list[np.ndarray] = []
        self.begun = monotonic()
        self.done = False
        self.entry = reducer.shelf.promise(self.name)
        self.serving = reducer.shelf.promise(self.key) if serve is not None else None
        self.task = asyncio.create_task(self._run(), name=f"hoplite-sum-{told.node}")

    # Life

    async def _run(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            await self._make()
        except Conflict as conflict:
            self._tell(Promoted, conflict.common)
        except (KeyError, OSError) as error:
            self._tell(Missing, f"{type(error).__name__}: {error}")
        except Exception as error:
            logger.info("Hoplite: %r cannot be made here", self.key, exc_info=error)
            self._tell(Unfit, f"{type(error).__name__}: {error}", _pickled(error))
        finally:
            await stop(watching)

    def _tell(self, kind: Callable[..., ReductionEvent], *details: Any) -> None:
        self.reducer.report(kind(self.key, self.reducer.address, self.told.node, *details))

    async def _watch(self) -> None:
        """Say how far it is, so that those who wait for it know that it is alive."""
        while True:
            await asyncio.sleep(self.reducer.stall_timeout)
            received = tuple(buffer.received if buffer else 0 for buffer in self.inputs)
            made = self.out.received if self.out is not None else 0
            self._tell(Combining, received, made)

    def close(self) -> None:
        """Stop, and serve no more."""
        self.task.cancel()
        error = SourceFailedError("it was given up, as another one was lost")
        shelf = self.reducer.shelf
        if shelf.entries.get(self.name) is self.entry:
            shelf.discard(self.name, error)
        if not self.done and self.serving is not None:
            if shelf.entries.get(self.key) is self.serving:
                shelf.discard(self.key, error)
            assert self.serve is not None
            gone = Abandoned(self.key, self.reducer.address, self.serve, 0, "made anew")
            self.reducer.report(gone)

    # Work

    async def _make(self) -> None:
        told = self.told
        op: Op = loads(self.how)
        values = [self.reducer.worker.data[key] for key in told.operands]
        common = pickle.loads(told.common) if told.common else None
        if op.ufunc is None or common == WHOLE:
            await self._make_whole(op, values)
            return
        signature, own = self._flatten(values, common)
        if signature is not None and not streamable(signature, op):
            if told.sources:
                raise Conflict(WHOLE)
            await self._make_whole(op, values)
        elif told.ring:
            assert signature is not None
            await Ring(self, op, signature, own).run()
        else:
            await self._make_stream(op, signature, own)

    def _flatten(
        self, values: list[Any], common: Signature | None
    ) -> tuple[Signature | None, list[list[np.ndarray]]]:
        """Take operands apart; see that they go together with each other and with the others.

        Raises
        ------
        OperandError
            If they cannot be combined.
        Conflict
            If they can, but not as others were told.
        """
        signature, own, first = common, [], self.key
        for key, value in zip(self.told.operands, values, strict=True):
            try:
                mine, arrays = flatten(value)
            except OperandError as error:
                raise OperandError(f"{key!r}: {error}") from error
            own.append(arrays)
            if signature is None:
                signature, first = mine, key
            elif signature != mine:
                check(first, signature, key, mine)
                both = promote(signature, mine)
                if both != signature:
                    raise Conflict(both)
        return signature, own

    def _theirs(self, layout: Layout) -> Signature:
        """The signature of what a source sends, which must be ours."""
        theirs, key = pickle.loads(layout.header)
        if theirs == WHOLE:
            raise Conflict(WHOLE)
        ours = self.signature
        if ours is not None and ours != theirs:
            check(self.told.operands[0] if self.told.operands else self.key, ours, key, theirs)
            raise Conflict(promote(ours, theirs))
        return theirs  # type: ignore[no-any-return]

    async def _make_stream(
        self, op: Op, signature: Signature | None, own: list[list[np.ndarray]]
    ) -> None:
        told = self.told
        if signature is not None:
            self._lay_out(op, signature, own)
        # A root without operands learns from the first who sends what there is.
        await self._take_all(partial(self._lay_out, op, own=[]))
        assert self.combination is not None and self.signature is not None
        if not told.sources:
            await self.reducer.offload(self.combination.advance)
        self._finish()
        if told.count:
            await self._hand_over(
                unflatten(self.signature, prepare(self.into, results(self.signature, op)))
            )
        self._tell(Combined, monotonic() - self.begun)

    def _lay_out(self, op: Op, signature: Signature, own: list[list[np.ndarray]]) -> None:
        """Make room for the sum, and serve it while it grows."""
        told = self.told
        self.signature = signature
        dtypes = accumulators(signature, op)
        operands = [prepare(arrays, dtypes) for arrays in own]
        sizes = [int(np.prod(leaf.shape, dtype=np.int64)) for leaf in signature.leaves]
        as_it_is = len(operands) == 1 and not told.sources and not told.count
        if as_it_is:
            self.into = operands[0]
        else:
            nbytes = sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True))
            self.reducer.puller.check(self.key, nbytes)
            self.into = [room(n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
        frames = [as_bytes(array) for array in self.into]
        layout = self.layout(signature, frames)
        for index in range(len(told.sources)):
            self.inputs[index] = Buffer(layout, None if index else frames, received=0)
        parts = [
            Part(
                array,
                [operand[leaf] for operand in operands]
                + [
                    _typed(buffer.frames[leaf], array.dtype) for buffer in self.inputs[1:] if buffer
                ],
                finish=bool(told.count) and op.mean,
            )
            for leaf, array in enumerate(self.into)
        ]
        self.out = Buffer(layout, frames, received=None if as_it_is else 0)
        self._combine(op, [] if as_it_is else parts)
        if self.serving is not None:
            self._mirror(op, signature)
        self.entry.buffer.set_result(self.out)

    def _combine(self, op: Op, parts: list[Part]) -> None:
        """Combine whatever comes."""
        count, inputs = self.told.count, [buffer for buffer in self.inputs if buffer is not None]
        assert self.out is not None
        self.combination = Combination(
            inputs, parts, self.out, op.combine, lambda block: op.finish(block, count)
        )
        if inputs:
            self.combination.follow()

    def layout(self, signature: Signature, frames: list[memoryview]) -> Layout:
        """How a sum goes over the wire. Each is a serialisation of its own."""
        whose = self.told.operands[0] if self.told.operands else self.key
        lengths = tuple(frame.nbytes for frame in frames)
        return Layout(uuid.uuid4().hex, dumps((signature, whose)), lengths)

    def _mirror(self, op: Op, signature: Signature) -> None:
        """Serve the result itself while it grows, as Dask would lay it out."""
        if results(signature, op) != accumulators(signature, op):
            return
        layout, frames = dump(unflatten(signature, self.into))
        assert self.out is not None and self.serving is not None
        mirror = Mirror(self.out, Buffer(layout, frames, received=0))
        if mirror.faithful:
            mirror.follow()
            self.serving.buffer.set_result(mirror.buffer)

    async def _take_all(self, lay_out: Callable[[Signature], None]) -> None:
        """Take from all sources, until all is there."""
        takes = [
            asyncio.create_task(self._take(index, lay_out))
            for index in range(len(self.told.sources))
        ]
        try:
            await asyncio.gather(*takes)
        finally:
            for taking in takes:
                await stop(taking)

    async def _take(self, index: int, lay_out: Callable[[Signature], None]) -> None:
        """Take from one source, until all of it is there."""
        begun = False

        def begin(layout: Layout, handle: Any) -> Buffer:
            nonlocal begun
            if begun:
                raise SourceFailedError("what it sends now is something else")
            signature = self._theirs(layout)
            if self.out is None:
                lay_out(signature)
            begun = True
            buffer = self.inputs[index]
            assert buffer is not None
            return buffer

        await self._persist(index, begin, lambda: self.inputs[index] if begun else None)

    async def _persist(
        self,
        index: int,
        begin: Callable[[Layout, Any], Buffer],
        have: Callable[[], Buffer | None],
    ) -> None:
        """Take from a source; if that fails, say so, and go on until told otherwise."""
        worker, node = self.told.sources[index]
        old = True  # a connection that was not used for long may be none
        while True:
            try:
                await take(
                    self.reducer.puller.rpc,
                    worker,
                    stream_key(self.key, node),
                    receiver=self.reducer.address,
                    buffer=have(),
                    begin=begin,
                    hops=self.told.hops,
                    early=True,
                    share=False,
                )
                return
            except OSError as error:
                gone = isinstance(error, SourceFailedError) and not isinstance(
                    error, CorruptedError
                )
                if old and not gone:
                    old = False
                    continue
                self._tell(Broken, node, f"{type(error).__name__}: {error}", gone)
                await asyncio.sleep(self.reducer.stall_timeout)

    def _finish(self) -> None:
        assert self.combination is not None
        if self.combination.error is not None:
            raise self.combination.error
        for buffer in self.inputs:
            if buffer is not None:
                buffer.unfollow(self.combination.advance)

    async def _hand_over(self, value: Any) -> None:
        reducer = self.reducer
        if self.serving is not None:
            if not self.serving.buffer.done():
                layout, frames = await reducer.offload(dump, value)
                self.serving.buffer.set_result(Buffer(layout, frames))
            seconds = monotonic() - self.begun
            assert self.serve is not None
            reducer.report(
                Finished(self.key, reducer.address, self.serve, 0.0, seconds, "combined here")
            )
            reducer.shelf.settle(self.key)
        self.done = True
        result = reducer.result(self.key)
        if result.value.done():  # an earlier attempt's
            del reducer.results[self.key]
            result = reducer.result(self.key)
        if not self.waits:
            result.released.set()
        result.value.set_result(value)

    # Whole objects

    async def _make_whole(self, op: Op, values: list[Any]) -> None:
        told, offload = self.told, self.reducer.offload
        sources = range(len(told.sources))
        others = await asyncio.gather(*map(self._take_whole, sources))
        every = [*others, *values]
        value = every[0] if len(every) == 1 else await offload(functools.reduce, op.whole, every)
        if told.count:
            await self._hand_over(value)
        else:
            layout, frames = await offload(dump, value)
            header = pickle.dumps((WHOLE, layout.header))
            layout = Layout(layout.identity, header, layout.lengths)
            self.entry.buffer.set_result(Buffer(layout, frames))
        self._tell(Combined, monotonic() - self.begun)

    async def _take_whole(self, index: int) -> Any:
        header = b""

        def begin(layout: Layout, handle: Any) -> Buffer:
            nonlocal header
            kind, header = pickle.loads(layout.header)
            if kind != WHOLE:
                raise Conflict(WHOLE)
            self.reducer.puller.check(self.key, layout.nbytes)
            buffer = self.inputs[index] = Buffer(layout)
            return buffer

        await self._persist(index, begin, lambda: self.inputs[index])
        buffer = self.inputs[index]
        assert buffer is not None
        buffer.layout = Layout(buffer.layout.identity, header, buffer.layout.lengths)
        return await unpack(buffer)


class Ring:
    """A sum that goes round: each member combines a share, and tells the others.

    Each member sends one stream to the next one: its own part of some share, then what has come
    from the one before, combined with its own. So each share passes all members and is complete at
    the last, from where it goes round once more. The outgoing byte ``p`` + share follows the
    incoming byte ``p``; there are no steps to wait for.

    Notes
    -----
    Reduce-scatter and allgather in a ring (P. Patarasuk and X. Yuan 2009), here without barriers
    between steps: each link carries ``2·(n-1)/n`` of the bytes.

    What comes is received into the result. There, a share is overwritten by its final value only
    after all members have combined it, so after it was sent on.
    """

    def __init__(self, node: Sum, op: Op, signature: Signature, own: list[list[np.ndarray]]):
        self.node = node
        self.op = op
        self.signature = signature
        self.own = own

    async def run(self) -> None:
        """Take part."""
        node, op, told = self.node, self.op, self.node.told
        node.signature = self.signature
        members, index = told.ring, told.index
        dtypes = accumulators(self.signature, op)
        operands = [prepare(arrays, dtypes) for arrays in self.own]
        if len(operands) > 1:
            operands = [await node.reducer.offload(self._sum, operands)]
        [mine] = operands
        node.reducer.puller.check(node.key, sum(array.nbytes for array in mine))
        node.into = [room(array.size, array.dtype) for array in mine]
        cuts = [shares(array.nbytes, array.itemsize, members) for array in mine]

        def share(arrays: list[np.ndarray], number: int) -> list[np.ndarray]:
            number %= members
            return [a[cut[number] : cut[number + 1]] for a, cut in zip(arrays, cuts, strict=True)]

        parts = []
        for step in range(2, members + 1):
            here, there = share(node.into, index - step), share(mine, index - step)
            for into, other in zip(here, there, strict=True):
                parts.append(Part(into, [other], finish=op.mean and step == members))
        for step in range(1, members):
            parts += [Part(into) for into in share(node.into, index - step)]
        first = [as_bytes(array) for array in share(mine, index - 1)]
        coming = [as_bytes(part.into) for part in parts]
        node.inputs = [Buffer(node.layout(self.signature, coming), coming, received=0)]
        going = first + coming[: len(coming) - len(mine)]
        ahead = sum(frame.nbytes for frame in first)
        node.out = Buffer(node.layout(self.signature, going), going, received=ahead)
        node._combine(op, parts)
        node.entry.buffer.set_result(node.out)
        await node._take_all(lambda signature: None)
        node._finish()
        await node._hand_over(
            unflatten(self.signature, prepare(node.into, results(self.signature, op)))
        )
        node._tell(Combined, monotonic() - node.begun)

    def _sum(self, operands: list[list[np.ndarray]]) -> list[np.ndarray]:
        """What several operands of this worker make together."""
        into = [room(array.size, array.dtype) for array in operands[0]]
        frames = [as_bytes(array) for array in into]
        out = Buffer(self.node.layout(self.signature, frames), frames, received=0)
        columns = zip(into, *operands, strict=True)
        parts = [Part(array, list(others)) for array, *others in columns]
        Combination([], parts, out, self.op.combine, lambda block: None).advance()
        return into


def shares(nbytes: int, itemsize: int, members: int) -> list[int]:
    """Where the shares of an array begin and end, in elements: nearly equal, and in order."""
    size = nbytes // itemsize if itemsize else 0
    return [size * number // members for number in range(members + 1)]


def room(size: int, dtype: np.dtype) -> np.ndarray:
    """Memory for an array."""
    return _typed(host_array(size * dtype.itemsize), dtype)


def _typed(frame: memoryview, dtype: np.dtype) -> np.ndarray:
    # Not by its own buffer format, which datetime64 does not have
    return np.frombuffer(frame, "u1").view(dtype) if frame.nbytes else np.empty(0, dtype)


def _pickled(error: Exception) -> bytes:
    try:
        pickled = dumps(error)
        loads(pickled)
    except Exception:
        return dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled
