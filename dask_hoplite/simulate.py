"""A discrete-event network that drives the real core: one object, thousands of workers.

No decision is taken here: the :class:`~dask_hoplite.core.directory.Directory` is the one that runs
in Dask's scheduler. Modelled is what it cannot see: links with a rate, messages that take time, and
workers that die, freeze, return or come late. ``python -m dask_hoplite.simulate`` prints how near
the trees come to the limit; with ``--seeds``, it looks for a way to break them.

Notes
-----
Bytes are a fluid. What a worker has is a :class:`Line` over time that is straight until some rate
changes, and events happen only then. A relay cannot send what it does not have: the line of a child
stays below its *ceiling*, the line of its source one lag ago. When a source's line bends, the child
is told one lag later, when that bend is the present of its ceiling; so no history is kept.

Flows on a link get equal shares, not counting those that wait for their source; where there are
few, what one cannot use, since its other link is narrower, goes to the others. Max-min fairness
never gives a flow less, so times here err on the slow side; where one link is the bottleneck, as in
chains and stars, both are the same.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from dask_hoplite.core import events
from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.directory import Directory
from dask_hoplite.core.instructions import Cancel, Instruction, NoSource, Pull, Wait
from dask_hoplite.core.watch import Watch

KEY = "object"
LOCAL = 1e10  #: bytes per second between workers of one host, which takes no link
CLOSE = 0.01  #: bytes; lines that are nearer than this have met
FEW = 8  #: flows on a link, among which it is shared exactly


class Fault(NamedTuple):
    """At ``time`` (s) something happens to a worker; to the object, in case of "release".

    "slow" is its host, at a tenth of the usual rate, until it is "fast" again. A worker that is to
    "join" is not there before; one that was killed may join again.
    """

    time: float
    kind: Literal["kill", "freeze", "return", "join", "slow", "fast", "release"]
    worker: str = ""


class Segment(NamedTuple):
    """Bytes ``first`` to ``stop`` of the object, as they went from one worker to another."""

    source: str
    receiver: str
    first: int
    stop: int
    begun: float
    ended: float


@dataclass
class Result:
    """What came of it. Times are simulated seconds from the start."""

    finished: dict[str, float]  #: when each receiver had the whole object
    failed: dict[str, str]  #: why each of the others gave up
    lower_bound: float
    bytes_in: dict[str, float]  #: by host, over its network card
    bytes_out: dict[str, float]
    transfers: list[Segment]
    depth: int  #: hops from a complete copy to the furthest receiver
    violations: list[str]  #: what must never happen, and did

    @property
    def completion(self) -> float:
        """When the last receiver had the object, or nan."""
        return max(self.finished.values(), default=math.nan)

    @property
    def ratio(self) -> float:
        """Completion over lower bound."""
        return self.completion / self.lower_bound


class Line(NamedTuple):
    """A number of bytes that grows at a rate."""

    time: float
    nbytes: float
    rate: float

    def at(self, time: float) -> float:
        return self.nbytes + self.rate * (time - self.time)


NOTHING = Line(0.0, 0.0, 0.0)


@dataclass(eq=False, slots=True)
class Link:
    """One direction of a host's network card."""

    capacity: float
    usual: float
    flows: dict[Flow, None] = field(default_factory=dict)  # those that could send now
    carried: float = 0.0


@dataclass(eq=False, slots=True)
class Worker:
    """A worker as others see it."""

    name: str
    host: str
    state: Literal["absent", "receiving", "whole", "failed", "dead"] = "absent"
    frozen: bool = False
    arrived: float = 0.0
    line: Line = NOTHING
    flow: Flow | None = None  #: what it receives
    readers: dict[Flow, None] = field(default_factory=dict)  #: what it serves
    epoch: int = 0
    unread: list[tuple[Callable[..., None], Any]] = field(default_factory=list)  #: while frozen

    @property
    def up(self) -> bool:
        return self.state not in ("absent", "dead") and not self.frozen


