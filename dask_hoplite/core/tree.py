"""The tree by which one object spreads: who feeds whom, and the choice of the next source."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_hoplite.core.events import Key


@dataclass(slots=True)
class Transfer:
    """One receiver's way to an object, from its first request until it has the whole of it."""

    key: Key
    receiver: str
    nbytes: int
    source: str | None = None
    former: str = ""  #: the source before
    parted: str = ""  #: and how that one ended
    epoch: int = 0
    depth: int = 0
    reason: str = ""
    path: str = ""  #: how the bytes went, once they have
    received: int = 0
    resumed_from: int = 0
    start: float = 0.0
    latency: float | None = None  #: seconds to the first byte from this source, once it is known
    changed: float = -math.inf  #: when it got another source than its first
    heard: float = 0.0  #: when the receiver last said anything
    moved: float = 0.0  #: when it last had more bytes than before
    silent: bool = False  #: it seems to be frozen or cut off
    rate: float | None = None  #: bytes per second, if it has complained that these are too few
    early: bool = False  #: what it said came before others could have said the same
    due: float = 0.0  #: when it has complained, if bytes come too slowly
    slow: float = 0.0  #: bytes per second, if it is at fault itself: others pass it
    passed: Transfer | None = None  #: the slow one in whose place it is fed, on trial
    ahead: bool = False  #: the receiver has not shown yet that it knows of it
    since: int = 0  #: all epochs of this transfer are greater
    keeps_busy: str | None = None  #: host in whose load it is counted
    before: tuple[int, dict[str, Any]] = (0, {})  #: epoch and row of a source that left
    tried: dict[str, str] = field(default_factory=dict)  #: sources that failed it, and why


@dataclass(slots=True)
class Choice:
    """A source, how many hops it is away from a whole copy, and why it was taken."""

    source: str
    depth: int
    reason: str


