"""The tree by which one object spreads: who feeds whom, and the choice of the next source."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dask_hoplite.core.events import Key


@dataclass(slots=True)
class Transfer:
    """One receiver's way to an object, from its first request until it has the whole of it."""

    key: Key
    receiver: str
    nbytes: int
    source: str | None = None
    epoch: int = 0
    depth: int = 0
    reason: str = ""
    path: str = ""  #: how the bytes went, once they have
    received: int = 0
    resumed_from: int = 0
    start: float = 0.0
    heard: float = 0.0  #: when the receiver last said anything
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
        self.transfers: dict[str, Transfer] = {}
        self.landed: set[str] = set()
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
        self.children[choice.source].add(transfer.receiver)
        host = self.hosts.get(choice.source)
        if host is not None and host != self.hosts.get(transfer.receiver):
            self._load[host] += 1
        self._offer(transfer)

    def disconnect(self, transfer: Transfer) -> None:
        """Take the edge to a receiver's source away, if there is one."""
        source, transfer.source = transfer.source, None
        if source is None:
            return
        self.children[source].discard(transfer.receiver)
        if not self.children[source]:
            del self.children[source]
        host = self.hosts.get(source)
        if host is not None and host != self.hosts.get(transfer.receiver):
            self._load[host] -= 1
            for worker in self._on_host[host]:
                if worker in self.transfers:
                    self._offer(self.transfers[worker])

    def remove(self, worker: str) -> Transfer | None:
        """Forget a receiver; those that it feeds keep their edge until they ask again."""
        transfer = self.transfers.pop(worker, None)
        if transfer is not None:
            self.disconnect(transfer)
            self._on_host[self.hosts.get(worker, "")].discard(worker)
        return transfer

    def land(self, transfer: Transfer) -> None:
        """A receiver has become a complete copy."""
        self.remove(transfer.receiver)
        self.landed.add(transfer.receiver)

    def orphans(self, source: str) -> list[Transfer]:
        """The receivers that a source feeds."""
        fed = self.children.get(source, ())
        return [self.transfers[receiver] for receiver in sorted(fed) if receiver in self.transfers]

    def is_below(self, worker: str, ancestor: str) -> bool:
        """Whether what a worker receives has passed, or will pass, through ``ancestor``."""
        if ancestor not in self.children:
            return False
        seen = 0
        while worker != ancestor:
            transfer = self.transfers.get(worker)
            if transfer is None or transfer.source is None:
                return False
            worker = transfer.source
            seen += 1
            assert seen <= len(self.transfers) + 1, f"cycle in {self!r}"
        return True

    def _offer(self, transfer: Transfer) -> None:
        self._pushes += 1
        heapq.heappush(self._open, (transfer.depth, self._pushes, transfer.receiver))

    # The choice

    def choose(self, transfer: Transfer, whole: Collection[str]) -> Choice | None:
        """Choose who feeds a receiver.

        1. Somebody on its own host, if there is anybody, so that an object crosses each host's
           network card once; of these the one that feeds the fewest.
        2. A complete copy on a host that feeds fewer than ``fan_out`` others.
        3. The receiver nearest to a complete copy, on a host that feeds fewer than ``fan_out``
           others: it sends on what it has, while the rest is still coming.
        4. Whoever's host feeds the fewest.

        A receiver is never fed by somebody whose bytes come through itself, nor again by a source
        that has failed it.

        Parameters
        ----------
        transfer : Transfer
            The receiver's.
        whole : collection of str
            Workers that hold the complete object.

        Returns
        -------
        Choice or None
            None if nobody is left.
        """
        whole = [w for w in whole if self._eligible(w, transfer)]
        host = self.hosts.get(transfer.receiver)
        here = [w for w in whole if self.hosts[w] == host]
        here += [w for w in self._on_host[host or ""] if self._may_feed(w, transfer)]
        if here:
            source = min(here, key=lambda w: (self._fed_by(w), self._depth(w), w))
            return Choice(source, self._depth(source), "on the same host")
        idle = [w for w in whole if self._load[self.hosts[w]] < self.fan_out]
        if idle:
            source = min(idle, key=lambda w: (self._load[self.hosts[w]], self._fed_by(w), w))
            return Choice(source, 0, "a complete copy that is free")
        source = self._nearest_open(transfer)
        if source is not None:
            return Choice(source, self._depth(source), "the nearest receiver that is free")
        rest = whole + [w for w in self.transfers if self._may_feed(w, transfer)]
        if not rest:
            return None
        source = min(rest, key=lambda w: (self._load[self.hosts[w]], self._depth(w), w))
        return Choice(source, self._depth(source), "all are busy; this one feeds the fewest")

    def _nearest_open(self, transfer: Transfer) -> str | None:
        """Pop candidates off the heap; what is skipped for this receiver alone goes back."""
        skipped = []
        found = None
        while self._open and found is None:
            entry = heapq.heappop(self._open)
            depth, _, worker = entry
            peer = self.transfers.get(worker)
            if peer is None or peer.depth != depth or worker not in self.hosts:
                continue  # an outdated offer
            if self._load[self.hosts[worker]] >= self.fan_out:
                continue  # it is offered anew when its host has a place again
            if peer is not transfer and self._may_feed(worker, transfer):
                found = worker
            skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._open, entry)
        return found

    def _eligible(self, worker: str, transfer: Transfer) -> bool:
        return (
            worker != transfer.receiver and worker in self.hosts and worker not in transfer.tried
        )

    def _may_feed(self, worker: str, transfer: Transfer) -> bool:
        """Whether a receiver of the object may feed another one."""
        peer = self.transfers.get(worker)
        return (
            peer is not None
            and peer.source is not None
            and self._eligible(worker, transfer)
            and not self.is_below(worker, transfer.receiver)
        )

    def _fed_by(self, worker: str) -> int:
        return len(self.children.get(worker, ()))

    def _depth(self, worker: str) -> int:
        transfer = self.transfers.get(worker)
        return 0 if transfer is None else transfer.depth