@dataclass(eq=False, slots=True)
class Flow:
    """One pull, from the request on."""

    source: Worker
    receiver: Worker
    links: tuple[Link, ...]
    lag: float
    begun: float
    first: int
    watch: Watch
    said: Callable[..., events.Event] = events.Lagging  #: what the receiver said last of its rate
    ceiling: Line = NOTHING
    answered: float | None = None  #: time of the first byte
    version: int = 0  #: of what is foreseen for it


class Simulation:
    """Workers, links and a clock around a directory. Parameters as for :func:`simulate`."""

    def __init__(self, nbytes: int, latency: float, granule: int, **directory: Any):
        self.nbytes, self.latency, self.granule = nbytes, latency, min(granule, nbytes)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], Any]] = []
        self.count = itertools.count()
        self.dirty: dict[Flow, None] = {}  # flows to settle
        self.workers: dict[str, Worker] = {}
        self.links: dict[str, tuple[Link, Link]] = {}  # up and down, by host
        self.known: dict[str, None] = {}  # complete copies that Dask's scheduler knows of
        self.directory = Directory(lambda _: self.known, **directory)
        self.finished: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.transfers: list[Segment] = []
        self.violations: list[str] = []
        self.depth = 0

    # The clock

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (time, next(self.count), action, args))

    def later(self, action: Callable[..., None], *args: Any) -> None:
        """What happens when a message arrives that is sent now."""
        self.at(self.now + self.latency, action, *args)

    def run(self, horizon: float) -> None:
        while self.queue and self.queue[0][0] <= horizon:
            self.now = self.queue[0][0]
            while self.queue and self.queue[0][0] == self.now:
                _, _, action, args = heapq.heappop(self.queue)
                action(*args)
            self.settle()

    # The directory

    def decide(self, event: events.Event) -> None:
        asking = getattr(event, "receiver", None)
        for told in self.directory.handle(event, self.now):
            worker = self.workers[told.receiver]
            if isinstance(told, Pull):
                row = self.directory.trees[KEY].transfers[told.receiver]
                self.depth = max(self.depth, row.depth)
            elif isinstance(told, NoSource) and worker.state == "receiving":
                # Nothing tells the directory that a source which failed came back.
                able = [w for w in self.known if self.workers[w].up and w not in told.tried]
                if able:
                    self.violations.append(f"{self.now}: {told}, in spite of {able}")
            # As in Dask, who does not ask is not told, except to stop.
            if told.receiver == asking or isinstance(told, Cancel):
                self.later(self.obey, told, worker.arrived)
        if len(self.workers) <= 300:  # it takes long
            self.violations += [f"{self.now}: {cycle}" for cycle in cycles(self.directory)]

    # Receivers

    def arrive(self, worker: Worker) -> None:
        worker.state, worker.arrived, worker.line = "receiving", self.now, NOTHING
        self.finished.pop(worker.name, None)
        self.later(self.decide, events.WorkerJoined(worker.name, worker.host))
        wanted = events.Wanted(KEY, worker.name, self.nbytes, expected=len(self.workers))
        self.later(self.decide, wanted)

    def tell(self, kind: Callable[..., events.Event], worker: Worker, *details: Any) -> None:
        have = int(worker.line.at(self.now))
        self.later(self.decide, kind(KEY, worker.name, worker.epoch, have, *details))

    def obey(self, told: Instruction, life: float) -> None:
        worker = self.workers[told.receiver]
        if life != worker.arrived:
            pass  # it was meant for one that has died since, at another address
        elif worker.frozen:
            worker.unread.append((self.obey, (told, life)))
        elif worker.state != "receiving":
            pass  # it has crossed with the end
        elif isinstance(told, NoSource | Cancel):
            self.give_up(worker, told.reason)
        elif isinstance(told, Wait):
            self.stay(worker, told)
        elif isinstance(told, Pull) and told.epoch > worker.epoch:
            worker.epoch = told.epoch
            self.pull(worker, self.workers[told.source], told.rate)

    def stay(self, worker: Worker, told: Wait) -> None:
        flow = worker.flow
        if flow is None or told.epoch != worker.epoch:
            pass
        elif told.rate and flow.watch.expect(told.rate):
            flow.said = events.Lagging
            self.repeat(flow)
        elif told.again:
            self.at(self.now + told.again, self.repeat, flow)

    def pull(self, worker: Worker, source: Worker, rate: float | None) -> None:
        self.close(worker)
        links: tuple[Link, ...] = ()
        if worker.host != source.host:
            links = self.links[source.host][0], self.links[worker.host][1]
        lag = self.latency if links else 0.0
        if source.state != "whole":
            lag += self.granule / min((link.capacity for link in links), default=LOCAL)
        have = int(worker.line.nbytes)
        watch = Watch(self.directory.stall_timeout, rate, have, self.now)
        worker.flow = Flow(source, worker, links, lag, self.now, have, watch)
        self.later(self.serve, worker.flow)
        self.at(self.now + watch.interval, self.look, worker.flow)

    def serve(self, flow: Flow) -> None:
        """A request has come to its source, or into its kernel if it is frozen."""
        if flow.receiver.flow is not flow:
            return
        if flow.source.state in ("receiving", "whole"):
            flow.source.readers[flow] = None
            self.bend(flow, flow.source.line)
        else:
            self.later(self.broken, flow, f"refused: {flow.source.state}")

    def broken(self, flow: Flow, reason: str) -> None:
        """A receiver learns that its connection is no more."""
        worker = flow.receiver
        if worker.frozen:
            worker.unread.append((self.broken, (flow, reason)))
        elif worker.flow is flow:
            self.close(worker)
            self.tell(events.SourceFailed, worker, reason)

    def look(self, flow: Flow) -> None:
        """Now and then, a receiver says how its bytes come."""
        worker, watch = flow.receiver, flow.watch
        if worker.flow is flow:
            finding = None
            if not worker.frozen:
                finding = watch.look(worker.line.at(self.now), self.now, flow.answered or 0.0)
            if finding == "progressed":
                self.tell(events.Progressed, worker)
            elif finding == "stalled":
                self.tell(events.Stalled, worker)
            elif finding is not None:
                flow.said = events.Measured if finding == "measured" else events.Lagging
                self.repeat(flow)
            self.at(self.now + watch.interval, self.look, flow)

    def repeat(self, flow: Flow) -> None:
        """A receiver says how fast its bytes come, or says it again."""
        if flow.receiver.flow is flow and not flow.receiver.frozen:
            self.tell(flow.said, flow.receiver, flow.watch.rate)

    def finish(self, flow: Flow) -> None:
        worker = flow.receiver
        self.draw(flow, self.nbytes, 0.0)
        self.close(worker)
        worker.state = "whole"
        self.finished[worker.name] = self.now
        first = self.now if flow.answered is None else flow.answered
        took = first - flow.begun, self.now - first
        self.later(self.decide, events.Finished(KEY, worker.name, worker.epoch, *took))
        self.at(self.now + 2 * self.latency, self.become_known, worker)

    def become_known(self, worker: Worker) -> None:
        if worker.state == "whole":
            self.known[worker.name] = None

    def give_up(self, worker: Worker, reason: str, *, died: bool = False) -> None:
        self.close(worker)
        if worker.state == "receiving" and not died:
            self.failed[worker.name] = reason
        worker.state = "dead" if died else "failed"
        for flow in worker.readers:
            self.dirty[flow] = None
            self.later(self.broken, flow, reason)

    # Faults

    def suffer(self, fault: Fault) -> None:
        if fault.kind == "release":
            self.known.clear()
            self.decide(events.Released(KEY))
            for worker in self.workers.values():
                if worker.state == "whole":
                    self.give_up(worker, "released")
            return
        worker = self.workers[fault.worker]
        if fault.kind == "join" and worker.state in ("absent", "dead"):
            self.arrive(worker)
        elif fault.kind == "kill" and worker.state not in ("absent", "dead"):
            self.give_up(worker, "connection reset", died=True)
            worker.frozen = False
            worker.unread.clear()
            self.later(self.bury, worker)
        elif fault.kind in ("slow", "fast"):
            for link in self.links[worker.host]:
                link.capacity = link.usual * (0.1 if fault.kind == "slow" else 1.0)
                for flow in link.flows:
                    for far in flow.links:
                        self.dirty.update(far.flows)
        elif fault.kind == "freeze" and worker.up:
            self.freeze(worker, True)
        elif fault.kind == "return" and worker.frozen:
            self.freeze(worker, False)
            unread, worker.unread = worker.unread, []
            for action, args in unread:
                action(*args)

    def bury(self, worker: Worker) -> None:
        self.known.pop(worker.name, None)
        self.decide(events.WorkerLeft(worker.name))

    def freeze(self, worker: Worker, frozen: bool) -> None:
        worker.frozen = frozen
        self.dirty.update(worker.readers)
        if worker.flow is not None:
            self.dirty[worker.flow] = None

    # The fluid

    def close(self, worker: Worker) -> None:
        """End what a worker receives; nothing remains of a byte that is half there."""
        flow, worker.flow = worker.flow, None
        if flow is None:
            return
        have = int(worker.line.at(self.now) + CLOSE)
        if have > flow.first:
            ends = flow.source.name, worker.name
            self.transfers.append(Segment(*ends, flow.first, have, flow.begun, self.now))
        self.draw(flow, have, 0.0)
        flow.source.readers.pop(flow, None)
        self.dirty[flow] = None

    def bend(self, flow: Flow, line: Line) -> None:
        """The source's line is another one; so is the ceiling of who it feeds, one lag later."""
        ceiling = Line(self.now + flow.lag, line.at(self.now), line.rate)
        self.at(ceiling.time, self.lift, flow, ceiling)

    def lift(self, flow: Flow, ceiling: Line) -> None:
        flow.ceiling = ceiling
        self.dirty[flow] = None

    def settle(self) -> None:
        """Give the flows that something happened to, and those beside them, their rates."""
        while self.dirty:
            for flow in list(self.dirty):
                able = self.demand(flow) > 0
                for link in flow.links:
                    if able != (flow in link.flows):
                        for beside in list(link.flows):
                            for far in beside.links if len(link.flows) <= FEW else [link]:
                                self.dirty.update(far.flows)
                        link.flows.pop(flow, None)
                        if able:
                            link.flows[flow] = None
            flows, self.dirty = self.dirty, {}
            for flow in flows:
                if flow.receiver.flow is flow:
                    self.forecast(flow)

    def room(self, flow: Flow) -> float:
        """How far the source is ahead; less than 0 if it is behind the one that it feeds."""
        return flow.ceiling.at(self.now) - flow.receiver.line.at(self.now)

    def demand(self, flow: Flow) -> float:
        """The rate that a flow would have if its links were wide enough."""
        if flow.receiver.flow is not flow or not (flow.source.up and flow.receiver.up):
            return 0.0
        room = self.room(flow)
        return LOCAL if room > CLOSE else flow.ceiling.rate if room > -CLOSE else 0.0

    def forecast(self, flow: Flow) -> None:
        """Draw a receiver's line, and foresee when it ends or meets its ceiling."""
        room, have = self.room(flow), flow.receiver.line.at(self.now)
        if abs(room) <= CLOSE:
            room, have = 0.0, flow.ceiling.at(self.now)
        if have > self.nbytes - CLOSE:
            self.finish(flow)
            return
        rate = self.demand(flow)
        if rate > 0:
            rate = min(rate, *(self.share(flow, link) for link in flow.links), LOCAL)
        self.draw(flow, have, rate)
        closing = rate - flow.ceiling.rate
        ahead = [(self.nbytes - have) / rate] if rate > 0 else []
        ahead += [room / closing] if room * closing > 0 else []
        flow.version += 1
        if ahead:
            self.at(self.now + min(ahead), self.look_again, flow, flow.version)

    def share(self, flow: Flow, link: Link) -> float:
        """What a flow gets of a link: as much as others, and what these cannot use."""
        wanted = sorted(map(narrowest(link), link.flows)) if len(link.flows) <= FEW else []
        left, sharing = link.capacity, len(link.flows)
        for rate in wanted:
            if rate > left / sharing:
                break
            left, sharing = left - rate, sharing - 1
        return left / sharing if sharing else narrowest(link)(flow) + left / len(link.flows)

    def look_again(self, flow: Flow, version: int) -> None:
        if flow.version == version:
            self.dirty[flow] = None

    def draw(self, flow: Flow, have: float, rate: float) -> None:
        worker, old = flow.receiver, flow.receiver.line
        for link in flow.links:
            link.carried += have - old.nbytes
        worker.line = Line(self.now, have, rate)
        if rate > 0 and flow.answered is None:
            flow.answered = self.now
        if rate != old.rate or abs(old.at(self.now) - have) > CLOSE:
            for reader in worker.readers:
                self.bend(reader, worker.line)

    def audit(self) -> Iterator[str]:
        """What must not be so at the end, and is."""
        for worker in self.workers.values():
            self.close(worker)
            if worker.state == "receiving" and worker.up:
                yield f"{worker.name} hangs with {worker.line.nbytes} bytes"
        have = dict.fromkeys(self.finished, 0)
        for part in self.transfers:
            if part.receiver in have and part.begun >= self.workers[part.receiver].arrived:
                if part.first != have[part.receiver]:
                    yield f"{part} after {have[part.receiver]} bytes"
                have[part.receiver] = part.stop
        yield from (f"{name} ends with {n} bytes" for name, n in have.items() if n != self.nbytes)
        hosts = {worker.name: worker.host for worker in self.workers.values()}
        crossed = [part for part in self.transfers if hosts[part.source] != hosts[part.receiver]]
        sent = sum(part.stop - part.first for part in crossed)
        for way in zip(*self.links.values(), strict=True):
            if abs(sent - sum(link.carried for link in way)) > 1:
                yield f"{sent} bytes became {sum(link.carried for link in way)}"
        for tree in self.directory.trees.values():
            yield from (f"left: {row}" for w, row in tree.transfers.items() if self.workers[w].up)


