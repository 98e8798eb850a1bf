"""One sum on a worker: of its own operands, and of what comes from others."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.utils import host_array

from dask_hoplite.collectives.combine import Combination, Mirror, Part, address
from dask_hoplite.collectives.operands import (
    Op,
    OperandError,
    Signature,
    accumulators,
    as_bytes,
    block_of,
    bounds,
    check,
    flatten,
    prepare,
    promote,
    results,
    streamable,
    unflatten,
    weigh,
)
from dask_hoplite.core.events import (
    Abandoned,
    Broken,
    Combined,
    Combining,
    Finished,
    Key,
    Missing,
    Promoted,
    ReductionEvent,
    Unfit,
)
from dask_hoplite.core.instructions import Combine
from dask_hoplite.exceptions import CorruptedError, SourceFailedError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import Layout, dump, load
from dask_hoplite.transfer.patience import stop
from dask_hoplite.transfer.pull import take, unpack
from dask_hoplite.transfer.shared import AttachedBuffer, SharedBuffer, make_room
from dask_hoplite.transfer.shelf import Entry

if TYPE_CHECKING:
    from dask_hoplite.collectives.reducer import Reducer

logger = logging.getLogger(__name__)

#: In place of a signature, where whole objects are combined
WHOLE = "whole"


def stream_key(key: Key, node: int) -> tuple[str, Key, int]:
    """The name of a sum on the wire."""
    return ("hoplite-sum", key, node)


class OperationFailedError(Exception):
    """What an operation has raised, whatever that is. Leaves nobody."""

    def __init__(self, error: BaseException):
        self.error = error


class Conflict(Exception):
    """An operand is of another item size than its sum. Leaves nobody."""

    def __init__(self, common: Signature | str):
        self.common = dumps(common)


@dataclass(frozen=True)
class Terms:
    """What a worker must know to make a sum, beside the plan.

    Parameters
    ----------
    how : bytes
        The :class:`~dask_hoplite.collectives.operands.Op`, pickled.
    result : Key
        What the result is called.
    serve : int, optional
        The epoch under which the result is served while it grows, if it is.
    shares_host : bool
        Whether there are other workers on this host, with which memory can be shared.
    block : tuple of (int, int), optional
        Take one of so many blocks of each operand, along its first axis.
    order : list of int, optional
        Which block each member of a ring is to have, if not all of the result.
    weights : list of float, optional
        With what each operand of the sum is to be multiplied first.
    """

    how: bytes
    result: Key
    serve: int | None = None
    shares_host: bool = False
    block: tuple[int, int] | None = None
    order: list[int] | None = None
    weights: list[float] | None = None


class Sum:
    """One node: what this worker makes of its operands and of what comes from others."""

    def __init__(self, reducer: Reducer, told: Combine, terms: Terms):
        self.reducer = reducer
        self.told = told
        self.terms = terms
        self.key = told.key
        self.name = stream_key(told.key, told.node)
        self.inputs: list[Buffer | None] = [None] * len(told.sources)
        self.out: Buffer | None = None
        self.combination: Combination | None = None
        self.signature: Signature | None = None  # of whole operands, also if a block is taken
        self.whose: Key = told.operands[0] if told.operands else self.key  # an operand of that
        self.into: list[np.ndarray] = []
        self.mirrored: Buffer | None = None  # the result as Dask lays it out, if it grows
        self.shared: SharedBuffer | None = None  # where the sum is, if others can map it
        self.places: list[int] = []  # the frame of it that each leaf is in
        self.begun = monotonic()
        self.done = False
        self.entry = reducer.shelf.promise(self.name)
        self.serving = reducer.shelf.promise(self.key) if terms.serve is not None else None
        for entry in self._entries():
            entry.readers += 1  # it stands there for as long as the sum may be asked for
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
        except OperationFailedError as failed:
            self._unfit(failed.error)
        except Exception as error:
            self._unfit(error)
        finally:
            await stop(watching)
            if self.combination is not None:
                self.combination.unfollow()

    def _tell(self, kind: Callable[..., ReductionEvent], *details: Any) -> None:
        self.reducer.report(kind(self.key, self.reducer.address, self.told.node, *details))

    def _unfit(self, error: BaseException) -> None:
        logger.info("Hoplite: %r cannot be made here", self.key, exc_info=error)
        self._tell(Unfit, f"{type(error).__name__}: {error}", _pickled(error))

    def _done(self) -> None:
        self._tell(Combined, monotonic() - self.begun, self.out.nbytes if self.out else 0)

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
        for entry in self._entries():
            entry.readers -= 1
        error = SourceFailedError("it was given up, as another one was lost")
        shelf = self.reducer.shelf
        if shelf.entries.get(self.name) is self.entry:
            shelf.discard(self.name, error)
        if not self.done and self.serving is not None:
            if shelf.entries.get(self.key) is self.serving:
                shelf.discard(self.key, error)
            assert self.terms.serve is not None
            gone = Abandoned(self.key, self.reducer.address, self.terms.serve, 0, "made anew")
            self.reducer.report(gone)
        elif self.serving is not None and shelf.entries.get(self.key) is self.serving:
            shelf.settle(self.key)

    def _entries(self) -> list[Entry]:
        return [self.entry] if self.serving is None else [self.entry, self.serving]

    # Work

    async def _make(self) -> None:
        told = self.told
        op: Op = loads(self.terms.how)
        values = [self.reducer.worker.data[key] for key in told.operands]
        if self.terms.weights is not None:
            values = await self.reducer.offload(self._weigh, values, self.terms.weights)
        common = pickle.loads(told.common) if told.common else None
        if op.ufunc is None or common == WHOLE:
            if told.ring:  # whole objects cannot go round
                raise Conflict(WHOLE)
            await self._make_whole(op, values)
            return
        signature, own = self._flatten(values, common)
        if signature is not None and not streamable(signature, op):
            if told.sources:
                raise Conflict(WHOLE)
            await self._make_whole(op, values)
        else:
            await self._make_stream(op, signature, own)
            self._done()

    def _weigh(self, values: list[Any], weights: list[float]) -> list[Any]:
        weighed = []
        for key, value, weight in zip(self.told.operands, values, weights, strict=True):
            with _naming(key):
                weighed.append(weigh(value, weight))
        return weighed

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
            mine, arrays = _flat(key, value)
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
        self._match(key, theirs)
        if ours is not None and ours != theirs:
            raise Conflict(promote(ours, theirs))
        return theirs  # type: ignore[no-any-return]

    def _match(self, key: Key, signature: Signature) -> None:
        """See that an operand goes together with those that were seen before."""
        if self.signature is None:
            self.signature, self.whose = signature, key
        else:
            check(self.whose, self.signature, key, signature)

    def naming(self) -> AbstractContextManager[None]:
        """Name an operand in what is said of it."""
        return _naming(self.whose)

    def _cut(
        self, signature: Signature, own: list[list[np.ndarray]]
    ) -> tuple[Signature, list[list[np.ndarray]]]:
        """What is combined here of operands: all, or a block."""
        if self.terms.block is None:
            return signature, own
        number, blocks = self.terms.block[:2]
        return signature.block(number, blocks), [
            [array[slice(*bounds(len(array), blocks)[number])] for array in arrays]
            for arrays in own
        ]

    async def _make_stream(
        self, op: Op, signature: Signature | None, own: list[list[np.ndarray]]
    ) -> None:
        told = self.told
        if signature is not None:
            self._lay_out(op, signature, own)
        # A root without operands learns from the first who sends what there is.
        await self._take_all(partial(self._lay_out, op, own=[]))
        assert self.combination is not None and self.signature is not None
        if not self.combination.complete:  # what came in an event loop's thread, or was here
            await self.reducer.offload(self.combination.advance)
        self._finish()
        if not self.entry.buffer.done():
            assert self.out is not None
            self.entry.buffer.set_result(self.out)
        if told.count and self.mirrored is not None:
            # What is written to this one, others must not see.
            await self._hand_over(load(self.mirrored.layout, self.mirrored.own_frames()))
        elif told.count:
            cut, _ = self._cut(self.signature, [])
            await self._hand_over(unflatten(cut, prepare(self.into, results(cut, op))))

    def _lay_out(self, op: Op, signature: Signature, own: list[list[np.ndarray]]) -> None:
        """Make room for the sum, and serve it while it grows."""
        told = self.told
        self.signature = signature
        with self.naming():
            cut, own = self._cut(signature, own)
            dtypes = accumulators(signature, op)
        operands = [prepare(arrays, dtypes) for arrays in own]
        as_it_is = len(operands) == 1 and not told.sources and not told.count
        if as_it_is:
            self.into = operands[0]
        else:
            self.into = self._room(cut, dtypes, op)
        frames = [as_bytes(array) for array in self.into]
        layout = self.layout(signature, frames)
        for index in range(len(told.sources)):
            self.inputs[index] = Buffer(layout, None if index else frames, received=0)
        parts = []
        for leaf, array in enumerate(self.into):
            sources = [
                array if index == 0 else _typed(buffer.frames[leaf], array.dtype)
                for index, buffer in enumerate(self.inputs)
                if buffer is not None
            ]
            mine = [operand[leaf] for operand in operands]
            finish = bool(told.count) and op.mean
            parts.append(Part(array, sources + mine, finish, self._writer(leaf)))
        if self.shared is not None and not told.count:
            self.out, self.shared.layout = self.shared, layout
        else:
            self.out = Buffer(layout, frames, received=None if as_it_is else 0)
        self._combine(op, [] if as_it_is else parts)
        if self.mirrored is not None:
            assert self.serving is not None
            mirror = Mirror(self.out, self.mirrored)
            mirror.follow()
            self.serving.buffer.set_result(self.mirrored)
        if self.out.nbytes:  # or it would be complete before it is known whether operands match
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
        lengths = tuple(frame.nbytes for frame in frames)
        return Layout(uuid.uuid4().hex, dumps((signature, self.whose)), lengths)

    def _room(self, signature: Signature, dtypes: tuple[np.dtype, ...], op: Op) -> list[np.ndarray]:
        """Memory for the sum: where others of this host can map it, if there are any."""
        shares, told = self.terms.shares_host, self.told
        sizes = [leaf.size for leaf in signature.leaves]
        lengths = [n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True)]
        self.reducer.puller.check(self.key, sum(lengths))
        # Costs nothing as long as nobody touches it.
        into = [room(n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
        if self.serving is not None and results(signature, op) == dtypes:
            return self._mirror(unflatten(signature, into), into)
        if shares and not told.count:
            buffer = make_room(Layout(uuid.uuid4().hex, b"", tuple(lengths)), shares)
            if isinstance(buffer, SharedBuffer):
                self.shared, self.places = buffer, list(range(len(dtypes)))
                pairs = zip(buffer.frames, dtypes, strict=True)
                return [_typed(frame, dtype) for frame, dtype in pairs]
        return into

    def _mirror(self, value: Any, into: list[np.ndarray]) -> list[np.ndarray]:
        """Have the sum formed where it is served as the result, as Dask lays that out.

        Parameters
        ----------
        value : object
            The result, of which nothing is known yet.
        into : list of numpy.ndarray
            Its memory.

        Returns
        -------
        list of numpy.ndarray
            The memory to be used instead.
        """
        layout, frames = dump(value)
        where = {address(frame): index for index, frame in enumerate(frames) if frame.nbytes}
        places = [where.get(address(as_bytes(array)), -1) for array in into if array.size]
        if -1 in places or places != sorted(places):
            return into  # it is served when it is complete
        buffer = make_room(layout, self.terms.shares_host)
        for index in set(range(len(frames))).difference(places):
            buffer.frames[index][:] = frames[index]
        self.mirrored = buffer
        if isinstance(buffer, SharedBuffer):
            self.shared = buffer
        found = iter(places)
        self.places = [next(found) if array.size else -1 for array in into]
        return [
            _typed(buffer.frames[place], array.dtype) if array.size else array
            for place, array in zip(self.places, into, strict=True)
        ]

    def _writer(self, leaf: int) -> Callable[[int, memoryview], None] | None:
        """What writes to a leaf of the sum, if others can map it."""
        shared = self.shared
        if shared is None or not self.into[leaf].size:
            return None
        start = shared.start_of(self.places[leaf])
        return lambda offset, data: shared.write(start + offset, data)

    def _attach(self, index: int, buffer: AttachedBuffer) -> None:
        """What comes from a source appears in memory of that."""
        assert self.combination is not None
        self.inputs[index] = buffer
        pairs = zip(buffer.frames, self.into, strict=True)
        arrays = [_typed(frame, array.dtype) for frame, array in pairs]
        self.combination.replace(index, buffer, arrays, self.reducer.submit)

    async def _take_all(self, lay_out: Callable[[Signature], None]) -> None:
        """Take from all sources, until all is there."""
        takes = [
            asyncio.create_task(self._take(index, lay_out))
            for index in range(len(self.told.sources))
        ]
        try:
            await asyncio.gather(*takes)
        finally:
            await stop(*takes)

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
            if handle is not None:
                self._attach(index, AttachedBuffer(layout, handle))
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
                    share=self.terms.shares_host,
                    counts=self.reducer.puller.bytes_in,
                )
                return
            except OSError as error:
                gone = isinstance(error, SourceFailedError) and not isinstance(
                    error, CorruptedError
                )
                gone = gone or isinstance(
                    have(), AttachedBuffer
                )  # of which we cannot have the rest
                if old and not gone:
                    old = False
                    continue
                self._tell(Broken, node, f"{type(error).__name__}: {error}", gone)
                await asyncio.sleep(self.reducer.stall_timeout)

    def _finish(self) -> None:
        assert self.combination is not None
        if self.combination.error is not None:
            raise self.combination.error
        self.combination.unfollow()

    async def _hand_over(self, value: Any) -> None:
        reducer = self.reducer
        if self.serving is not None:
            if not self.serving.buffer.done():
                layout, frames = await reducer.offload(dump, value)
                self.serving.buffer.set_result(Buffer(layout, frames))
            seconds = monotonic() - self.begun
            assert self.terms.serve is not None
            reducer.report(
                Finished(self.key, reducer.address, self.terms.serve, 0.0, seconds, "combined here")
            )
        self.done = True
        reducer.deliver(self.terms.result, value)

    # Whole objects

    async def _make_whole(self, op: Op, values: list[Any]) -> None:
        told, offload, block = self.told, self.reducer.offload, self.terms.block
        if op.ufunc is not None or block is not None:
            for key, value in zip(told.operands, values, strict=True):
                self._match(key, _flat(key, value)[0])
        if block is not None:
            with self.naming():
                values = [block_of(value, *block[:2]) for value in values]
        sources = range(len(told.sources))
        others = await asyncio.gather(*map(self._take_whole, sources))
        if not others and (told.count or len(values) > 1):
            # An operation may write to its first argument, and who has the result may, too.
            values[0] = await offload(copy.deepcopy, values[0])
        with self.naming():
            value = await offload(_fold, op, [*others, *values])
        if told.count:
            await self._hand_over(value)
        else:
            layout, frames = await offload(dump, value)
            header = dumps((WHOLE, (layout.header, self.signature, self.whose)))
            layout = Layout(layout.identity, header, layout.lengths)
            self.out = Buffer(layout, frames)
            self.entry.buffer.set_result(self.out)
        self._done()

    async def _take_whole(self, index: int) -> Any:
        header = b""

        def begin(layout: Layout, handle: Any) -> Buffer:
            nonlocal header
            kind, details = pickle.loads(layout.header)
            if kind != WHOLE:
                raise Conflict(WHOLE)
            header, signature, key = details
            if signature is not None:
                self._match(key, signature)
            self.reducer.puller.check(self.key, layout.nbytes)
            shared = handle is not None
            buffer = self.inputs[index] = (
                AttachedBuffer(layout, handle) if shared else Buffer(layout)
            )
            return buffer

        await self._persist(index, begin, lambda: self.inputs[index])
        buffer = self.inputs[index]
        assert buffer is not None
        buffer.layout = Layout(buffer.layout.identity, header, buffer.layout.lengths)
        return await unpack(buffer)


def room(size: int, dtype: np.dtype) -> np.ndarray:
    """Memory for an array."""
    return _typed(host_array(size * dtype.itemsize), dtype)


def _typed(frame: memoryview, dtype: np.dtype) -> np.ndarray:
    # Not by its own buffer format, which datetime64 does not have
    return np.frombuffer(frame, "u1").view(dtype) if frame.nbytes else np.empty(0, dtype)


def _flat(key: Key, value: Any) -> tuple[Signature, list[np.ndarray]]:
    """Take an operand apart."""
    with _naming(key):
        return flatten(value)


@contextmanager
def _naming(key: Key) -> Iterator[None]:
    try:
        yield
    except OperandError as error:
        raise OperandError(f"{key!r}: {error}") from error


def _fold(op: Op, values: list[Any]) -> Any:
    try:
        return functools.reduce(op.whole, values)
    except OperandError:
        raise
    except BaseException as error:
        raise OperationFailedError(error) from error


def _pickled(error: BaseException) -> bytes:
    try:
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            raise TypeError("asyncio makes something else of it")
        pickled = dumps(error)
        loads(pickled)
    except Exception:
        return dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled
