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

Flows on a link get equal shares, not counting those that wait for their source. Max-min fairness
never gives a flow less (its rate is at least the smallest equal share on its way), so times here
err on the slow side; where one link is the bottleneck, as in chains and stars, both are the same.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dask_hoplite.core import events
from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.directory import Directory
from dask_hoplite.core.instructions import Instruction, NoSource, Pull, Wait

KEY = "object"
LOCAL = 1e10  #: bytes per second between workers of one host, which takes no link
CLOSE = 0.01  #: bytes; lines that are nearer than this have met


class Fault(NamedTuple):
    """At ``time`` (s) something happens to a worker; to the object, in case of "release".

    A worker that is to "join" is not there before; one that was killed may join again.
    """

    time: float
    kind: Literal["kill", "freeze", "return", "join", "release"]
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


@dataclass(eq=False, slots=True)
class Link:
    """One direction of a host's network card."""

    capacity: float
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
    line: Line = Line(0.0, 0.0, 0.0)
    flow: Flow | None = None  #: what it receives
    readers: dict[Flow, None] = field(default_factory=dict)  #: what it serves
    epoch: int = 0
    silence: int = 0  #: counts how often bytes ceased or came again
    inbox: deque[tuple[Callable[..., None], Any]] = field(default_factory=deque)  # while frozen

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
    ceiling: Line = Line(0.0, 0.0, 0.0)
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
        for instruction in self.directory.handle(event, self.now):
            if isinstance(instruction, Pull):
                row = self.directory.trees[KEY].transfers[instruction.receiver]
                self.depth = max(self.depth, row.depth)
            elif isinstance(instruction, NoSource):
                # A source that was silent when tried is lost for this receiver: nothing tells the
                # directory that it came back.
                able = [w for w in self.known if self.workers[w].up and w not in instruction.tried]
                if able and self.workers[instruction.receiver].state == "receiving":
                    self.violations.append(f"{self.now}: {instruction}, in spite of {able}")
            self.later(self.obey, instruction)
        if len(self.workers) <= 100:  # it takes long
            self.violations += [f"{self.now}: {cycle}" for cycle in cycles(self.directory)]

    # Receivers

    def arrive(self, worker: Worker) -> None:
        worker.state, worker.arrived, worker.line = "receiving", self.now, Line(self.now, 0.0, 0.0)
        self.finished.pop(worker.name, None)
        self.later(self.decide, events.WorkerJoined(worker.name, worker.host))
        wanted = events.Wanted(KEY, worker.name, self.nbytes, expected=len(self.workers))
        self.later(self.decide, wanted)
        self.at(self.now + 1, self.report, worker, worker.arrived)

    def tell(self, kind: Callable[..., events.Event], worker: Worker, *details: Any) -> None:
        have = int(worker.line.at(self.now))
        self.later(self.decide, kind(KEY, worker.name, worker.epoch, have, *details))

    def report(self, worker: Worker, arrived: float) -> None:
        if worker.state == "receiving" and worker.arrived == arrived:
            if not worker.frozen:
                self.tell(events.Progressed, worker)
            self.at(self.now + 1, self.report, worker, arrived)

    def obey(self, instruction: Instruction) -> None:
        worker = self.workers[instruction.receiver]
        if worker.frozen:
            worker.inbox.append((self.obey, (instruction,)))
        elif worker.state == "receiving" and not isinstance(instruction, Wait):
            if not isinstance(instruction, Pull):
                self.give_up(worker, instruction.reason)
            elif instruction.epoch > worker.epoch:  # else it is a repetition
                worker.epoch = instruction.epoch
                self.pull(worker, self.workers[instruction.source])

    def pull(self, worker: Worker, source: Worker) -> None:
        self.close(worker)
        links: tuple[Link, ...] = ()
        if worker.host != source.host:
            links = self.links[source.host][0], self.links[worker.host][1]
        lag = self.latency if links else 0.0
        if source.state != "whole":
            lag += self.granule / min((link.capacity for link in links), default=LOCAL)
        worker.flow = Flow(source, worker, links, lag, self.now, int(worker.line.nbytes))
        self.listen(worker)
        self.later(self.serve, worker.flow)

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
        """A receiver is told that its connection is no more."""
        worker = flow.receiver
        if worker.frozen:
            worker.inbox.append((self.broken, (flow, reason)))
        elif worker.flow is flow:
            self.close(worker)
            self.tell(events.SourceFailed, worker, reason)

    def listen(self, worker: Worker) -> None:
        """Bytes ceased or came again: nobody waits for the next one for ever."""
        worker.silence += 1
        if worker.line.rate == 0:
            timeout = self.now + self.directory.stall_timeout
            self.at(timeout, self.stalled, worker, worker.silence)

    def stalled(self, worker: Worker, silence: int) -> None:
        if worker.silence == silence and not worker.frozen:
            self.tell(events.Stalled, worker)
            self.listen(worker)

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

    def give_up(self, worker: Worker, reason: str, state: Literal["failed", "dead"] = "failed"):
        self.close(worker)
        worker.state = state
        for flow in worker.readers:
            self.dirty[flow] = None
            self.later(self.broken, flow, reason)
        if state == "failed":
            self.failed[worker.name] = reason

    # Faults

    def suffer(self, fault: Fault) -> None:
        if fault.kind == "release":
            self.known.clear()
            self.decide(events.Released(KEY))
            for worker in self.workers.values():  # complete copies go at once, partial by Cancel
                if worker.state == "whole":
                    self.give_up(worker, "released")
            return
        worker = self.workers[fault.worker]
        if fault.kind == "join" and worker.state in ("absent", "dead"):
            self.arrive(worker)
        elif fault.kind == "kill" and worker.state not in ("absent", "dead"):
            self.give_up(worker, "connection reset", "dead")
            worker.frozen = False
            worker.inbox.clear()
            self.later(self.bury, worker)
        elif fault.kind == "freeze" and worker.up:
            self.freeze(worker, True)
        elif fault.kind == "return" and worker.frozen:
            self.freeze(worker, False)
            while worker.inbox:
                action, args = worker.inbox.popleft()
                action(*args)

    def bury(self, worker: Worker) -> None:
        self.known.pop(worker.name, None)
        self.decide(events.WorkerLeft(worker.name))

    def freeze(self, worker: Worker, frozen: bool) -> None:
        worker.frozen = frozen
        self.dirty.update(worker.readers)
        if worker.flow is not None:
            self.dirty[worker.flow] = None
            self.listen(worker)

    # The fluid

    def close(self, worker: Worker) -> None:
        """End what a worker receives; nothing remains of a byte that is half there."""
        flow, worker.flow = worker.flow, None
        if flow is None:
            return
        worker.silence += 1
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
                        self.dirty.update(link.flows)
                        link.flows.pop(flow, None)
                        if able:
                            link.flows[flow] = None
            flows, self.dirty = self.dirty, {}
            for flow in flows:
                if flow.receiver.flow is flow:
                    self.forecast(flow)

    def room(self, flow: Flow) -> float:
        """By how many bytes the source is ahead of its child, which may also be ahead of it."""
        return flow.ceiling.at(self.now) - flow.receiver.line.at(self.now)

    def demand(self, flow: Flow) -> float:
        """The rate that a flow would have if its links were wide enough."""
        if flow.receiver.flow is not flow or not (flow.source.up and flow.receiver.up):
            return 0.0
        room = self.room(flow)
        return LOCAL if room > CLOSE else flow.ceiling.rate if room > -CLOSE else 0.0

    def forecast(self, flow: Flow) -> None:
        """Draw a receiver's line, and foresee when it ends or meets the ceiling."""
        room = self.room(flow)
        have = flow.receiver.line.at(self.now)
        if abs(room) <= CLOSE:
            have, room = flow.ceiling.at(self.now), 0.0
        if have > self.nbytes - CLOSE:
            self.finish(flow)
            return
        rate = self.demand(flow)
        if rate > 0:
            rate = min(rate, *(link.capacity / len(link.flows) for link in flow.links), LOCAL)
        self.draw(flow, have, rate)
        closing = rate - flow.ceiling.rate
        ahead = [(self.nbytes - have) / rate] if rate > 0 else []
        ahead += [room / closing] if room * closing > 0 else []
        flow.version += 1
        if ahead:
            self.at(self.now + min(ahead), self.look_again, flow, flow.version)

    def look_again(self, flow: Flow, version: int) -> None:
        if flow.version == version:
            self.dirty[flow] = None

    def draw(self, flow: Flow, have: float, rate: float) -> None:
        worker, old = flow.receiver, flow.receiver.line
        for link in flow.links:
            link.carried += have - old.nbytes
        worker.line = Line(self.now, have, rate)
        if rate == old.rate and abs(old.at(self.now) - have) <= CLOSE:
            return  # it does not bend
        if rate > 0 and flow.answered is None:
            flow.answered = self.now
        if (rate > 0) != (old.rate > 0) and worker.flow is flow:
            self.listen(worker)
        for reader in worker.readers:
            self.bend(reader, worker.line)

    def audit(self) -> None:
        """Look for what must not be so at the end."""
        for worker in self.workers.values():
            self.close(worker)
            if worker.state == "receiving" and worker.up:
                self.violations.append(f"{worker.name} hangs at {worker.line}")
            if worker.name in self.finished:
                have = 0
                for part in self.transfers:
                    if part.receiver == worker.name and part.begun >= worker.arrived:
                        if part.first != have:
                            self.violations.append(f"{part} after {have} bytes")
                        have = part.stop
                if have != self.nbytes:
                    self.violations.append(f"{worker.name} finished with {have} bytes")
        crossed = sum(
            part.stop - part.first
            for part in self.transfers
            if self.workers[part.source].host != self.workers[part.receiver].host
        )
        for way in zip(*self.links.values(), strict=True):
            if abs(crossed - sum(link.carried for link in way)) > 1:
                self.violations.append(f"{crossed} bytes became {way}")
        for tree in self.directory.trees.values():
            rows = [row for row in tree.transfers.values() if self.workers[row.receiver].up]
            self.violations += [f"row left behind: {row}" for row in rows]


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
    granule: int = 64 * 2**10,
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
        Bytes that a relay has to have before it sends them on: what one read brings.
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
    sim = Simulation(nbytes, latency, granule, cost=cost, stall_timeout=stall_timeout)
    receivers = [Worker(f"w{i}", f"host{i // per_host}") for i in range(workers)]
    origins = [Worker(f"origin{i}", f"origin-host{i}", "whole") for i in range(holders)]
    for worker in [*receivers, *origins]:
        speed = (speeds or {}).get(worker.host, bandwidth)
        sim.links.setdefault(worker.host, (Link(speed), Link(speed)))
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
    sim.run(1000 + 10 * nbytes / slowest)
    sim.audit()
    last = max((worker.arrived for worker in receivers), default=0.0)
    return Result(
        finished=sim.finished,
        failed=sim.failed,
        lower_bound=last + nbytes / slowest + latency,
        bytes_in={host: down.carried for host, (_, down) in sim.links.items()},
        bytes_out={host: up.carried for host, (up, _) in sim.links.items()},
        transfers=sim.transfers,
        depth=sim.depth,
        violations=sim.violations,
    )