def narrowest(link: Link) -> Callable[[Flow], float]:
    """A function that gives what a flow gets on its way, apart from one link."""
    return lambda flow: min(
        (other.capacity / len(other.flows) for other in flow.links if other is not link),
        default=LOCAL,
    )


def cycles(directory: Directory) -> Iterator[str]:
    """Receivers whose bytes would have to come from themselves."""
    for tree in directory.trees.values():
        for start in tree.transfers:
            row, hops = tree.transfers.get(start), 0
            while row is not None and row.source is not None and hops <= len(tree.transfers):
                row, hops = tree.transfers.get(row.source), hops + 1
            if hops > len(tree.transfers):
                yield f"cycle through {start}"


def simulate(
    workers: int = 1024,
    nbytes: int = 2**30,
    bandwidth: float = 1.25e9,
    latency: float = 1e-4,
    *,
    per_host: int = 1,
    holders: int = 1,
    arrivals: Literal["together"] | float = "together",
    faults: Sequence[Fault] = (),
    seed: int = 0,
    speeds: Mapping[str, float] | None = None,
    granule: int = 16 * 2**10,
    stall_timeout: float = 1.5,
    cost: CostModel | None = None,
) -> Result:
    """Spread an object from its holders to many workers.

    Parameters
    ----------
    workers : int
        Receivers ``w0``, ``w1``, ... on the hosts ``host0``, ``host1``, ...
    nbytes : int
        Size of the object, at least 1.
    bandwidth : float
        Bytes per second of each host's network card, in each direction.
    latency : float
        Seconds, more than 0, that any message takes one way, and the first byte of a hop.
    per_host : int
        Receivers on one host.
    holders : int
        Complete copies at the start: ``origin0`` on ``origin-host0``, and so on.
    arrivals : "together" or float
        Seconds over which the receivers come, in any case in random order.
    faults : sequence of Fault
        What goes wrong, and when.
    seed : int
        For the order of the receivers.
    speeds : mapping of str to float, optional
        Other bandwidths, by host.
    granule : int
        Bytes that a relay has to have before it sends them on: what one read brings, at the least
        a packet (16 KiB in the laboratory, up to 64 KiB elsewhere). It delays a hop by the time
        that they take at the full rate of the hop's slower link.
    stall_timeout : float
        Seconds after which a receiver that gets nothing says so.
    cost : CostModel, optional
        The directory's; its usual one by default.

    Returns
    -------
    Result
        Its ``lower_bound`` is the latest arrival + ``nbytes`` over the slowest receiver's bandwidth
        + ``latency``: what the last receiver needs with a complete copy of its own to take from,
        and no word with the directory. (With one on the same host, it could be faster.)

    Raises
    ------
    ValueError
        If there is nothing to send, or messages take no time.
    """
    if nbytes < 1 or latency <= 0:
        raise ValueError(f"nbytes={nbytes} and latency={latency} must be positive")
    cost = replace(cost) if cost is not None else None  # it learns, and is the caller's
    sim = Simulation(nbytes, latency, granule, cost=cost, stall_timeout=stall_timeout)
    receivers = [Worker(f"w{i}", f"host{i // per_host}") for i in range(workers)]
    origins = [Worker(f"origin{i}", f"origin-host{i}", "whole") for i in range(holders)]
    for worker in [*receivers, *origins]:
        speed = (speeds or {}).get(worker.host, bandwidth)
        sim.links.setdefault(worker.host, (Link(speed, speed), Link(speed, speed)))
        sim.workers[worker.name] = worker
    for origin in origins:
        origin.line = Line(0.0, nbytes, 0.0)
        sim.known[origin.name] = None
        sim.decide(events.WorkerJoined(origin.name, origin.host))
    rng = random.Random(seed)
    span = 0.0 if arrivals == "together" else arrivals
    first = {fault.worker: fault.kind for fault in sorted(faults, reverse=True)}
    coming = [worker.name for worker in receivers if first.get(worker.name) != "join"]
    rng.shuffle(coming)
    for fault in [*(Fault(rng.uniform(0, span), "join", name) for name in coming), *faults]:
        sim.at(fault.time, sim.suffer, fault)
    slowest = min((sim.links[worker.host][1].capacity for worker in receivers), default=bandwidth)
    sim.run(1000 + 100 * nbytes / slowest)
    last = max((worker.arrived for worker in sim.workers.values()), default=0.0)
    violations = [*sim.violations, *sim.audit()]
    return Result(
        finished=sim.finished,
        failed=sim.failed,
        lower_bound=last + nbytes / slowest + latency,
        bytes_in={host: down.carried for host, (_, down) in sim.links.items()},
        bytes_out={host: up.carried for host, (up, _) in sim.links.items()},
        transfers=sim.transfers,
        depth=sim.depth,
        violations=violations,
    )


