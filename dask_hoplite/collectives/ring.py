"""A sum that goes round among workers that all have operands."""

from __future__ import annotations

import numpy as np

from dask_hoplite.collectives.combine import Combination, Part
from dask_hoplite.collectives.operands import (
    Op,
    Signature,
    accumulators,
    as_bytes,
    bounds,
    prepare,
    results,
    unflatten,
)
from dask_hoplite.collectives.sums import Sum, room
from dask_hoplite.transfer.buffer import Buffer


class Ring(Sum):
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

    async def _make_stream(
        self, op: Op, signature: Signature | None, own: list[list[np.ndarray]]
    ) -> None:
        assert signature is not None
        self.signature = signature
        members, index = self.told.ring, self.told.index
        with self.naming():
            dtypes = accumulators(signature, op)
        operands = [prepare(arrays, dtypes) for arrays in own]
        if len(operands) > 1:
            operands = [await self.reducer.offload(self._sum, op, operands)]
        [mine] = operands
        self.reducer.puller.check(self.key, sum(array.nbytes for array in mine))
        self.into = [room(array.size, array.dtype) for array in mine]
        cuts = [self._cuts(leaf.shape, leaf.size) for leaf in signature.leaves]

        def share(arrays: list[np.ndarray], number: int) -> list[np.ndarray]:
            pairs = zip(arrays, cuts, strict=True)
            return [array[slice(*cut[number % members])] for array, cut in pairs]

        parts = []
        for step in range(2, members + 1):
            here, there = share(self.into, index - step), share(mine, index - step)
            for into, other in zip(here, there, strict=True):
                parts.append(Part(into, [into, other], finish=op.mean and step == members))
        for step in range(1, members) if self.terms.order is None else ():
            parts += [Part(into, [into]) for into in share(self.into, index - step)]
        first = [as_bytes(array) for array in share(mine, index - 1)]
        coming = [as_bytes(part.into) for part in parts]
        self.inputs = [Buffer(self.layout(signature, coming), coming, received=0)]
        going = first + coming[: len(coming) - len(mine)]
        ahead = sum(frame.nbytes for frame in first)
        self.out = Buffer(self.layout(signature, going), going, received=ahead)
        self._combine(op, parts)
        self.entry.buffer.set_result(self.out)
        await self._take_all(lambda signature: None)
        self._finish()
        arrays = self.into
        if self.terms.order is not None:  # the rest was only passing through
            arrays = [array.copy() for array in share(arrays, index)]
            signature = signature.block(self.terms.order[index], members)
        await self._hand_over(unflatten(signature, prepare(arrays, results(signature, op))))

    def _cuts(self, shape: tuple[int, ...], size: int) -> list[tuple[int, int]]:
        """Where the share of each member begins and ends in an array, in elements."""
        members, order = self.told.ring, self.terms.order
        if order is None:
            return bounds(size, members)
        row = size // shape[0] if shape[0] else 0
        rows = bounds(shape[0], members)
        return [(rows[block][0] * row, rows[block][1] * row) for block in order]

    def _sum(self, op: Op, operands: list[list[np.ndarray]]) -> list[np.ndarray]:
        """What several operands of this worker make together."""
        into = [room(array.size, array.dtype) for array in operands[0]]
        columns = zip(into, *operands, strict=True)
        parts = [Part(array, list(others)) for array, *others in columns]
        frames = [as_bytes(array) for array in into]
        assert self.signature is not None
        out = Buffer(self.layout(self.signature, frames), frames, received=0)
        Combination([], parts, out, op.combine, lambda block: None).advance()
        return into