class Tree:
    """Receivers of one object and the edges between them.

    Complete copies are not kept here but given to :meth:`choose` by the caller, who knows them at
    that moment; only those that just landed, and that nobody else knows of yet, are.

    Parameters
    ----------
    key : Key
        The object.
    nbytes : int
        Its size.
    hosts : mapping of str to str
        The host of each living worker (shared with the directory, which keeps it up to date).
    """

    def __init__(self, key: Key, nbytes: int, hosts: Mapping[str, str]):
        self.key = key
        self.nbytes = nbytes
        self.hosts = hosts
        self.fan_out = 1
        self.failed_trials = 0  #: how often it has not helped to pass one that seemed to be slow
        self.next_trial = -math.inf  #: when it may be tried again
        self.moved = -math.inf  #: when anybody got anything
        self.receivers = 1  #: about how many there are, or will be
        self.transfers: dict[str, Transfer] = {}
        self.landed: dict[str, float] = {}  # and when
        self.children: defaultdict[str, set[str]] = defaultdict(set)
        self._on_host: defaultdict[str, set[str]] = defaultdict(set)
        self._load: Counter[str] = Counter()  # children on other hosts, by the source's host
        self._open: list[tuple[int, int, str]] = []  # heap of receivers that may be sources
        self._pushes = 0

    def __repr__(self) -> str:
        return f"<Tree {self.key!r}: {len(self.transfers)} receiving, {len(self.landed)} landed>"

    # Edges

    def add(self, transfer: Transfer) -> None:
        """Count a receiver in, not fed by anybody yet."""
        self.transfers[transfer.receiver] = transfer
        host = self.hosts.get(transfer.receiver)
        if host is not None:
            self._on_host[host].add(transfer.receiver)

    def connect(self, transfer: Transfer, choice: Choice, epoch: int) -> None:
        """Let a receiver be fed by the chosen source."""
        self.disconnect(transfer)
        transfer.source = choice.source
        transfer.depth = choice.depth + 1
        transfer.reason = choice.reason
        transfer.epoch = epoch
        transfer.rate = transfer.passed = None
        transfer.early = False
        self.children[choice.source].add(transfer.receiver)
        if not transfer.silent:  # or else when it is heard again
            self._count(transfer)
            self._offer(transfer)

    def disconnect(self, transfer: Transfer) -> None:
        """Take the edge to a receiver's source away, if there is one."""
        source, transfer.source = transfer.source, None
        if source is None:
            return
        self.children[source].discard(transfer.receiver)
        if not self.children[source]:
            del self.children[source]
        self._discount(transfer)

    def mute(self, transfer: Transfer) -> None:
        """A receiver is silent: do not offer it as a source, nor count it as a load to its own."""
        transfer.silent = True
        self._discount(transfer)

    def unmute(self, transfer: Transfer) -> None:
        """A silent receiver is there again, and still fed by the same source."""
        transfer.silent = False
        if transfer.source is not None:
            self._count(transfer)
            self._offer(transfer)

    def slow(self, transfer: Transfer) -> None:
        """Offer a receiver no longer, nor count it as a load: it takes little of its source's."""
        transfer.slow = transfer.slow or transfer.rate or 0.0
        self._discount(transfer)

    def unslow(self, transfer: Transfer) -> None:
        """A receiver that seemed to be slow is as fast as others."""
        was_slow, transfer.slow = transfer.slow, 0.0
        if was_slow and transfer.source is not None and not transfer.silent:
            self._count(transfer)
            self._offer(transfer)

    def crowded(self, transfer: Transfer) -> bool:
        """Whether a receiver's source is on a host that feeds more than it should at a time."""
        return transfer.keeps_busy is not None and self._load[transfer.keeps_busy] > self.fan_out

    def leaving(self, host: str) -> int:
        """How many receivers on other hosts a host feeds at the moment."""
        return self._load[host]

    def coming(self, host: str) -> int:
        """How many receivers on a host are fed by other hosts at the moment."""
        here = (self.transfers.get(worker) for worker in self._on_host.get(host, ()))
        return sum(transfer is not None and transfer.keeps_busy is not None for transfer in here)

    def in_the_way(self, transfer: Transfer, since: float) -> bool:
        """Whether a slow receiver takes from a source that since then feeds another one well."""
        fed = self.children.get(transfer.source or "", ())
        others = [self.transfers[w] for w in fed if w != transfer.receiver and w in self.transfers]
        well = [other for other in others if other.rate is None and other.start <= since]
        return bool(transfer.slow) and any(not other.slow for other in well)

    def widen(self, fan_out: int) -> None:
        """Let hosts feed another number of others at a time."""
        if fan_out > self.fan_out:
            self.fan_out = fan_out
            for transfer in self.transfers.values():
                self._offer(transfer)  # many had no place before
        self.fan_out = fan_out

    def remove(self, worker: str) -> Transfer | None:
        """Forget a receiver; those that it feeds keep their edge until they ask again."""
        transfer = self.transfers.pop(worker, None)
        if transfer is not None:
            self.disconnect(transfer)
            self._on_host[self.hosts.get(worker, "")].discard(worker)
        return transfer

    def land(self, transfer: Transfer, now: float) -> None:
        """A receiver has become a complete copy."""
        self.remove(transfer.receiver)
        self.landed[transfer.receiver] = now

    def orphans(self, source: str) -> list[Transfer]:
        """The receivers that a source feeds."""
        fed = self.children.get(source, ())
        return [self.transfers[receiver] for receiver in sorted(fed) if receiver in self.transfers]

    def below(self, worker: str) -> set[str]:
        """Those whose bytes have passed, or will pass, through a worker."""
        found: set[str] = set()
        ahead = [worker]
        while ahead:
            for child in self.children.get(ahead.pop(), ()):
                if child not in found:
                    found.add(child)
                    ahead.append(child)
        return found

    def _count(self, transfer: Transfer) -> None:
        """Count a transfer as a load to its source's host, if it leaves that host."""
        host = self.hosts.get(transfer.source or "")
        if transfer.slow or transfer.keeps_busy is not None:
            return
        if host is not None and host != self.hosts.get(transfer.receiver):
            self._load[host] += 1
            transfer.keeps_busy = host

    def _discount(self, transfer: Transfer) -> None:
        host, transfer.keeps_busy = transfer.keeps_busy, None
        if host is not None:
            self._load[host] -= 1
            for worker in sorted(self._on_host[host]):
                if worker in self.transfers:
                    self._offer(self.transfers[worker])

    def _offer(self, transfer: Transfer) -> None:
        self._pushes += 1
        heapq.heappush(self._open, (transfer.depth, self._pushes, transfer.receiver))

    # The choice

    def choose(
        self, transfer: Transfer, whole: Collection[str], *, free: bool = False
    ) -> Choice | None:
        """Choose who feeds a receiver.

        1. Somebody on its own host, if there is anybody, so that an object crosses each host's
           network card once; of these the one that feeds the fewest.
        2. A complete copy on a host that feeds fewer than ``fan_out`` others.
        3. The receiver nearest to a complete copy, on a host that feeds fewer than ``fan_out``
           others: it sends on what it has, while the rest is still coming. Not one that is slow.
        4. Whoever's host feeds the fewest.

        A receiver is never fed by somebody whose bytes come through itself, nor again by a source
        that has failed it.

        Parameters
        ----------
        transfer : Transfer
            The receiver's.
        whole : collection of str
            Workers that hold the complete object.
        free : bool
            Whether to do without the last of these rules.

        Returns
        -------
        Choice or None
            None if nobody is left.
        """
        below = self.below(transfer.receiver)
        whole = [w for w in whole if w not in below and self._eligible(w, transfer)]
        if not whole and len(below) + 1 >= len(self.transfers):
            return None  # soon known, as when the last copy is lost
        host = self.hosts.get(transfer.receiver)
        here = [w for w in whole if self.hosts[w] == host]
        here += [w for w in self._on_host[host or ""] if self._may_feed(w, transfer, below)]
        if here:
            source = min(here, key=lambda w: (self._fed_by(w), self._depth(w), w))
            return Choice(source, self._depth(source), "on the same host")
        idle = [w for w in whole if self._load[self.hosts[w]] < self.fan_out]
        if idle:
            source = min(idle, key=lambda w: (self._load[self.hosts[w]], self._fed_by(w), w))
            return Choice(source, 0, "a complete copy that is free")
        nearest = self._nearest_open(transfer, below)
        if nearest is not None:
            return Choice(nearest, self._depth(nearest), "the nearest receiver that is free")
        if free:
            return None
        rest = whole + [w for w in self.transfers if self._may_feed(w, transfer, below)]
        if not rest:
            return None
        source = min(rest, key=lambda w: (self._load[self.hosts[w]], self._depth(w), w))
        return Choice(source, self._depth(source), "all are busy; this one feeds the fewest")

    def _nearest_open(self, transfer: Transfer, below: set[str]) -> str | None:
        """Pop candidates off the heap; what is skipped for this receiver alone goes back."""
        skipped = []
        found = None
        while self._open and found is None:
            entry = heapq.heappop(self._open)
            depth, _, worker = entry
            peer = self.transfers.get(worker)
            if peer is None or peer.depth != depth or peer.slow or worker not in self.hosts:
                continue  # an outdated offer
            if self._load[self.hosts[worker]] >= self.fan_out:
                continue  # it is offered anew when its host has a place again
            if peer is not transfer and self._may_feed(worker, transfer, below):
                found = worker
            skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._open, entry)
        return found

    def may_feed(self, worker: str, transfer: Transfer) -> bool:
        """Whether a receiver of the object may feed another one."""
        return self._may_feed(worker, transfer, self.below(transfer.receiver))

    def _eligible(self, worker: str, transfer: Transfer) -> bool:
        return worker != transfer.receiver and worker in self.hosts and worker not in transfer.tried

    def _may_feed(self, worker: str, transfer: Transfer, below: set[str]) -> bool:
        peer = self.transfers.get(worker)
        return (
            peer is not None
            and peer.source is not None
            and not peer.silent
            and worker not in below
            and self._eligible(worker, transfer)
        )

    def _fed_by(self, worker: str) -> int:
        return len(self.children.get(worker, ()))

    def _depth(self, worker: str) -> int:
        transfer = self.transfers.get(worker)
        return 0 if transfer is None else transfer.depth