def scenario(seed: int, *, faults: bool = True) -> dict[str, Any]:
    """Random arguments for :func:`simulate`: up to 256 workers, any size, and much goes wrong."""
    rng = random.Random(f"scenario {seed}")  # unlike the one of the simulation
    workers, nbytes = int(2 ** rng.uniform(2, 8)), int(2 ** rng.uniform(0, 31))
    bandwidth, latency = 10 ** rng.uniform(7, 10), 10 ** rng.uniform(-5, -2)
    once = nbytes / bandwidth + 10 * latency
    names = [f"w{i}" for i in range(workers)]
    suffered = [Fault(rng.uniform(0, 2 * once), "release")] * (rng.random() < 0.1)
    for _ in range(rng.randint(1, 8)):
        worker = rng.choice(names if rng.random() < 0.8 else ["origin0"])
        begin = rng.uniform(0, 2 * once)
        end = begin + 10 * latency + rng.uniform(0, 8)
        choice = rng.random()
        if choice < 0.4:
            suffered.append(Fault(begin, "kill", worker))
        elif choice < 0.8:
            suffered.append(Fault(begin, "freeze", worker))
        if rng.random() < 0.3:
            suffered.append(Fault(rng.uniform(0, once), "slow", rng.choice(names)))
            if rng.random() < 0.5:
                suffered.append(Fault(end, "fast", suffered[-1].worker))
        if choice < 0.6:
            suffered.append(Fault(end, "return", worker))
        if choice < 0.2 or choice > 0.8:
            suffered.append(Fault(end if choice < 0.2 else begin, "join", worker))
    return {
        "workers": workers,
        "nbytes": nbytes,
        "bandwidth": bandwidth,
        "latency": latency,
        "per_host": rng.randint(1, 4),
        "holders": rng.randint(1, 3),
        "cost": CostModel(link=rng.choice([0.0, bandwidth])),
        "arrivals": rng.choice(["together", rng.uniform(0, 2 * once)]),
        "faults": suffered if faults else [],
        "seed": seed,
    }


