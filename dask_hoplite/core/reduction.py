"""One reduction: which worker combines what, in the order in which operands become ready.

Pure, like :mod:`~dask_hoplite.core.directory`: :meth:`Reduction.handle` takes one event and the
present time, and returns instructions.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod

from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.events import (
    Broken,
    Combined,
    Combining,
    Due,
    Gone,
    Key,
    Look,
    Missing,
    Promoted,
    Ready,
    ReductionEvent,
    Returned,
    Rooted,
    Silent,
    Unfit,
    WorkerLeft,
)
from dask_hoplite.core.instructions import (
    Ask,
    Combine,
    Done,
    Fail,
    Forget,
    Later,
    ReductionInstruction,
)

#: For this share of the time that an object takes on a link, what is ready waits for others that
#: may be so a moment later, on the same host: each that comes alone crosses the network alone.
GATHER = 1 / 100

#: A worker that has failed more often than this, though it answers, is not used any more.
FAILURES = 8

#: Of a stall timeout: what is told once in it has come after ``TOLD``, and comes no more after
#: ``SILENT``.
TOLD, SILENT = 0.9, 1.5


@dataclass(eq=False, slots=True)
class Node:
    """A sum that one worker makes of its own operands and of what comes from other nodes."""

    number: int
    worker: str
    operands: tuple[Key, ...]
    sources: tuple[int, ...]
    final: bool = False
    done: bool = False
    lost: bool = False  #: it cannot be had any more; it may have been used before
    heard: float = 0.0  #: when its worker said last how far it is
    made: int = 0
    length: float = math.inf  #: how many bytes it has, as soon as it is done
    height: int = 1  #: how many nodes there are in a row, up to this one
    received: tuple[int, ...] = ()
    #: When bytes came last from each source, and since when it is known to have more to give
    dry: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Unit:
    """The workers of one host, and what each of them adds. The first takes what comes from others,
    the last gives what all have made."""

    members: list[tuple[str, tuple[Key, ...]]]

    @property
    def first(self) -> str:
        return self.members[0][0]

    @property
    def last(self) -> str:
        return self.members[-1][0]


class Reduction:
    """Decides who combines what.

    Parameters
    ----------
    key : Key
        That of the result.
    operands : collection of Key
        All that may go into it.
    count : int
        How many do: the first that are ready.
    holders : callable of a key, giving a collection of str
        The workers that hold an operand at this moment.
    hosts : mapping of str to str
        The host of each worker that is there. The caller keeps it up to date.
    nbytes : callable of a key, giving an int
        The size of an operand.
    number : callable giving an int
        Numbers for nodes. They grow, and none comes twice.
    cost : CostModel
        What a hop costs.
    ordered : bool
        Whether operands are combined in the order given, each with the sum of those before it. Then
        all of them are.
    ring : bool
        Whether each worker is to have the result, or its part, so that a ring pays.
    stall_timeout : float
        Seconds after which a node without a byte is a reason to worry.
    degree : int, optional
        From how many others a node takes. Default: what the cost model recommends.

    Notes
    -----
    The tree grows from its leaves as operands become ready, so that what is there early is
    combined while the rest is not (Hoplite, SIGCOMM 2021, section 3.4.2). For large objects it is
    a chain, through all workers of a host before it goes on to the next one.

    A node never changes, and bytes of two nodes are never mixed. When one is lost, so are those
    that were still taking from it, and those behind them; new nodes take up what these were to
    combine. Nodes that are done stand for all that has gone into them, wherever it was. Thus each
    operand counts once, whatever happens.
    """

    def __init__(
        self,
        key: Key,
        operands: Collection[Key],
        count: int,
        holders: Callable[[Key], Collection[str]],
        hosts: Mapping[str, str],
        nbytes: Callable[[Key], int],
        number: Callable[[], int],
        *,
        cost: CostModel | None = None,
        ordered: bool = False,
        ring: bool = False,
        stall_timeout: float = 1.5,
        degree: int | None = None,
    ):
        self.key = key
        self.operands = tuple(operands)
        self.count = count
        self.holders = holders
        self.hosts = hosts
        self.nbytes = nbytes
        self.number = number
        self.cost = cost or CostModel()
        self.ordered = ordered
        self.ring = ring
        self.stall_timeout = stall_timeout
        self.degree = degree
        self.root: str | None = None
        self.position = {key: index for index, key in enumerate(self.operands)}
        self.ready: dict[Key, None] = {}  # in the order in which they were
        self.gone: dict[Key, str] = {}
        self.placed: set[Key] = set()  # in a node that counts
        self.loose: dict[Key, None] = {}  # ready and not placed
        self.frontier = 0  # the place behind the last one that is placed, in the order given
        self.nodes: dict[int, Node] = {}
        self.ends: list[int] = []  # nodes from which nobody takes yet
        #: Workers that are to answer, since when, and who could not reach them
        self.suspects: dict[str, tuple[float, str]] = {}
        self.apart: set[frozenset[str]] = set()  # pairs between which nothing comes
        self.failures: Counter[str] = Counter()
        self.barred: dict[str, str] = {}  # workers that failed too often, and how
        self.common = b""
        self.due = False  # whether it is known when
        self.busy: dict[str, float] = {}  # until when a sum is on each host's link, if all is well
        self.wake = 0.0  # when the first of these is free for what waits
        self.over = False
        self.reason = ""

    def handle(self, event: ReductionEvent, now: float) -> list[ReductionInstruction]:
        """Take an event in, and say what is to be done.

        Parameters
        ----------
        event : ReductionEvent
            What happened.
        now : float
            Seconds on any clock that does not run backwards.

        Returns
        -------
        list of ReductionInstruction
        """
        if self.over:
            return []
        told = list(self._handle(event, now))
        if (
            not self.over
            and isinstance(event, Combining | Combined | Broken | Missing | Promoted)
            and event.worker in self.suspects
        ):
            told += self._handle(Returned(self.key, event.worker), now)
        if not self.over:
            told += self._give_up()
        return told

    @singledispatchmethod
    def _handle(self, event: ReductionEvent, now: float) -> Iterable[ReductionInstruction]:
        raise TypeError(f"not an event of a reduction: {event!r}")

    # Operands and the root

    @_handle.register
    def _ready(self, event: Ready, now: float) -> Iterable[ReductionInstruction]:
        self.ready[event.operand] = None
        self.gone.pop(event.operand, None)  # it was computed again
        if event.operand not in self.placed:
            self.loose[event.operand] = None
        return self._grow(now)

    @_handle.register
    def _gone(self, event: Gone, now: float) -> Iterable[ReductionInstruction]:
        self.gone[event.operand] = event.reason
        self.ready.pop(event.operand, None)
        self.loose.pop(event.operand, None)
        return self._grow(now)  # the others need not wait for a root now

    @_handle.register
    def _rooted(self, event: Rooted, now: float) -> Iterable[ReductionInstruction]:
        self.root = event.worker
        finals = [node for node in self.nodes.values() if node.final and not node.lost]
        if not finals or any(node.worker == event.worker for node in finals):
            return self._grow(now)
        for node in finals:
            node.lost = True
        return self._replan(now)

    @_handle.register
    def _is_due(self, event: Due, now: float) -> Iterable[ReductionInstruction]:
        self.due = False
        return self._grow(now, patient=False)

    # Nodes

    @_handle.register
    def _combining(self, event: Combining, now: float) -> Iterable[ReductionInstruction]:
        """Find out whether a source is silent, or waits for bytes itself.

        Every node at work says so, as often as this one: one that does not is frozen or cut off.
        One that has long had more than it has given is cut off from this node, at least.
        """
        node = self.nodes.get(event.node)
        if node is None or node.lost:
            return []
        was_away = now - node.heard > SILENT * self.stall_timeout  # and could receive nothing
        before = node.received or (-1,) * len(node.sources)
        node.heard, node.made, node.received = now, event.made, event.received
        patience = TOLD * self.stall_timeout
        for number, had, has in zip(node.sources, before, event.received, strict=True):
            source = self.nodes[number]
            more = has < (source.length if source.done else source.made)
            since, known = node.dry.get(number, (now, math.inf))
            if has > had or was_away:
                since, known = now, math.inf
            known = min(known, now) if more else math.inf
            node.dry[number] = (since, known)
            silent = not source.done and now - source.heard > SILENT * self.stall_timeout
            if now - known >= patience or (silent and now - since >= patience):
                how = f"nothing came from it to {node.worker} for {now - since:.1f} s"
                return self._blame(source, node.worker, how, now)
        return []

    @_handle.register
    def _combined(self, event: Combined, now: float) -> Iterable[ReductionInstruction]:
        node = self.nodes.get(event.node)
        if node is None or node.lost:
            return []
        node.done = True
        node.length = event.nbytes or math.inf
        return self._conclude() if node.final else []

    def _conclude(self) -> Iterable[ReductionInstruction]:
        """Say that the result is there, if it is: also where a ring has one who does not answer."""
        if not self.ends or not all(
            node.final
            and (node.done or (node.worker in self.suspects and node.worker != self.root))
            for node in map(self.nodes.__getitem__, self.ends)
        ):
            return []
        self.over = True
        return [Done(self.key, tuple(key for key in self.operands if key in self.placed))]

    @_handle.register
    def _broken(self, event: Broken, now: float) -> Iterable[ReductionInstruction]:
        node, source = self.nodes.get(event.node), self.nodes.get(event.source)
        if node is None or node.lost or source is None or source.lost:
            return []
        if not event.gone:
            return self._blame(source, node.worker, event.reason, now)
        return self._failed(source, event.reason, now)

    @_handle.register
    def _missing(self, event: Missing, now: float) -> Iterable[ReductionInstruction]:
        node = self.nodes.get(event.node)
        if node is None or node.lost:
            return []
        return self._failed(node, event.reason, now)

    @_handle.register
    def _unfit(self, event: Unfit, now: float) -> Iterable[ReductionInstruction]:
        node = self.nodes.get(event.node)
        if node is None or node.lost:
            return []
        self.over = True
        return [Fail(self.key, event.reason, node.operands, event.error)]

    @_handle.register
    def _promoted(self, event: Promoted, now: float) -> Iterable[ReductionInstruction]:
        node = self.nodes.get(event.node)
        if node is None or node.lost:
            return []
        self.common = event.common
        self.ring = False  # whole objects cannot go round, and it is rare enough
        for node in self.nodes.values():
            node.lost = True
        return self._replan(now)

    # Faults

    @_handle.register
    def _left(self, event: WorkerLeft, now: float) -> Iterable[ReductionInstruction]:
        # Whoever comes back under this address is another one.
        self.suspects.pop(event.worker, None)
        self.failures.pop(event.worker, None)
        self.barred.pop(event.worker, None)
        self.apart = {pair for pair in self.apart if event.worker not in pair}
        if self.root == event.worker:
            self.root = None
        return self._lose(event.worker, now)

    @_handle.register
    def _look(self, event: Look, now: float) -> Iterable[ReductionInstruction]:
        return [
            Ask(self.key, node.worker)
            for node in self.nodes.values()
            if node.final
            and not (node.done or node.lost)
            and now - node.heard > SILENT * self.stall_timeout
        ]

    @_handle.register
    def _silent(self, event: Silent, now: float) -> Iterable[ReductionInstruction]:
        if event.worker in self.suspects or event.worker not in self.hosts:
            return []
        self.suspects[event.worker] = (-math.inf, "")
        return self._conclude() or self._lose(event.worker, now)

    @_handle.register
    def _returned(self, event: Returned, now: float) -> Iterable[ReductionInstruction]:
        if event.worker not in self.suspects:
            return []
        since, other = self.suspects.pop(event.worker)
        if now - since < self.stall_timeout:
            # It was there all the time. Which of the two cannot reach the other is not known, until
            # one of them has failed with others too.
            self.apart.add(frozenset((event.worker, other)))
            if self._count(other, f"it could not take from {event.worker}"):
                return self._lose(other, now)
        return self._grow(now)

    def _blame(
        self, source: Node, worker: str, reason: str, now: float
    ) -> Iterable[ReductionInstruction]:
        """Do without a worker until it answers."""
        if source.worker == worker:
            return self._failed(source, reason, now)  # it has just answered
        self._count(source.worker, reason)
        self.suspects[source.worker] = (now, worker)
        return [Ask(self.key, source.worker), *self._lose(source.worker, now)]

    def _failed(self, node: Node, reason: str, now: float) -> Iterable[ReductionInstruction]:
        """A node cannot be had, though its worker is there."""
        if self._count(node.worker, reason):
            return self._lose(node.worker, now)
        node.lost = True
        return self._replan(now)

    def _count(self, worker: str, reason: str) -> bool:
        """Count a failure; return whether it was one too many."""
        self.reason = f"{worker}: {reason}"  # why there are other nodes now
        if worker not in self.hosts:
            return False
        self.failures[worker] += 1
        if self.failures[worker] > FAILURES:
            self.barred[worker] = f"{worker} fails again and again: {reason}"
        return worker in self.barred

    def _lose(self, worker: str, now: float) -> Iterable[ReductionInstruction]:
        lost = [node for node in self.nodes.values() if node.worker == worker and not node.lost]
        if not lost:
            return self._grow(now)
        for node in lost:
            node.lost = True
        return self._replan(now)

    def _give_up(self) -> Iterable[ReductionInstruction]:
        """Fail, if it is known that there can be no result."""
        if self.root in self.barred:
            return self._fail(f"it is to have the result, but {self.barred[self.root]}", ())
        lacking = {key: why for key, why in self.gone.items() if key not in self.placed}
        for key in self.loose if self.barred else ():
            holders = [worker for worker in self.holders(key) if worker in self.hosts]
            if holders and self.barred.keys() >= set(holders):
                lacking[key] = self.barred[holders[0]]
        able = len(self.operands) - len(lacking)
        if able >= self.count:
            return []
        why = "; ".join(f"{key!r}: {reason}" for key, reason in lacking.items())
        return self._fail(f"{self.count} operands are needed and {able} are left: {why}", lacking)

    def _fail(self, reason: str, operands: Iterable[Key]) -> Iterable[ReductionInstruction]:
        self.over = True
        return [Fail(self.key, reason, tuple(operands))]

    def _replan(self, now: float) -> Iterable[ReductionInstruction]:
        """Drop the nodes that are of no use any more, and let others take their place.

        A node is of use if it can be had, and is done or will be.
        """
        finals = [node for node in self.nodes.values() if node.final]
        lost = sum(node.lost for node in finals)
        if len(finals) > 1 and lost > 0:
            # A ring is lost as a whole. If some of it is broken, it is a tree from now on.
            self.ring = self.ring and lost == len(finals)
            for node in finals:
                node.lost = True
        of_use: set[int] = set()
        for number, node in self.nodes.items():  # sources come before those that take from them
            if not node.lost and (node.done or of_use.issuperset(node.sources)):
                of_use.add(number)
        self.ends = []
        kept: set[int] = set()
        for number in reversed(self.nodes):
            if number not in of_use or number in kept:
                continue
            # Nobody stands for it, not even one that has taken it from another one, lost since.
            self.ends.append(number)
            ahead = [number]
            while ahead:
                behind = ahead.pop()
                if behind not in kept:
                    kept.add(behind)
                    ahead += self.nodes[behind].sources
        self.ends.reverse()
        dropped = [node for number, node in self.nodes.items() if number not in kept]
        self.nodes = {number: node for number, node in self.nodes.items() if number in kept}
        self.placed = {key for node in self.nodes.values() for key in node.operands}
        self.loose = {key: None for key in self.ready if key not in self.placed}
        self.frontier = 1 + max((self.position[key] for key in self.placed), default=-1)
        for node in dropped:
            yield Forget(self.key, node.worker, node.number)
        yield from self._grow(now)

    # Growth

    def _grow(self, now: float, *, patient: bool = True) -> Iterator[ReductionInstruction]:
        """Place what is ready and is not placed yet."""
        if self.ends and self.nodes[self.ends[-1]].final:
            return
        missing = self.count - len(self.placed)
        if patient and self.due and len(self.loose) < missing:
            return
        fresh = self._fresh(missing)
        complete = len(fresh) == missing
        if not complete and not fresh:
            return
        if not complete and patient:
            if not self.due:
                self.due = True
                nbytes = max(self.nbytes(key) for key in fresh)
                yield Later(self.key, GATHER * nbytes / self.cost.bandwidth)
            return
        if complete and (self.root is None or self.root in self.suspects):
            return  # the last ones are placed when it is known where to
        if self.ordered:
            yield from self._append(fresh, complete, now)
        elif complete and self.ring and not self.placed and self._rings(fresh):
            yield from self._close_ring(fresh, now)
        else:
            yield from self._plant(fresh, complete, now)

    def _fresh(self, missing: int) -> list[Key]:
        """Operands that may be placed now."""
        found: list[Key] = []
        if self.ordered:
            for index in range(self.frontier, len(self.operands)):
                key = self.operands[index]
                if key not in self.loose or not self._able(key):
                    break
                found.append(key)
            return found
        for key in self.loose:
            if len(found) == missing:
                break
            if self._able(key):
                found.append(key)
        return found

    def _able(self, key: Key) -> list[str]:
        """The workers that may take an operand from their own memory."""
        return sorted(
            worker
            for worker in self.holders(key)
            if worker in self.hosts and worker not in self.suspects and worker not in self.barred
        )

    def _where(self, keys: Iterable[Key]) -> dict[str, tuple[Key, ...]]:
        """Choose a worker for each operand: few workers, and the root if it is one of them."""
        able = {key: self._able(key) for key in keys}
        crowd = Counter(worker for workers in able.values() for worker in workers)
        chosen: dict[str, list[Key]] = {}
        for key, workers in able.items():
            worker = min(workers, key=lambda w: (self.failures[w], w != self.root, -crowd[w], w))
            chosen.setdefault(worker, []).append(key)
        return {worker: tuple(keys) for worker, keys in chosen.items()}

    def _units(self, where: dict[str, tuple[Key, ...]]) -> list[Unit]:
        """The workers of each host, the root's host first and the root last in it."""
        units: dict[str, Unit] = {}
        for worker in sorted(where, key=lambda w: (w == self.root, self.hosts[w], w)):
            unit = units.setdefault(self.hosts[worker], Unit([]))
            unit.members.append((worker, where[worker]))
        return sorted(units.values(), key=lambda unit: unit.last != self.root)

    def _plant(
        self, fresh: list[Key], complete: bool, now: float
    ) -> Iterator[ReductionInstruction]:
        """Add what is ready, on top of what is there."""
        where = self._where(fresh)
        nbytes = max((self.nbytes(key) for key in fresh), default=0)
        if complete:
            assert self.root is not None
            where.setdefault(self.root, ())
        else:
            yield from self._hold_back(where, now)
            if not where:
                return
        units = self._units(where)
        for unit in units:
            self.busy[self.hosts[unit.first]] = now + nbytes / self.cost.bandwidth
        total = len(units) + len(self.ends)
        # A reduction is a broadcast the other way round.
        degree = self.degree or self.cost.fan_out(nbytes, max(total - 1, 1))
        ends = list(self.ends) if complete or len(self.ends) >= degree else []
        below: list[list[int]] = [[] for _ in units]  # nodes that each unit takes from
        parents: list[int | None] = [None] * len(units)
        slots = deque([0] * degree)
        left = units[1:]
        for place in range(1, len(units)):
            parent = slots.popleft()
            index = self._next(left, units[parent].first)
            units[place] = left.pop(index)
            parents[place] = parent
            slots.extend([place] * degree)
        places = {self.hosts[unit.first]: place for place, unit in enumerate(units)}
        for end in reversed(ends):
            at_hand = places.get(self.hosts[self.nodes[end].worker])
            if at_hand is not None:  # on the same host, one more costs nothing
                below[at_hand].append(end)
            else:
                below[slots.popleft() if slots else 0].append(end)
        self.ends = [end for end in self.ends if end not in ends]
        for place in reversed(range(len(units))):
            told = self._climb(units[place], below[place], place == 0 and complete, now)
            yield from told
            parent_place = parents[place]
            if parent_place is None:
                self.ends.append(told[-1].node)
            else:
                below[parent_place].append(told[-1].node)

    def _hold_back(
        self, where: dict[str, tuple[Key, ...]], now: float
    ) -> Iterator[ReductionInstruction]:
        """Leave out what can still be combined with more of its host, at no loss.

        What the root has goes into the last node. A host whose link is busy with one sum gains
        nothing from another one, and there may be more operands until it is free.
        """
        if self.root is not None:
            where.pop(self.root, None)
        until = {worker: self.busy.get(self.hosts[worker], 0.0) for worker in where}
        held = [worker for worker in where if until[worker] > now]
        for worker in held:
            del where[worker]
        soonest = min((until[worker] for worker in held), default=0.0)
        if held and not now < self.wake <= soonest:
            self.wake = soonest
            yield Later(self.key, soonest - now)

    def _next(self, left: list[Unit], consumer: str) -> int:
        """The first of the units left that its consumer can take from, as far as is known."""
        for index, unit in enumerate(left):
            if frozenset((unit.last, consumer)) not in self.apart:
                return index
        return 0

    def _climb(self, unit: Unit, sources: list[int], final: bool, now: float) -> list[Combine]:
        """From one worker of a host to the next."""
        told: list[Combine] = []
        for worker, keys in unit.members:
            last = final and worker == unit.last
            told += self._add(worker, keys, sources, last, self._why(keys, sources, last), now)
            sources = [told[-1].node]
        return told

    def _why(self, keys: tuple[Key, ...], sources: list[int], last: bool) -> str:
        what = f"{len(keys)} operands ready here"
        behind = f", on top of {len(sources)} others" if sources else ""
        return what + behind + (", and the root" if last else "")

    def _append(
        self, fresh: list[Key], complete: bool, now: float
    ) -> Iterator[ReductionInstruction]:
        """Add operands in their order, whatever that costs."""
        runs: list[tuple[str, list[Key]]] = []
        for key in fresh:
            able = self._able(key)
            if runs and runs[-1][0] in able:
                runs[-1][1].append(key)
            else:
                runs.append((able[0], [key]))
        if complete and (not runs or runs[-1][0] != self.root):
            assert self.root is not None
            runs.append((self.root, []))
        for index, (worker, keys) in enumerate(runs):
            last = complete and index == len(runs) - 1
            told = self._add(worker, tuple(keys), self.ends, last, "in the order given", now)
            self.ends = [told[-1].node]
            yield from told

    def _rings(self, fresh: list[Key]) -> bool:
        """Whether a ring is faster than a tree to and fro."""
        where = self._where(fresh)
        if self.apart:
            return False  # its neighbours must reach each other
        if len({self.hosts[worker] for worker in where}) == 1:
            return False  # within a host, bytes need not be sent at all
        nbytes = max(self.nbytes(key) for key in fresh)
        return self.root in where and len(where) > 2 and self.cost.rings(nbytes, len(where))

    def _close_ring(self, fresh: list[Key], now: float) -> Iterator[ReductionInstruction]:
        """Let each worker combine its share, and tell the others."""
        where = self._where(fresh)
        workers = [worker for unit in self._units(where) for worker, _ in unit.members]
        numbers = [self.number() for _ in workers]
        for index, worker in enumerate(workers):
            node = Node(numbers[index], worker, where[worker], (), final=True, heard=now)
            before = index - 1
            self._take(node)
            yield self._combine(
                node,
                f"all {len(fresh)} are ready: each combines a share and passes it on",
                len(workers),
                sources=((workers[before], numbers[before]),),
                ring=len(workers),
                index=index,
            )
        for node in self.nodes.values():
            node.sources = (numbers[numbers.index(node.number) - 1],)
        self.ends = numbers

    def _add(
        self,
        worker: str,
        operands: tuple[Key, ...],
        sources: Iterable[int],
        final: bool,
        reason: str,
        now: float,
    ) -> list[Combine]:
        """A new node, behind others that pass on what its worker cannot take by itself."""
        told: list[Combine] = []
        taken: list[int] = []
        for number in sources:
            source = self.nodes[number]
            relay = self._relay(source.worker, worker)
            if relay is not None:
                why = f"{worker} could not take from {source.worker}"
                told += self._add(relay, (), [number], False, why, now)
                number = told[-1].node
            taken.append(number)
        height = 1 + max((self.nodes[number].height for number in taken), default=0)
        node = Node(self.number(), worker, operands, tuple(taken), final, heard=now, height=height)
        self._take(node)
        return [*told, self._combine(node, reason, height)]

    def _relay(self, source: str, worker: str) -> str | None:
        """Somebody who can reach both, if they do not reach each other."""
        if frozenset((source, worker)) not in self.apart:
            return None
        return min(
            (
                between
                for between in self.hosts
                if between not in (source, worker)
                and between not in self.suspects
                and between not in self.barred
                and frozenset((source, between)) not in self.apart
                and frozenset((between, worker)) not in self.apart
            ),
            key=lambda between: (self.failures[between], between),
            default=None,
        )

    def _take(self, node: Node) -> None:
        self.nodes[node.number] = node
        self.placed.update(node.operands)
        for key in node.operands:
            self.loose.pop(key, None)
            self.frontier = max(self.frontier, self.position[key] + 1)

    def _combine(
        self,
        node: Node,
        reason: str,
        hops: int,
        sources: tuple[tuple[str, int], ...] | None = None,
        ring: int = 0,
        index: int = 0,
    ) -> Combine:
        if sources is None:
            sources = tuple((self.nodes[n].worker, n) for n in node.sources)
        count = self.count if node.final else 0
        return Combine(
            self.key,
            node.worker,
            node.number,
            node.operands,
            sources,
            reason,
            count=count,
            hops=hops,
            ring=ring,
            index=index,
            common=self.common,
        )
