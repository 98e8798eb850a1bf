"""The scheduler's part in reduce-scatter: reductions that go round as one ring, if they can."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from dask_hoplite.core.events import Key
from dask_hoplite.core.instructions import Ask, Combine, Done, Fail, ReductionInstruction

if TYPE_CHECKING:
    from dask_hoplite.collectives.reductions import Reductions, Run

#: Blocks of one reduce-scatter that are asked for in so many seconds go round together.
TOGETHER = 1.0


class Group:
    """Reductions of one block each of the same operands.

    If all can begin together, they go round as one ring. If not, or if that breaks, each is a
    reduction of its own.

    Parameters
    ----------
    reductions : Reductions
        All of the cluster.
    key : Key
        Names the group.
    size : int
        How many blocks there are.
    """

    def __init__(self, reductions: Reductions, key: Key, size: int):
        self.reductions = reductions
        self.key = key
        self.size = size
        self.members: dict[int, Run] = {}  # by the number of the block
        self.ring: Run | None = None
        self.over = False

    def join(self, run: Run, number: int) -> None:
        """Count a block in."""
        if not self.members:
            loop = asyncio.get_running_loop()
            run.timers.append(loop.call_later(TOGETHER, self._is_late))
        self.members[number] = run
        run.group = self
        run.parked = not self.over

    def _is_late(self) -> None:
        if self.ring is None:
            self.dissolve()

    def assemble(self) -> None:
        """Let the blocks go round together, as soon as all can begin."""
        reductions = self.reductions
        roots = {number: run.root for number, run in self.members.items()}
        if self.over or self.ring is not None or len(roots) < self.size or None in roots.values():
            return
        first = self.members[0]
        wish = {**first.wish, "block": None, "spread": "contributors"}
        ring = type(first)(reductions.hoplite, self.key, wish)
        ring.group, ring.root = self, first.root
        self.ring = reductions.runs[self.key] = ring
        reductions.plan(ring)
        told = [one for event in ring.take_events() for one in ring.plan.handle(event, monotonic())]
        combines = [one for one in told if isinstance(one, Combine) and one.ring]
        numbers = {root: number for number, root in roots.items()}
        if {one.worker for one in combines} != numbers.keys() or len(numbers) < self.size:
            self.dissolve()  # others have the operands than are to have the blocks
            return
        order = [numbers[one.worker] for one in sorted(combines, key=lambda one: one.index)]
        for one in combines:
            result = self.members[numbers[one.worker]].key
            reductions.combine(ring, one, order=order, result=result)

    def perform(self, told: ReductionInstruction) -> None:
        """See what the ring's plan says: anything but that it is done means that it is broken."""
        assert self.ring is not None
        if isinstance(told, Done) and all(node.done for node in self.ring.plan.nodes.values()):
            self._finish(told.contributors)
        elif isinstance(told, Fail) and told.error:
            for member in self.members.values():
                self.reductions.give_up(member, told.error)
            self.dissolve()
        elif not isinstance(told, Ask):
            self.dissolve()

    def _finish(self, contributors: tuple[Key, ...]) -> None:
        """All have their blocks."""
        assert self.ring is not None
        self._close(self.ring)
        reductions = self.reductions
        for member in self.members.values():
            member.parked = False
            member.plan.over = True
            member.account.sums = self.ring.account.sums
            if reductions.runs.get(member.key) is member and member.root is not None:
                reductions.watch(member)
                reductions.contributors[member.key] = contributors
                reductions.hoplite.send(member.root, "hoplite-release", key=member.key)

    def dissolve(self) -> None:
        """Let each block be a reduction of its own."""
        if self.over:
            return
        self._close(self.ring)
        for member in self.members.values():
            member.parked = False
            for event in member.take_events():
                self.reductions.now(member, event)

    def _close(self, ring: Run | None) -> None:
        self.over = True
        self.reductions.groups.pop(self.key, None)
        if ring is not None and self.reductions.runs.pop(self.key, None) is not None:
            ring.silence()
            self.reductions.forget(ring)