def _number(worker: str) -> int:
    """Of a receiver; -1 for what is none."""
    return int(worker[1:]) if worker.startswith("w") else -1


def explore(seeds: int, faults: bool) -> int:
    """Run random scenarios, until one shows a violation."""
    ratio = delay = (0.0, 0)
    for seed in range(seeds):
        given = scenario(seed, faults=faults)
        result = simulate(**given)
        if result.violations:
            print(f"seed {seed}:", *result.violations[:10], sep="\n")
            return 1
        # Those to whom something happens themselves take as long as they take.
        hit = {_number(fault.worker) // given["per_host"] for fault in given["faults"]}
        done = [
            seconds
            for worker, seconds in result.finished.items()
            if _number(worker) // given["per_host"] not in hit
        ]
        if done:
            ratio = max(ratio, (max(done) / result.lower_bound, seed))
            delay = max(delay, (max(done) - result.lower_bound, seed))
    print(f"{seeds} scenarios without a violation; at worst, the last undisturbed one was done")
    print(f"at {ratio[0]:.3f} x the lower bound (seed {ratio[1]}),")
    print(f"{delay[0]:.3f} s after the lower bound (seed {delay[1]})")
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if something was violated."""
    from dask.utils import parse_bytes, parse_timedelta  # not needed to import this module

    def rate(text: str) -> float:
        return parse_bytes(text[:-3] + "B") / 8 if text.endswith("bit") else parse_bytes(text)

    from dask_hoplite import simulate_reduction as reductions  # which builds on this module

    description = "How near the trees of the real core come to the limit."
    parser = argparse.ArgumentParser("python -m dask_hoplite.simulate", description=description)
    parser.add_argument("--op", choices=["broadcast", "reduce", "allreduce"], default="broadcast")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 128, 1024, 4096])
    parser.add_argument("--nbytes", type=parse_bytes, default="1GiB")
    parser.add_argument("--bandwidth", type=rate, default="10Gbit", help="of a host, per second")
    parser.add_argument("--latency", type=parse_timedelta, default="0.1ms")
    parser.add_argument("--granule", type=parse_bytes, default="16KiB", help="what a read brings")
    parser.add_argument("--per-host", type=int, default=1, help="workers on a host")
    parser.add_argument("--seeds", type=int, help="run so many random scenarios instead")
    parser.add_argument("--faults", action="store_true", help="let workers fail in these")
    given = parser.parse_args(args)
    if given.seeds is not None:
        if given.op == "broadcast":
            return explore(given.seeds, given.faults)
        return reductions.explore(range(given.seeds), given.faults)
    print("workers  completion  lower bound  ratio  depth  CPU seconds")
    network = given.nbytes, given.bandwidth, given.latency
    violations = []
    for workers in given.workers:
        begin = time.process_time()
        result: Result | reductions.Result
        beside: dict[str, Any] = {"per_host": given.per_host, "granule": given.granule}
        if given.op == "broadcast":
            result = simulate(workers, *network, **beside)
        else:
            result = reductions.simulate_reduction(workers, *network, op=given.op, **beside)
        seconds = time.process_time() - begin
        violations += result.violations
        print(
            f"{workers:7}  {result.completion:8.4f} s  {result.lower_bound:9.4f} s"
            f"  {result.ratio:5.3f}  {result.depth:5}  {seconds:11.2f}"
        )
    print(*violations[:10], sep="\n", end="")
    return int(bool(violations))


if __name__ == "__main__":
    raise SystemExit(main())
