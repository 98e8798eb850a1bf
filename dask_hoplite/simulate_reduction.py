"""A discrete-event network that drives the real planner of reductions.

No decision is taken here: the :class:`~dask_hoplite.core.reduction.Reduction` is the one that runs
in Dask's scheduler. Modelled are workers that make sums of what they hold and of what comes from
others, their network (see :mod:`dask_hoplite.simulate`), and what Dask does about operands and the
root. ``python -m dask_hoplite.simulate --op reduce`` prints how near the plans come to the limit;
with ``--seeds``, it looks for a way to break them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from dask_hoplite.core import events
from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.instructions import (
    Ask,
    Combine,
    Done,
    Fail,
    Forget,
    Later,
    ReductionInstruction,
)
from dask_hoplite.core.reduction import Reduction
from dask_hoplite.core.watch import Watch
from dask_hoplite.simulate import CLOSE, KEY, LOCAL, Flow, Line, Link, Simulation, Worker

#: The kind of all operands, once they are not of one kind
COMMON = b"common"


class Fault(NamedTuple):
    """At ``time`` (s) something happens to a worker, for so many ``seconds``.

    The worker is a name, or what it does by then: "root", "streaming" (it has a sum that is half
    there), "merged" (it has made one of what others gave), "ready" (it holds an operand that is in
    no sum). "cut": it and an ``other`` one, or all others, cannot reach each other, and no
    connection is reset. "drop": a copy of an operand is dropped, if there are others. One that was
    killed may "join".
    """

    time: float
    kind: Literal["kill", "freeze", "cut", "drop", "join"]
    worker: str
    seconds: float = math.inf
    other: str = ""


@dataclass
class Result:
    """What came of it. Times are simulated seconds from the start."""

    #: "erred": Dask ended the task, whose operand is gone; "waits": for a worker that is frozen
    outcome: Literal["done", "failed", "erred", "waits", "hangs"]
    reason: str
    completion: float  #: when all had it who were to have it, or nan
    lower_bound: float
    contributors: tuple[str, ...]
    sums: int  #: how many were begun
    depth: int  #: of those, in a row
    ring: bool  #: whether it was made by one
    bytes_in: dict[str, float]  #: by host, over its network card
    bytes_out: dict[str, float]
    violations: list[str]  #: what must never happen, and did

    @property
    def ratio(self) -> float:
        """Completion over lower bound."""
        return self.completion / self.lower_bound


@dataclass(eq=False, slots=True)
class Place:
    """A worker, and what is on it."""

    name: str
    host: str
    alive: bool = True
    frozen: bool = False
    life: int = 0
    operands: set[str] = field(default_factory=set)
    sums: dict[int, Sum] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)
    held: defaultdict[int, list[Inlet]] = field(default_factory=lambda: defaultdict(list))
    unread: list[tuple[Callable[..., None], Any]] = field(default_factory=list)

    @property
    def up(self) -> bool:
        return self.alive and not self.frozen


@dataclass(eq=False, slots=True, kw_only=True)
class Sum(Worker):
    """A node at its worker. As a source of others, it is what a worker is in a broadcast."""

    place: Place
    told: Combine
    length: float  #: bytes that it gives
    ahead: float  #: of what comes in, in a ring
    inlets: list[Inlet] = field(default_factory=list)
    done: bool = False
    version: int = 0  #: of what is foreseen for it

    @property
    def up(self) -> bool:
        return self.place.up and self.place.sums.get(self.told.node) is self


@dataclass(eq=False, slots=True, kw_only=True)
class Inlet(Worker):
    """Where a node receives what comes from one of its sources."""

    sum: Sum
    source: str
    number: int
    part: Sum | None = None  #: all of what has come

    @property
    def up(self) -> bool:
        return self.sum.up


class ReductionSimulation(Simulation):
    """Workers, links and a clock around a plan. Parameters as for :func:`simulate_reduction`."""

    def __init__(
        self,
        nbytes: int,
        latency: float,
        granule: int,
        *,
        operands: Sequence[str],
        count: int,
        recomputed: float,
        odd: Iterable[str],
        allreduce: bool,
        spread: bool,
        rng: random.Random,
        **plan: Any,
    ):
        super().__init__(nbytes, latency, granule)
        self.rng = rng
        self.recomputed = recomputed
        self.odd = set(odd)
        self.allreduce = allreduce
        self.spread = spread
        self.places: dict[str, Place] = {}
        self.hosts: dict[str, str] = {}  # of workers that the scheduler knows
        self.holders: dict[str, dict[str, None]] = {operand: {} for operand in operands}
        self.gone: set[str] = set()
        self.computing = 0  # operands that will be ready
        self.all_needed = count == len(operands)
        self.operand_count = count
        self.root: str | None = None
        self.number = itertools.count(1).__next__
        self.plan = Reduction(
            KEY,
            operands,
            count,
            self.holders.__getitem__,
            self.hosts,
            lambda _: nbytes,
            self.number,
            ring=allreduce,
            **plan,
        )
        self.stall_timeout = self.plan.stall_timeout
        self.told: dict[int, Combine] = {}  # and not forgotten
        self.heights: dict[int, int] = {}
        self.sums: dict[int, Sum] = {}  # all that were begun
        self.cuts: set[frozenset[str]] = set()
        self.blocked: list[tuple[frozenset[str], Callable[..., None], Any]] = []
        self.spreading = 0  # workers that are still to get the result
        self.outcome: Literal["", "done", "failed", "erred"] = ""
        self.reason = ""
        self.contributors: tuple[str, ...] = ()
        self.completion = math.nan
        self.ring = False

    # The plan

    def decide(self, event: events.ReductionEvent) -> None:  # type: ignore[override]
        for told in self.plan.handle(event, self.now):
            self.perform(told)

    def perform(self, told: ReductionInstruction) -> None:
        if self.outcome and not isinstance(told, Forget):
            self.violations.append(f"{self.now}: {told} after the end")
        if isinstance(told, Combine):
            self.check(told)
            self.told[told.node] = told
            self.deliver(self.places[told.worker], self.combine, told)
            if told.count and not told.ring and self.allreduce and self.spread:
                self.spread_from(told)
        elif isinstance(told, Forget):
            if self.told.pop(told.node, None) is None:
                self.violations.append(f"{self.now}: {told}, who does not know it")
            self.deliver(self.places[told.worker], self.forget, told.node)
        elif isinstance(told, Later):
            self.at(self.now + told.seconds, self.decide, events.Due(KEY))
        elif isinstance(told, Ask):
            self.deliver(self.places[told.worker], self.tell_of, events.Returned)
        elif isinstance(told, Done):
            self.end_well(told)
        elif isinstance(told, Fail):
            self.outcome, self.reason = "failed", told.reason
            self.clear()

    def check(self, told: Combine) -> None:
        """See that a node may be as the plan says."""
        if told.node <= max(self.heights, default=0):
            self.violations.append(f"{told} has a number that was there")
        if told.worker not in self.hosts:
            self.violations.append(f"{told} for one who is not there")
        if told.ring:
            self.heights[told.node] = told.ring
        else:
            below = [self.heights[number] for _, number in told.sources]
            self.heights[told.node] = 1 + max(below, default=0)
        for worker, number in told.sources:
            source = self.told.get(number)
            if not told.ring and (source is None or source.worker != worker):
                self.violations.append(f"{told} takes from what is not there")
        if len(self.places) <= 40:  # it takes long
            users = Counter(n for each in self.told.values() for _, n in each.sources)
            users.update(number for _, number in told.sources)
            placed = Counter(key for each in self.told.values() for key in each.operands)
            placed.update(told.operands)
            for what, times in [*users.items(), *placed.items()]:
                if times > 1:
                    self.violations.append(f"{told}: {what} is used {times} times")

    def end_well(self, told: Done) -> None:
        """See that the result is what the plan says, and made of as much as was asked for."""
        self.outcome, self.contributors = "done", told.contributors
        finals = [each for each in self.told.values() if each.count]
        self.ring = any(each.ring for each in finals)
        for each in finals[:1]:  # if it is a ring, all have the same
            total = Counter(self.contents(self.sums[each.node]))
            if total != Counter(told.contributors) or len(total) != self.operand_count:
                self.violations.append(f"{told} of {dict(total)}")
        if not all(self.sums[each.node].done for each in finals):
            self.violations.append(f"{told}, but not all of it")
        if not finals or any(each.worker != self.root for each in finals if not each.ring):
            self.violations.append(f"{told}, but not on {self.root}")
        if not self.spreading:
            self.completion = max(self.sums[each.node].arrived for each in finals)
            self.clear()

    def contents(self, final: Sum) -> Iterator[str]:
        """The operands in a sum, as often as they are."""
        ahead = [final]
        while ahead:
            total = ahead.pop()
            yield from total.told.operands
            if total.told.common != final.told.common:
                self.violations.append(f"{total.told} is of another kind than {final.told}")
            if not total.told.ring:
                ahead += [inlet.part for inlet in total.inlets if inlet.part is not None]
            elif total.told.sources[0][1] != final.told.node:
                ahead.append(self.sums[total.told.sources[0][1]])

    def clear(self) -> None:
        """As the scheduler does: let all workers forget what the plan has not let them forget."""
        for number in self.plan.nodes:
            if (told := self.told.pop(number, None)) is not None:
                self.deliver(self.places[told.worker], self.forget, number)
        self.stop_spreading()

    def stop_spreading(self) -> None:
        self.spreading = 0
        for number, told in [(n, told) for n, told in self.told.items() if n < 0]:
            del self.told[number]
            self.deliver(self.places[told.worker], self.forget, number)

    # Messages

    def deliver(self, place: Place, action: Callable[..., None], *args: Any) -> None:
        """Let something happen at a worker, as soon as it has read of it."""
        self.later(self.arrive_at, place, place.life, action, args)

    def arrive_at(
        self, place: Place, life: int, action: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if place.alive and place.life == life:
            if place.frozen:
                place.unread.append((self.arrive_at, (place, life, action, args)))
            else:
                action(place, *args)

    def tell_of(self, place: Place, kind: Callable[..., events.ReductionEvent], *of: Any) -> None:
        """A worker reports something."""
        self.later(self.decide, kind(KEY, place.name, *of))

    def reach(self, one: str, other: str, action: Callable[..., None], *args: Any) -> None:
        """Send something from worker to worker, if they reach each other."""
        pair = frozenset((one, other))
        if pair in self.cuts:
            self.blocked.append((pair, action, args))
        else:
            self.later(action, *args)

    # Nodes

    def combine(self, place: Place, told: Combine) -> None:
        """Make a node."""
        if not place.operands.issuperset(told.operands):
            self.tell_of(place, events.Missing, told.node, "it was dropped")
            return
        if self.odd.intersection(told.operands) and not told.common:
            self.tell_of(place, events.Promoted, told.node, COMMON)
            return
        share = self.nbytes / told.ring if told.ring else 0.0
        length = self.nbytes * 2 - 2 * share if told.ring else self.nbytes
        total = Sum(place.name, place.host, place=place, told=told, length=length, ahead=share)
        place.sums[told.node] = self.sums[told.node] = total
        for source, number in told.sources:
            inlet = Inlet(place.name, place.host, sum=total, source=source, number=number)
            total.inlets.append(inlet)
        self.at(self.now + self.stall_timeout, self.report, total)
        total.line = Line(self.now, total.ahead, 0.0)
        if not told.sources:
            self.make(total)
        for inlet in total.inlets:
            self.take(inlet)
        for inlet in place.held.pop(told.node, []):
            self.connect(inlet, total)

    def take(self, inlet: Inlet) -> None:
        """Ask a source for its bytes."""
        if inlet.sum.up and inlet.flow is None and inlet.part is None:
            self.reach(inlet.name, inlet.source, self.request, inlet, inlet.sum.place.life)

    def request(self, inlet: Inlet, life: int) -> None:
        """A request has come to its source, or into its kernel if it is frozen."""
        place = self.places[inlet.source]
        if inlet.sum.place.sums.get(inlet.sum.told.node) is not inlet.sum:
            pass  # it has been forgotten meanwhile
        elif not place.alive:
            self.refuse(inlet, False, "refused")
        elif place.frozen:
            place.unread.append((self.request, (inlet, life)))
        elif inlet.number in place.sums:
            self.connect(inlet, place.sums[inlet.number])
        elif inlet.number in place.forgotten:
            self.refuse(inlet, True, "given up")
        else:
            place.held[inlet.number].append(inlet)
            self.at(self.now + self.stall_timeout, self.tire, place, inlet)

    def tire(self, place: Place, inlet: Inlet) -> None:
        """Hold a request back no longer."""
        if place.frozen:
            place.unread.append((self.tire, (place, inlet)))
        elif inlet in place.held.get(inlet.number, []):
            place.held[inlet.number].remove(inlet)
            self.refuse(inlet, True, "not here")

    def refuse(self, inlet: Inlet, gone: bool, reason: str) -> None:
        self.reach(inlet.source, inlet.name, self.fail, inlet, gone, reason)

    def fail(self, inlet: Inlet, gone: bool, reason: str) -> None:
        """A node learns that it cannot get on with a source."""
        place = inlet.sum.place
        if place.alive and place.frozen:
            place.unread.append((self.fail, (inlet, gone, reason)))
        elif inlet.sum.up and inlet.part is None:
            self.close(inlet)
            node = inlet.sum.told.node
            if node > 0:
                self.tell_of(place, events.Broken, node, inlet.number, reason, gone)
            self.at(self.now + self.stall_timeout, self.take, inlet)

    def connect(self, inlet: Inlet, source: Sum) -> None:
        """Bytes begin to flow."""
        links: tuple[Link, ...] = ()
        lag = 0.0
        if inlet.host != source.host:
            links = self.links[source.host][0], self.links[inlet.host][1]
            lag = self.latency
        if not source.done:
            lag += self.granule / min((link.capacity for link in links), default=LOCAL)
        have = int(inlet.line.at(self.now))
        watch = Watch(self.stall_timeout, None, have, self.now)
        inlet.flow = Flow(source, inlet, links, lag, self.now, have, watch)
        source.readers[inlet.flow] = None
        self.bend(inlet.flow, source.line)

    def report(self, total: Sum) -> None:
        """Now and then, a node says how far it is."""
        place = total.place
        if not total.done and place.alive and place.sums.get(total.told.node) is total:
            if not place.frozen:
                self.say(total)
            self.at(self.now + self.stall_timeout, self.report, total)

    def say(self, total: Sum) -> None:
        if total.told.node > 0:
            received = tuple(int(inlet.line.at(self.now) + CLOSE) for inlet in total.inlets)
            made = int(min(total.line.at(self.now) + CLOSE, total.length))
            self.tell_of(total.place, events.Combining, total.told.node, received, made)

    def make(self, total: Sum) -> None:
        """A node is done."""
        total.done, total.arrived = True, self.now
        total.line = Line(self.now, total.length, 0.0)
        node = total.told.node
        if node > 0:
            self.tell_of(total.place, events.Combined, node, 0.0, int(total.length))
        else:
            self.spreading -= 1
            if not self.spreading and self.outcome == "done":
                self.completion = self.now
                self.clear()

    def forget(self, place: Place, number: int) -> None:
        """Stop to make and to serve a node."""
        place.forgotten.add(number)
        total = place.sums.pop(number, None)
        for inlet in place.held.pop(number, []):
            self.refuse(inlet, True, "given up")
        if total is not None:
            self.shut(total, True, "given up")

    def shut(self, total: Sum, gone: bool, reason: str) -> None:
        for inlet in total.inlets:
            self.close(inlet)
        for flow in list(total.readers):
            assert isinstance(flow.receiver, Inlet)
            self.dirty[flow] = None
            self.refuse(flow.receiver, gone, reason)

    def spread_from(self, final: Combine) -> None:
        """Let all who contribute have the result as it grows, in a row through all hosts."""
        self.stop_spreading()  # what was made before comes to nothing
        workers = {told.worker for told in self.told.values() if told.operands} - {final.worker}
        host = self.hosts[final.worker]
        before = final.worker, final.node
        for worker in sorted(workers, key=lambda w: (self.hosts[w] != host, self.hosts[w], w)):
            self.spreading += 1
            number = -next(self.count)
            told = Combine(KEY, worker, number, (), (before,), "", common=final.common)
            self.told[told.node] = told
            self.deliver(self.places[worker], self.combine, told)
            before = worker, told.node

    # Operands and the root, as Dask sees to them

    def compute(self, operand: str, name: str) -> None:
        """An operand is there, on a worker or, if that has left, on another one."""
        if name not in self.hosts:
            if not self.hosts:
                self.at(self.now + 1.0, self.compute, operand, name)
                return
            name = self.rng.choice(list(self.hosts))
        place = self.places[name]
        if not place.up:  # its task will run somewhere else, or later
            self.at(self.now + 0.5, self.compute, operand, self.rng.choice(list(self.hosts)))
            return
        place.operands.add(operand)
        self.later(self.appear, operand, place, place.life)

    def appear(self, operand: str, place: Place, life: int) -> None:
        if place.name not in self.hosts or place.life != life:
            self.computing += 1
            self.lose(operand)
            return
        self.computing -= 1
        self.holders[operand][place.name] = None
        if self.rng.random() < 0.5:
            self.seek_root()
            self.decide(events.Ready(KEY, operand))
        else:
            self.decide(events.Ready(KEY, operand))
            self.seek_root()

    def lose(self, operand: str) -> None:
        """There is no copy of an operand any more, though its last one was (still) counted."""
        self.computing -= 1
        if self.all_needed and self.root is not None:
            self.root = None
            self.decide(events.Rooted(KEY, None))
        if self.rng.random() < self.recomputed:
            self.computing += 1
            self.at(self.now + self.rng.expovariate(1.0), self.compute, operand, "")
        else:
            self.gone.add(operand)
            self.decide(events.Gone(KEY, operand, "its worker left"))
            if self.all_needed and not self.outcome:
                self.outcome, self.reason = "erred", f"{operand} is gone"
                self.plan.over = True
                self.clear()

    def seek_root(self) -> None:
        """Run the task that is to have the result."""
        ready = not self.all_needed or all(self.holders.values())
        if self.root is None and ready and self.hosts and not self.outcome:
            able = [worker for worker in self.hosts if self.places[worker].up]
            if not able or self.rng.random() < 0.02:
                able = list(self.hosts)
            if self.rng.random() < 0.8:
                held = {worker for workers in self.holders.values() for worker in workers}
                able = [worker for worker in able if worker in held] or able
            self.root = self.rng.choice(able)
            self.decide(events.Rooted(KEY, self.root))

    def bury(self, place: Place) -> None:  # type: ignore[override]
        """The scheduler learns that a worker is dead."""
        worker = place.name
        if self.hosts.pop(worker, None) is None:
            return
        lost = []
        for operand, holders in self.holders.items():
            if worker in holders:
                del holders[worker]
                if not holders:
                    lost.append(operand)
        steps: list[Callable[[], None]] = [
            lambda: self.decide(events.WorkerLeft(worker)),
            *(lambda operand=operand: self.lose_again(operand) for operand in lost),  # type: ignore[misc]
        ]
        if self.rng.random() < 0.5:
            steps.reverse()
        if self.root == worker:
            self.root = None
            at = self.rng.choice([0, len(steps)])
            steps.insert(at, lambda: self.decide(events.Rooted(KEY, None)))
        for step in steps:
            step()
        self.seek_root()

    def lose_again(self, operand: str) -> None:
        self.computing += 1
        self.lose(operand)

    # Faults

    def choose(self, fault: Fault) -> Place | None:
        """The worker to which something happens."""
        if fault.worker in self.places:
            return self.places[fault.worker]
        if fault.worker == "root":
            return self.places[self.root] if self.root is not None else None
        found = []
        for place in self.places.values():
            sums = place.sums.values()
            if fault.worker == "streaming":
                able = any(not each.done and each.line.at(self.now) > 0 for each in sums)
            elif fault.worker == "merged":
                able = any(each.done and each.inlets for each in sums)
            else:
                able = bool(place.operands) and not sums
            if able and place.up:
                found.append(place)
        return self.rng.choice(found) if found else None

    def suffer(self, fault: Fault) -> None:  # type: ignore[override]
        place = self.choose(fault)
        if place is None or self.outcome:
            return
        if fault.kind == "join" and place.name not in self.hosts:
            place.alive, place.frozen = True, False
            self.later(self.join, place)
        elif fault.kind == "kill" and place.alive and place.name in self.hosts:
            self.kill(place)
        elif fault.kind == "freeze" and place.up:
            self.freeze_place(place, True)
            self.at(self.now + fault.seconds, self.thaw, place, place.life)
        elif fault.kind == "cut":
            for other in [fault.other] if fault.other else list(self.places):
                if other != place.name:
                    self.cut(frozenset((place.name, other)), fault.seconds)
        elif fault.kind == "drop":
            for operand in sorted(place.operands):
                if len(self.holders[operand]) > 1 and place.name in self.holders[operand]:
                    place.operands.discard(operand)
                    self.later(self.holders[operand].pop, place.name, None)
                    break

    def join(self, place: Place) -> None:
        if place.alive:
            self.hosts[place.name] = place.host
            self.seek_root()

    def kill(self, place: Place) -> None:
        sums, held = list(place.sums.values()), place.held
        place.alive = place.frozen = False
        place.life += 1
        place.operands.clear()
        place.sums.clear()
        place.forgotten.clear()
        place.unread.clear()
        place.held = defaultdict(list)
        for total in sums:
            self.shut(total, False, "connection reset")
        for inlet in itertools.chain.from_iterable(held.values()):
            self.refuse(inlet, False, "connection reset")
        self.at(self.now + 2 * self.latency, self.bury, place)

    def freeze_place(self, place: Place, frozen: bool) -> None:
        place.frozen = frozen
        for total in place.sums.values():
            self.dirty.update(total.readers)
            self.dirty.update((inlet.flow, None) for inlet in total.inlets if inlet.flow)

    def thaw(self, place: Place, life: int) -> None:
        if not place.alive or place.life != life or not place.frozen:
            return
        self.freeze_place(place, False)
        unread, place.unread = place.unread, []
        first = self.rng.random() < 0.5
        if first:
            self.say_all(place)
        for action, args in unread:
            action(*args)
        if not first:
            self.say_all(place)

    def say_all(self, place: Place) -> None:
        """Timers that are overdue go off at once."""
        for total in place.sums.values():
            if not total.done:
                self.say(total)

    def cut(self, pair: frozenset[str], seconds: float) -> None:
        self.cuts.add(pair)
        self.touch(pair)
        if seconds < math.inf:
            self.at(self.now + seconds, self.mend, pair)

    def mend(self, pair: frozenset[str]) -> None:
        self.cuts.discard(pair)
        self.touch(pair)
        through = [each for each in self.blocked if each[0] == pair]
        self.blocked = [each for each in self.blocked if each[0] != pair]
        for _, action, args in through:
            self.later(action, *args)

    def touch(self, pair: frozenset[str]) -> None:
        for worker in pair:
            for total in self.places[worker].sums.values():
                self.dirty.update((inlet.flow, None) for inlet in total.inlets if inlet.flow)

    # The fluid

    def close(self, worker: Worker) -> None:
        """End what comes in from a source."""
        flow = worker.flow
        if flow is not None:
            self.draw(flow, int(worker.line.at(self.now) + CLOSE), 0.0)
            worker.flow = None
            flow.source.readers.pop(flow, None)
            self.dirty[flow] = None

    def demand(self, flow: Flow) -> float:
        if self.cuts and frozenset((flow.source.name, flow.receiver.name)) in self.cuts:
            return 0.0
        return super().demand(flow)

    def forecast(self, flow: Flow) -> None:
        """As of a broadcast, but streams have lengths of their own."""
        assert isinstance(flow.receiver, Inlet)
        whole, self.nbytes = self.nbytes, flow.receiver.sum.length  # type: ignore[assignment]
        super().forecast(flow)
        self.nbytes = whole

    def draw(self, flow: Flow, have: float, rate: float) -> None:
        super().draw(flow, have, rate)
        assert isinstance(flow.receiver, Inlet)
        self.form(flow.receiver.sum)

    def form(self, total: Sum) -> None:
        """Draw the line of a node: as far as all sources have come."""
        if total.done or not total.inlets:
            return
        now, lines = self.now, [inlet.line for inlet in total.inlets]
        have = min(line.at(now) for line in lines)
        rate = min(line.rate for line in lines if line.at(now) <= have + CLOSE)
        new, old = Line(now, have + total.ahead, rate), total.line
        total.line = new
        if rate != old.rate or abs(old.at(now) - new.nbytes) > CLOSE:
            for flow in total.readers:
                self.bend(flow, new)
        # Those that are ahead and slower will be what it waits for.
        meet = [
            (line.at(now) - have) / (rate - line.rate)
            for line in lines
            if line.at(now) > have + CLOSE and line.rate < rate
        ]
        total.version += 1
        if meet:
            self.at(now + min(meet), self.form_again, total, total.version)

    def form_again(self, total: Sum, version: int) -> None:
        if total.version == version:
            self.form(total)

    def finish(self, flow: Flow) -> None:
        """All bytes of a source are there."""
        inlet, source = flow.receiver, flow.source
        assert isinstance(inlet, Inlet) and isinstance(source, Sum)
        total = inlet.sum
        self.draw(flow, total.length, 0.0)
        inlet.flow, inlet.part = None, source
        source.readers.pop(flow, None)
        self.dirty[flow] = None
        if source.line.at(self.now) < total.length - 1:
            self.violations.append(f"{self.now}: {total.told} has more than there is")
        if all(each.part is not None for each in total.inlets):
            self.make(total)

    # The end

    def verdict(self) -> Literal["done", "failed", "erred", "waits", "hangs"]:
        """What came of it; if nothing did, whether that must be."""
        if self.outcome:
            return self.outcome
        up = {worker for worker in self.hosts if self.places[worker].up}
        able = [key for key, holders in self.holders.items() if up & holders.keys()]
        frozen = [key for key, holders in self.holders.items() if holders and key not in able]
        if not self.hosts or (self.root is not None and self.root not in up):
            return "waits"
        if self.cuts and len(up) < 4:
            return "waits"
        return "waits" if frozen and len(able) < self.operand_count else "hangs"

    def audit(self) -> Iterator[str]:
        """What must not be so at the end, and is."""
        verdict = self.verdict()
        if verdict == "hangs":
            yield f"hangs with {len(self.told)} nodes, root {self.root}, {self.computing} to come"
        if self.outcome == "done" and math.isnan(self.completion):
            yield f"{self.spreading} never got the result"
        if self.outcome == "failed" and not (self.gone or self.cuts or self.plan.barred):
            yield f"failed, though nothing is gone: {self.reason}"
        if self.outcome == "failed" and not self.reason:
            yield "failed without a reason"
        for place in self.places.values():
            if place.up and self.outcome and place.sums:
                yield f"left at {place.name}: {[each.told for each in place.sums.values()]}"
        for told in self.told.values() if self.outcome else ():
            yield f"never forgotten: {told}"


def simulate_reduction(
    workers: int = 1024,
    nbytes: int = 2**30,
    bandwidth: float = 1.25e9,
    latency: float = 1e-4,
    *,
    op: Literal["reduce", "allreduce"] = "reduce",
    per_host: int = 1,
    each: int = 1,
    idle: int = 0,
    copies: int = 1,
    count: int | None = None,
    arrivals: Literal["together"] | float | Sequence[float] = "together",
    ordered: bool = False,
    degree: int | None = None,
    faults: Sequence[Fault] = (),
    recomputed: float = 1.0,
    odd: Iterable[int] = (),
    seed: int = 0,
    granule: int = 16 * 2**10,
    stall_timeout: float = 1.5,
    cost: CostModel | None = None,
) -> Result:
    """Combine operands of many workers.

    Parameters
    ----------
    workers : int
        Those that hold operands: ``w0``, ``w1``, ... on the hosts ``host0``, ``host1``, ...
    nbytes : int
        Size of each operand and of the result, at least 1.
    bandwidth : float
        Bytes per second of each host's network card, in each direction.
    latency : float
        Seconds, more than 0, that any message takes one way, and the first byte of a hop.
    op : "reduce" or "allreduce"
        Whether one has the result, or all who contribute. If the plan is no ring, the result goes
        on while it grows, in a row through all of them; but not if there are faults: then it is
        over when the root has it.
    per_host : int
        Workers on one host.
    each : int
        Operands of each worker: ``x0``, ``x1``, ...
    idle : int
        Workers without operands.
    copies : int
        Workers that hold each operand.
    count : int, optional
        How many operands go into the result: the first. Default: all.
    arrivals : "together", float or sequence of float
        Seconds over which the operands become ready, in random order; or when each one does.
    ordered : bool
        Whether they are combined in their order. Then all are.
    degree : int, optional
        From how many others a node takes. Default: as the cost model recommends.
    faults : sequence of Fault
        What goes wrong, and when.
    recomputed : float
        With which probability an operand that is lost will be there again, somewhere else.
    odd : iterable of int
        Operands of another item size than the others.
    seed : int
        For all that is random.
    granule : int
        Bytes that a worker has to have before it sends them on.
    stall_timeout : float
        Seconds after which a node says how far it is.
    cost : CostModel, optional
        The plan's; the usual one by default.

    Returns
    -------
    Result
        Its ``lower_bound`` is when the last of the operands was ready that were to go into it, plus
        what each link has to carry: all of an object over one link, or 2·(n-1)/n of it over each
        link of n hosts for "allreduce"; plus ``latency``.

    Raises
    ------
    ValueError
        If there is nothing to combine, or messages take no time.
    """
    if nbytes < 1 or latency <= 0 or workers < 1:
        raise ValueError(f"workers={workers}, nbytes={nbytes} and latency={latency} are not enough")
    rng = random.Random(seed)
    operands = [f"x{i}" for i in range(workers * each)]
    count = len(operands) if count is None else count
    sim = ReductionSimulation(
        nbytes,
        latency,
        granule,
        operands=operands,
        count=count,
        recomputed=recomputed,
        odd=[f"x{i}" for i in odd],
        allreduce=op == "allreduce",
        spread=not faults,
        rng=rng,
        ordered=ordered,
        degree=degree,
        stall_timeout=stall_timeout,
        cost=replace(cost) if cost is not None else None,
    )
    for i in range(workers + idle):
        place = Place(f"w{i}", f"host{i // per_host}")
        sim.places[place.name] = place
        sim.hosts[place.name] = place.host
        sim.links.setdefault(place.host, (Link(bandwidth, bandwidth), Link(bandwidth, bandwidth)))
    if isinstance(arrivals, Sequence) and not isinstance(arrivals, str):
        times = list(arrivals)
    else:
        span = arrivals if isinstance(arrivals, int | float) else 0.0
        times = [rng.uniform(0, span) for _ in operands]
    if not sim.all_needed:
        sim.at(0.0, sim.seek_root)
    for index, (operand, when) in enumerate(zip(operands, times, strict=True)):
        for copy in range(min(copies, workers)):
            sim.computing += 1
            sim.at(when, sim.compute, operand, f"w{(index // each + copy) % workers}")
    for fault in faults:
        sim.at(fault.time, sim.suffer, fault)
    last = max([0.0, *times, *(f.time + min(f.seconds, 1000) for f in faults)])
    once = nbytes / bandwidth
    sim.run(last + 60 * stall_timeout + (4 + 2 * len(faults)) * once * max(4, 2 * (degree or 1)))
    kth = sorted(times)[count - 1]
    among = {f"host{int(key[1:]) // each // per_host}" for key in sim.contributors or operands}
    if sim.root is not None:
        among.add(sim.places[sim.root].host)
    share = 2 * (len(among) - 1) / len(among) if op == "allreduce" else float(len(among) > 1)
    return Result(
        outcome=sim.verdict(),
        reason=sim.reason,
        completion=sim.completion,
        lower_bound=kth + (share * once or nbytes / LOCAL) + latency,
        contributors=sim.contributors,
        sums=len(sim.sums),
        depth=max(sim.heights.values(), default=0),
        ring=sim.ring,
        bytes_in={host: down.carried for host, (_, down) in sim.links.items()},
        bytes_out={host: up.carried for host, (up, _) in sim.links.items()},
        violations=[*sim.violations, *sim.audit()],
    )


def scenario(seed: int, *, faults: bool = True) -> dict[str, Any]:
    """Random arguments for :func:`simulate_reduction`, in which much goes wrong."""
    rng = random.Random(f"reduction {seed}")  # unlike the one of the simulation
    workers, nbytes = int(2 ** rng.uniform(1, 8)), int(2 ** rng.uniform(4, 31))
    bandwidth, latency = 10 ** rng.uniform(7, 10), 10 ** rng.uniform(-5, -2)
    each = rng.choice([1, 1, 1, 2, 3])
    operands = workers * each
    once = nbytes / bandwidth + (10 + 2 * workers) * latency
    span = rng.choice([0.0, 0.0, rng.uniform(0, 2 * once)])
    late = rng.choice([0.0, 0.0, rng.uniform(0, 0.2)])  # this share comes later
    times = [rng.uniform(0, span) + (once if rng.random() < late else 0.0) for _ in range(operands)]
    if rng.random() < 0.2:
        times = [10 * latency * rng.randrange(4) for _ in range(operands)]  # in bursts
    op = rng.choice(["reduce", "reduce", "allreduce"])
    if op == "allreduce" and rng.random() < 0.6:
        times = [0.0] * operands
    count = operands if rng.random() < 0.6 else rng.randint(1, operands)
    names = [f"w{i}" for i in range(workers)]
    whom = ["root", "streaming", "merged", "ready"]
    suffered: list[Fault] = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        victim = rng.choice(whom) if rng.random() < 0.6 else rng.choice(names)
        begin, choice = rng.uniform(0, 1.5 * once + max(times)), rng.random()
        seconds = rng.choice([math.inf, rng.uniform(0, 8)])
        if choice < 0.45:
            suffered.append(Fault(begin, "kill", victim))
            if rng.random() < 0.3:  # two at once
                suffered.append(Fault(begin, "kill", rng.choice(whom)))
            if victim in names and rng.random() < 0.4:
                suffered.append(Fault(begin + rng.uniform(0, 3), "join", victim))
        elif choice < 0.75:
            suffered.append(Fault(begin, "freeze", victim, seconds))
        elif choice < 0.9:
            other = rng.choice(names) if rng.random() < 0.8 else ""
            suffered.append(Fault(begin, "cut", victim, seconds, other))
        else:
            suffered.append(Fault(begin, "drop", victim))
    return {
        "workers": workers,
        "nbytes": nbytes,
        "bandwidth": bandwidth,
        "latency": latency,
        "op": op,
        "per_host": rng.randint(1, 4),
        "each": each,
        "idle": rng.choice([0, 0, 1, 5]),
        "copies": rng.choice([1, 1, 2]),
        "count": count,
        "arrivals": times,
        "ordered": count == operands and rng.random() < 0.3,
        "degree": rng.choice([None, None, None, 1, 2, 3, 8]),
        "faults": suffered if faults else [],
        "recomputed": rng.choice([0.0, 0.5, 1.0, 1.0]),
        "odd": [rng.randrange(operands)] if rng.random() < 0.1 else [],
        "cost": CostModel(latency=latency, bandwidth=bandwidth),
        "seed": seed,
    }


def explore(seeds: Iterable[int], faults: bool) -> int:
    """Run random scenarios, until one shows a violation."""
    ends: Counter[str] = Counter()
    ratio = delay = (0.0, 0)
    for seed in seeds:
        given = scenario(seed, faults=faults)
        result = simulate_reduction(**given)
        ends[result.outcome] += 1
        if result.violations:
            print(f"seed {seed}:", *result.violations[:10], sep="\n")
            return 1
        # Those to whom something happens take as long as they take; so do odd plans.
        if not given["faults"] and given["degree"] is None and not given["ordered"]:
            ratio = max(ratio, (result.ratio, seed))
            delay = max(delay, (result.completion - result.lower_bound, seed))
    print(f"{ends.total()} scenarios without a violation: {dict(ends)}")
    print(f"At worst, an undisturbed one was done at {ratio[0]:.3f} x the lower bound")
    print(f"(seed {ratio[1]}), and {delay[0]:.3f} s after it (seed {delay[1]})")
    return 0
