"""A discrete-event network that drives the real core.

Thousands of workers, one object, and the :class:`~dask_hoplite.core.directory.Directory` that also
runs in Dask's scheduler: no decision is taken here. What is modelled is only what the core cannot
see: links with a rate, messages that take their time, and workers that die, freeze, return or come
late. ``python -m dask_hoplite.simulate`` prints how close the trees come to the limit.

Notes
-----
Bytes are a fluid. How many bytes a worker has is a line (time, bytes, rate) that stays straight
until a rate changes, so nothing happens *between* changes and there is nothing to compute there.
A relay cannot send on what it does not have: the line of a child stays below its *ceiling*, the
line of its source shifted by the lag of one hop. Whenever a source's line bends, each child is told
one lag later of its ceiling's bend; by then that is the present, so no history needs to be kept.

Flows on a link get equal shares of it, those that wait for their source not counted. That is never
more than max-min fairness gives them (a flow's max-min rate is at least the smallest equal share on
its way), so that all times here err on the slow side; where a single link is the bottleneck, as in
chains and stars, both are the same.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.directory import Directory
from dask_hoplite.core.events import (
    Event,
    Finished,
    Progressed,
    Released,
    SourceFailed,
    Stalled,
    Wanted,
    WorkerJoined,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Instruction, NoSource, Pull, Wait

KEY = "object"
LOCAL = 1e10  #: bytes per second between workers of one host, which use no link
CLOSE = 0.01  #: bytes; lines nearer than this have met (floating point)


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker (or, for "release", to the object) at a time in seconds.

    A worker that is to "join" is not there before.
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
    """What came out of a simulation. Times are in simulated seconds since its start."""

    finished: dict[str, float]  #: when each receiver had the whole object
    failed: dict[str, str]  #: why each other one gave up
    lower_bound: float  #: no plan can finish the last receiver before
    bytes_in: dict[str, float]  #: by host, over its network card
    bytes_out: dict[str, float]
    transfers: list[Segment]
    depth: int  #: of the deepest receiver, in hops
    violations: list[str]  #: what must never happen, and did

    @property
    def completion(self) -> float:
        """When the last receiver had it; ``nan`` if none ever did."""
        return max(self.finished.values(), default=math.nan)

    @property
    def ratio(self) -> float:
        """Completion over lower bound."""
        return self.completion / self.lower_bound


class Line(NamedTuple):
    """A number of bytes that grows at a constant rate (bytes per second)."""

    time: float
    nbytes: float
    rate: float

    def at(self, time: float) -> float:
        return self.nbytes + self.rate * (time - self.time)


@dataclass(eq=False, slots=True)
class Link:
    """One direction of a host's network card."""

    capacity: float
    flows: dict[Flow, None] = field(default_factory=dict)  # ordered, unlike a set of objects
    carried: float = 0.0

    def share(self) -> float:
        return self.capacity / len(self.flows)


@dataclass(eq=False, slots=True)
class Flow:
    """One pull: from the request until the last byte, or until it is given up."""

    source: Worker
    receiver: Worker
    links: tuple[Link, ...]
    lag: float
    first: int
    begun: float
    ceiling: Line = Line(0.0, 0.0, 0.0)
    answered: float | None = None  #: time of the first byte
    active: bool = False  #: takes a share of its links
    version: int = 0  #: of its forecast


@dataclass(eq=False, slots=True)
class Worker:
    """A worker as its peers see it, and its side of the protocol with the directory."""

    name: str
    host: str
    state: Literal["absent", "idle", "receiving", "whole", "failed", "dead"] = "idle"
    frozen: bool = False
    line: Line = Line(0.0, 0.0, 0.0)
    flow: Flow | None = None  #: what it receives
    readers: dict[Flow, None] = field(default_factory=dict)  #: what it serves
    epoch: int = 0
    silence: int = 0  #: counts the times that bytes stopped or came again
    inbox: deque[tuple[Callable[..., None], Any]] = field(default_factory=deque)

    @property
    def up(self) -> bool:
        return self.state not in ("absent", "dead") and not self.frozen