def scenario(seed: int, *, faults: bool = True) -> dict[str, Any]:
    """Random arguments for :func:`simulate`: few workers, any size, and much that goes wrong."""
    rng = random.Random(f"scenario {seed}")  # unlike the one of the simulation
    workers, holders = rng.randint(4, 64), rng.randint(1, 3)
    nbytes = int(2 ** rng.uniform(0, 31))
    bandwidth, latency = 10 ** rng.uniform(7, 10), 10 ** rng.uniform(-5, -2)
    once = nbytes / bandwidth + 10 * latency
    names = [f"w{i}" for i in range(workers)]
    suffered = []
    for _ in range(rng.randint(1, 8) if faults else 0):
        kind = rng.choice(["kill", "kill", "freeze", "freeze", "join"])
        worker = rng.choice(names if kind == "join" else [*names, *names, "origin0", "origin1"])
        begin = rng.uniform(0, 2 * once)
        end = begin + 10 * latency + rng.uniform(0, 8)
        suffered.append(Fault(begin, kind, worker))
        if kind == "freeze" and rng.random() < 0.6:
            suffered.append(Fault(end, "return", worker))
        if kind == "kill" and worker in names and rng.random() < 0.4:
            suffered.append(Fault(end, "join", worker))
    if faults and rng.random() < 0.1:
        suffered.append(Fault(rng.uniform(0, 2 * once), "release"))
    return {
        "workers": workers,
        "nbytes": nbytes,
        "bandwidth": bandwidth,
        "latency": latency,
        "per_host": rng.randint(1, 4),
        "holders": holders,
        "arrivals": rng.choice(["together", rng.uniform(0, 2 * once)]),
        "faults": suffered,
        "seed": seed,
    }


def main(args: Sequence[str] | None = None) -> int:
    """The command; returns 1 if something was violated."""
    from dask.utils import parse_bytes, parse_timedelta

    def parse_rate(text: str) -> float:
        return parse_bytes(text[:-3] + "B") / 8 if text.endswith("bit") else parse_bytes(text)

    parser = argparse.ArgumentParser("python -m dask_hoplite.simulate", description=__doc__)
    parser.description = "How near the trees of the real core come to the limit."
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 128, 1024, 4096])
    parser.add_argument("--nbytes", type=parse_bytes, default="1GiB")
    parser.add_argument("--bandwidth", type=parse_rate, default="10Gbit", help="per host")
    parser.add_argument("--latency", type=parse_timedelta, default="0.1ms")
    parser.add_argument("--granule", type=parse_bytes, default="64KiB", help="what a read brings")
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="run so many random scenarios instead")
    parser.add_argument("--faults", action="store_true", help="let workers fail in them")
    given = parser.parse_args(args)
    if given.seeds is not None:
        return explore(given.seeds, given.faults)
    print("workers  completion  lower bound  ratio  depth  CPU seconds")
    violations = []
    for workers in given.workers:
        begin = time.process_time()
        result = simulate(
            workers,
            given.nbytes,
            given.bandwidth,
            given.latency,
            per_host=given.per_host,
            granule=given.granule,
        )
        violations += result.violations
        print(
            f"{workers:7}  {result.completion:8.4f} s  {result.lower_bound:9.4f} s"
            f"  {result.ratio:5.3f}  {result.depth:5}  {time.process_time() - begin:11.2f}"
        )
    print(*violations[:10], sep="\n", end="")
    return bool(violations)


def explore(seeds: int, faults: bool) -> int:
    """Run random scenarios until all are done or one shows a violation."""
    ratio = delay = (0.0, -1)
    for seed in range(seeds):
        result = simulate(**scenario(seed, faults=faults))
        if result.violations:
            print(f"seed {seed}:", *result.violations[:10], sep="\n")
            return 1
        if result.finished:
            ratio = max(ratio, (result.ratio, seed))
            delay = max(delay, (result.completion - result.lower_bound, seed))
    print(f"{seeds} scenarios without a violation")
    print(f"worst completion: {ratio[0]:.3f} x lower bound (seed {ratio[1]})")
    print(f"worst delay: {delay[0]:.3f} s after lower bound (seed {delay[1]})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