class Simulation:
    """Workers, links and a clock around a directory; see :func:`simulate` for the parameters."""

    def __init__(
        self,
        workers: int,
        nbytes: int,
        bandwidth: float,
        latency: float,
        *,
        per_host: int,
        holders: int,
        speeds: Mapping[str, float],
        granule: int,
        stall_timeout: float,
        cost: CostModel | None,
        check: bool,
    ):
        self.nbytes = nbytes
        self.latency = latency
        self.granule = min(granule, nbytes)
        self.check = check
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], Any]] = []
        self.count = itertools.count()
        self.dirty: dict[Flow, None] = {}
        self.known: dict[str, None] = {}  # complete copies that Dask's scheduler knows of
        self.directory = Directory(lambda _: self.known, cost=cost, stall_timeout=stall_timeout)
        self.released = False
        self.expected = workers
        self.origins = [Worker(f"origin{i}", f"origin-host{i}") for i in range(holders)]
        self.receivers = [Worker(f"w{i}", f"host{i // per_host}") for i in range(workers)]
        self.workers = {worker.name: worker for worker in [*self.origins, *self.receivers]}
        hosts = {worker.host: None for worker in self.workers.values()}
        self.uplinks = {host: Link(speeds.get(host, bandwidth)) for host in hosts}
        self.downlinks = {host: Link(speeds.get(host, bandwidth)) for host in hosts}
        self.finished: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.transfers: list[Segment] = []
        self.violations: list[str] = []
        self.depth = 0
        for origin in self.origins:
            origin.state = "whole"
            origin.line = Line(0.0, nbytes, 0.0)
            self.known[origin.name] = None
            self.directory.handle(WorkerJoined(origin.name, origin.host), 0.0)

    # The clock

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (time, next(self.count), action, args))

    def later(self, action: Callable[..., None], *args: Any) -> None:
        """Let something happen that takes a message first."""
        self.at(self.now + self.latency, action, *args)

    def run(self, horizon: float) -> None:
        while self.queue and self.queue[0][0] <= horizon:
            self.now = self.queue[0][0]
            # All that happens at one time, before rates are computed once.
            while self.queue and self.queue[0][0] == self.now:
                _, _, action, args = heapq.heappop(self.queue)
                action(*args)
            self.settle()

    # The directory's end

    def tell(self, event: Event) -> None:
        self.later(self.decide, event)

    def decide(self, event: Event) -> None:
        instructions = self.directory.handle(event, self.now)
        for instruction in instructions:
            if isinstance(instruction, Pull):
                row = self.directory.trees[KEY].transfers[instruction.receiver]
                self.depth = max(self.depth, row.depth)
            elif isinstance(instruction, NoSource):
                self.check_no_source(instruction)
            self.later(self.obey, instruction)
        if self.check:
            self.violations += [f"{self.now:.6f}: {what}" for what in cycles(self.directory)]

    def check_no_source(self, instruction: NoSource) -> None:
        """Nobody may be left unserved while somebody could serve it.

        A source that was silent when this receiver tried it counts as lost for it: the directory
        has no way to know that it came back.
        """
        me = self.workers[instruction.receiver]
        able = [
            name
            for name in self.known
            if name not in instruction.tried and self.workers[name].up and name != me.name
        ]
        if able and me.state == "receiving":
            self.violations.append(f"{self.now:.6f}: {me.name} gave up, {able} could serve it")

    # The receivers' end

    def arrive(self, worker: Worker) -> None:
        """A worker joins the cluster, and wants the object."""
        worker.state = "receiving"
        self.tell(WorkerJoined(worker.name, worker.host))
        self.tell(Wanted(KEY, worker.name, self.nbytes, expected=self.expected))
        self.at(self.now + 1, self.report, worker)

    def report(self, worker: Worker) -> None:
        if worker.state == "receiving" and not worker.frozen:
            have = int(worker.line.at(self.now))
            self.tell(Progressed(KEY, worker.name, worker.epoch, have))
            self.at(self.now + 1, self.report, worker)

    def obey(self, instruction: Instruction) -> None:
        worker = self.workers[instruction.receiver]
        if worker.frozen:
            worker.inbox.append((self.obey, (instruction,)))
        elif worker.state == "receiving" and not isinstance(instruction, Wait):
            if not isinstance(instruction, Pull):
                self.give_up(worker, instruction.reason)
            elif instruction.epoch > worker.epoch:  # else a repetition, or overtaken
                worker.epoch = instruction.epoch
                self.pull(worker, self.workers[instruction.source])

    def pull(self, worker: Worker, source: Worker) -> None:
        self.close(worker)
        local = worker.host == source.host
        links = () if local else (self.uplinks[source.host], self.downlinks[worker.host])
        lag = 0.0 if local else self.latency
        if source.state != "whole":
            lag += self.granule / min((link.capacity for link in links), default=LOCAL)
        flow = Flow(source, worker, links, lag, int(worker.line.nbytes), self.now)
        worker.flow = flow
        self.listen(worker)
        self.later(self.serve, flow)

    def serve(self, flow: Flow) -> None:
        """A request has come to its source."""
        source = flow.source
        if flow.receiver.flow is not flow:
            return
        if source.frozen:
            source.inbox.append((self.serve, (flow,)))
        elif source.state in ("receiving", "whole"):
            source.readers[flow] = None
            self.bend(flow, source.line)
        else:
            self.later(self.broken, flow, f"refused: {source.state}")

    def broken(self, flow: Flow, reason: str) -> None:
        """A receiver learns that its connection is no more."""
        worker = flow.receiver
        if worker.flow is not flow:
            return
        if worker.frozen:
            worker.inbox.append((self.broken, (flow, reason)))
            return
        self.close(worker)
        have = int(worker.line.nbytes)
        self.tell(SourceFailed(KEY, worker.name, worker.epoch, have, reason))

    def listen(self, worker: Worker) -> None:
        """Wait for the next byte, but not for ever."""
        worker.silence += 1
        patience = self.directory.stall_timeout
        self.at(self.now + patience, self.stalled, worker, worker.silence)

    def stalled(self, worker: Worker, silence: int) -> None:
        if worker.silence == silence and worker.flow is not None and not worker.frozen:
            have = int(worker.line.at(self.now))
            self.tell(Stalled(KEY, worker.name, worker.epoch, have))
            self.listen(worker)

    def finish(self, flow: Flow) -> None:
        worker = flow.receiver
        self.close(worker)
        worker.state = "whole"
        self.finished[worker.name] = self.now
        first = self.now if flow.answered is None else flow.answered
        wait, seconds = first - flow.begun, self.now - first
        self.tell(Finished(KEY, worker.name, worker.epoch, latency=wait, seconds=seconds))
        self.at(self.now + 2 * self.latency, self.become_known, worker)

    def become_known(self, worker: Worker) -> None:
        if worker.state == "whole" and not self.released:
            self.known[worker.name] = None

    def give_up(self, worker: Worker, reason: str) -> None:
        self.close(worker)
        worker.state = "failed"
        self.failed[worker.name] = reason
        for flow in worker.readers:
            self.later(self.broken, flow, "gave the object up")

    # Faults

    def kill(self, worker: Worker) -> None:
        self.close(worker)
        worker.state, worker.frozen = "dead", False
        self.dirty.update(worker.readers)
        for flow in worker.readers:
            self.later(self.broken, flow, "connection reset")
        self.later(self.bury, worker)

    def bury(self, worker: Worker) -> None:
        self.known.pop(worker.name, None)
        self.decide(WorkerLeft(worker.name))

    def freeze(self, worker: Worker) -> None:
        worker.frozen = True
        self.dirty.update(worker.readers)
        if worker.flow is not None:
            self.dirty[worker.flow] = None

    def thaw(self, worker: Worker) -> None:
        worker.frozen = False
        self.dirty.update(worker.readers)
        if worker.flow is not None:
            self.dirty[worker.flow] = None
            self.listen(worker)
        while worker.inbox:
            action, args = worker.inbox.popleft()
            action(*args)
        self.report(worker)

    def release(self) -> None:
        """The object has no user left; complete copies go one message later."""
        self.released = True
        self.known.clear()
        self.decide(Released(KEY))
        self.later(self.drop_copies)

    def drop_copies(self) -> None:
        for worker in self.workers.values():
            if worker.state == "whole" and worker.up:
                worker.state = "idle"
                for flow in worker.readers:
                    self.later(self.broken, flow, "released")

    def suffer(self, fault: Fault) -> None:
        if fault.kind == "release":
            self.release()
            return
        worker = self.workers[fault.worker]
        if fault.kind == "join" and worker.state == "absent":
            self.arrive(worker)
        elif fault.kind == "kill" and worker.state not in ("absent", "dead"):
            self.kill(worker)
        elif fault.kind == "freeze" and worker.up:
            self.freeze(worker)
        elif fault.kind == "return" and worker.frozen:
            self.thaw(worker)

    # The fluid

    def close(self, worker: Worker) -> None:
        """End what a worker receives; of the byte that is just arriving nothing remains."""
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
        self.activate(flow, False)

    def bend(self, flow: Flow, line: Line) -> None:
        """The source's line has changed: one lag later, so does the ceiling of who it feeds."""
        ceiling = Line(self.now + flow.lag, line.at(self.now), line.rate)
        self.at(ceiling.time, self.lift, flow, ceiling)

    def lift(self, flow: Flow, ceiling: Line) -> None:
        if flow.receiver.flow is flow:
            flow.ceiling = ceiling
            self.dirty[flow] = None

    def activate(self, flow: Flow, active: bool) -> None:
        """Count a flow among those that share its links, or no longer."""
        if flow.active == active:
            return
        flow.active = active
        for link in flow.links:
            if active:
                link.flows[flow] = None
            else:
                del link.flows[flow]
            self.dirty.update(link.flows)

    def settle(self) -> None:
        """Give each flow that something happened to the rate that it has from now on."""
        for flow in list(self.dirty):
            self.activate(flow, self.demand(flow) > 0)
        flows, self.dirty = self.dirty, {}
        for flow in flows:
            if flow.receiver.flow is flow:
                self.forecast(flow)

    def room(self, flow: Flow) -> float:
        """How many bytes the source is ahead, as far as they have come; negative if it is behind."""
        return flow.ceiling.at(self.now) - flow.receiver.line.at(self.now)

    def demand(self, flow: Flow) -> float:
        """The rate that a flow could use if it had its links for itself."""
        if flow.receiver.flow is not flow or not (flow.source.up and flow.receiver.up):
            return 0.0
        room = self.room(flow)
        return math.inf if room > CLOSE else flow.ceiling.rate if room > -CLOSE else 0.0

    def forecast(self, flow: Flow) -> None:
        """Draw a receiver's line anew, and foresee when it ends or meets its ceiling."""
        have, room = flow.receiver.line.at(self.now), self.room(flow)
        if abs(room) <= CLOSE:
            have, room = flow.ceiling.at(self.now), 0.0
        if have > self.nbytes - CLOSE:
            self.finish(flow)
            return
        rate = min(self.demand(flow), *(link.share() for link in flow.links if flow.active), LOCAL)
        self.draw(flow, have, rate)
        ahead = []
        if rate > 0:
            ahead.append((self.nbytes - have) / rate)
        if room * (rate - flow.ceiling.rate) > 0:
            ahead.append(room / (rate - flow.ceiling.rate))
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
            return  # no bend
        if rate > 0 and flow.answered is None:
            flow.answered = self.now
        if (rate > 0) != (old.rate > 0) and worker.flow is flow:
            self.listen(worker)
            if rate > 0:
                worker.silence += 1  # bytes come: nobody needs to wait for one
        for reader in worker.readers:
            self.bend(reader, worker.line)
