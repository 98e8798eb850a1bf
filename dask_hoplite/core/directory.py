"""The directory: who receives what from whom, and what is to be done next.

Pure: no clock, no sockets, no event loop, no Dask. :meth:`Directory.handle` takes one event and the
present time, and returns instructions.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import singledispatchmethod
from typing import Any

from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.events import (
    Abandoned,
    Declined,
    Event,
    Finished,
    Key,
    Lagging,
    Measured,
    Progressed,
    Pushed,
    Released,
    SourceFailed,
    Stalled,
    Wanted,
    WorkerJoined,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Cancel, Instruction, NoSource, Pull, Wait
from dask_hoplite.core.record import Record
from dask_hoplite.core.tree import Choice, Transfer, Tree
from dask_hoplite.core.watch import FAIR, WINDOWS

#: After so many stall timeouts, a silent source is given up even if there is no other.
PATIENCE = 20

#: For so many stall timeouts, a source that gave a receiver nothing is taken only if need be.
SHUN = 40

#: To be fed past a slow one has helped if, after this share of a stall timeout, bytes come so many
#: times as fast. If not, the next trial is after two stall timeouts, then four, and so on.
TRIAL, GAIN = 0.35, 1.5

#: Less than this share of what a link should carry is clear at once. More, though too little, may
#: be a moment in which the whole machine was busy elsewhere, and has to be seen twice.
CLEAR = 0.25

#: By this share of a stall timeout, complaints that are due at once may come one after the other.
LATE = 1 / 20


class Directory:
    """Decides who gets which object from whom.

    Parameters
    ----------
    holders : callable of a key, giving a collection of str
        The workers that hold the complete object at this moment. It is asked at every decision and
        never remembered, since copies come and go without a word to the directory.
    cost : CostModel, optional
        What a hop costs.
    stall_timeout : float
        Seconds after which a receiver that gets nothing says so. One that was silent for twice as
        long is taken to be frozen or cut off.
    history : int
        How many ended transfers to remember for :meth:`log`.
    record : Record, optional
        Where to count, beyond what is remembered.

    Notes
    -----
    Each decision about a receiver has an epoch, from one counter that only grows. A receiver that
    asks with another epoch than its present one has not heard of the latest decision, and is told
    that again. What it has received is a fact in any epoch, but not in one from before its
    transfer began: that was about another generation of the key, and is dropped.
    """

    def __init__(
        self,
        holders: Callable[[Key], Collection[str]],
        *,
        cost: CostModel | None = None,
        stall_timeout: float = 1.5,
        history: int = 10_000,
        record: Record | None = None,
    ):
        self.holders = holders
        self.cost = cost or CostModel()
        self.stall_timeout = stall_timeout
        self._late = LATE * stall_timeout
        self._due = stall_timeout / WINDOWS + self._late  # when a first complaint has come
        self.hosts: dict[str, str] = {}
        self.crowds: Counter[str] = Counter()  # workers on each host
        self.trees: dict[Key, Tree] = {}
        self.epoch = 0
        self.record = record or Record()
        self.ended: deque[dict[str, Any]] = deque(maxlen=history)
        self.bytes_in: Counter[str] = Counter()
        self.bytes_out: Counter[str] = Counter()
        self.now = 0.0
        #: Receivers and sources between which nothing came, and until when that counts
        self.shunned: dict[tuple[str, str], float] = {}
        self._settling: dict[Key, None] = {}  # nobody receives them, but see :meth:`_tidy`

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event in, and say what is to be done.

        Parameters
        ----------
        event : Event
            What happened.
        now : float
            Seconds on any clock that does not run backwards.

        Returns
        -------
        list of Instruction
        """
        self.now = now
        for key in list(self._settling):
            self._tidy(self.trees[key])
        return self._handle(event)

    @singledispatchmethod
    def _handle(self, event: Event) -> list[Instruction]:
        raise TypeError(f"not an event: {event!r}")

    # Workers

    @_handle.register
    def _joined(self, event: WorkerJoined) -> list[Instruction]:
        if event.worker not in self.hosts:
            self.crowds[event.host] += 1
        self.hosts[event.worker] = event.host
        for pair in [pair for pair in self.shunned if event.worker in pair]:
            del self.shunned[pair]  # that was another life of it
        for tree in self.trees.values():
            for transfer in tree.transfers.values():
                transfer.tried.pop(event.worker, None)  # that was another life of it
        return []

    @_handle.register
    def _left(self, event: WorkerLeft) -> list[Instruction]:
        orphans: list[tuple[Tree, Transfer]] = []
        for tree in list(self.trees.values()):
            tree.landed.pop(event.worker, None)
            for orphan in tree.orphans(event.worker):
                orphan.tried[event.worker] = "left the cluster"
                orphan.before = (orphan.epoch, self._note(orphan, "source left", "source_left"))
                tree.disconnect(orphan)
                orphans.append((tree, orphan))
            gone = tree.transfers.get(event.worker)
            if gone is not None:
                self._end(tree, gone, "receiver left", "receiver_left")
            self._tidy(tree)
        if (host := self.hosts.pop(event.worker, None)) is not None:
            self.crowds[host] -= 1
        return [told for tree, orphan in orphans for told in self._decide(tree, orphan)]

    # Receivers

    @_handle.register
    def _wanted(self, event: Wanted) -> list[Instruction]:
        if event.ahead and self.receives(event.receiver):
            return []  # it may not begin at once, and others would wait for it
        tree = self._tree(event.key, event.nbytes)
        tree.receivers = max(event.expected, len(tree.transfers) + 1)
        tree.widen(self.cost.fan_out(event.nbytes, tree.receivers))
        transfer = tree.transfers.get(event.receiver)
        if transfer is None:
            transfer = self._begin(tree, event.receiver)
        self._hear(tree, transfer)
        transfer.ahead = event.ahead
        self._advance(transfer, event.received)
        return self._decide(tree, transfer)

    @_handle.register
    def _pushed(self, event: Pushed) -> list[Instruction]:
        tree = self._tree(event.key, event.nbytes)
        transfer = self._begin(tree, event.receiver)
        transfer.ahead = event.ahead
        return [self._connect(tree, transfer, Choice(event.origin, 0, "pushed from outside"))]

    @_handle.register
    def _progressed(self, event: Progressed) -> list[Instruction]:
        transfer = self._concerned(event)
        if transfer is not None:
            self._advance(transfer, event.received)
            transfer.rate = None
            self.trees[event.key].unslow(transfer)
        return []

    @_handle.register
    def _lagging(self, event: Lagging) -> list[Instruction]:
        """Find out where in the tree complaints begin, and let others pass whoever is slow there.

        That somebody is slow can be seen only from those around it: it complains, its source does
        not, and those that it feeds complain too.
        """
        transfer = self._present(event)
        if transfer is None:
            return self._overtaken(event)
        tree = self.trees[event.key]
        self._advance(transfer, event.received)
        first = transfer.rate is None
        again, transfer.rate = not first and not transfer.early, event.rate
        transfer.early = False
        passed, transfer.passed = transfer.passed, None
        if event.rate > GAIN * transfer.slow:
            tree.unslow(transfer)
        source = transfer.source
        peer = tree.transfers.get(source or "")
        if source is None:
            return self._decide(tree, transfer)
        if not event.rate:
            return self._stay(transfer, "nothing comes yet")
        if passed is not None and self.now - transfer.start < TRIAL * self.stall_timeout:
            transfer.passed = passed
            return self._stay(transfer, f"it is too early to say whether it helps to pass {source}")
        if passed is not None and passed.rate and event.rate < GAIN * passed.rate:
            # What both take from gives no more: it was not that one's fault.
            tree.failed_trials += 1
            tree.next_trial = self.now + self.stall_timeout * 2**tree.failed_trials
            tree.unslow(passed)
            why = f"to pass {passed.receiver} did not help"
            if tree.may_feed(passed.receiver, transfer):
                self._note(transfer, why, "source_busy")
                return [self._connect(tree, transfer, Choice(passed.receiver, passed.depth, why))]
            return self._stay(transfer, why)
        if tree.crowded(transfer) or tree.in_the_way(transfer, self.now - self._due):
            choice = self._choose(tree, transfer, without={source}, free=True)
            if choice is not None:
                self._note(transfer, "left a source that feeds others", "source_busy")
                return [self._connect(tree, transfer, choice)]
        if self.now < tree.next_trial:
            return self._stay(transfer, "to pass those who are slow has just not helped")
        if peer is not None and self._is_new(peer):
            return self._stay(transfer, f"{source} has just got another source")
        divided = transfer if peer is None or peer.rate is None else peer
        if self._is_divided(tree, divided):
            return self._stay(transfer, f"the link to {divided.receiver} carries other objects too")
        if first and event.rate >= CLEAR * self.cost.expected:
            return self._stay(transfer, "it may be slow for a moment only")
        above = tree.transfers.get(peer.source or "") if peer is not None else None
        too_early = max(self._silence_says_nothing(peer), self._silence_says_nothing(above))
        if too_early > 0:
            transfer.early = True
            return self._stay(transfer, "others may be about to complain", again=too_early)
        if peer is None or (peer.rate is None and again):
            tree.slow(transfer)  # if not, its source is, and nobody loses
            return self._stay(transfer, "slow, as nobody else on the way here is")
        if not peer.rate:
            return self._stay(transfer, f"{source} may be slow")
        if self.hosts.get(source) == self.hosts.get(transfer.receiver):
            return self._stay(transfer, "the whole host is slow")
        if above is not None and (above.rate is not None or self._is_new(above)):
            return self._stay(transfer, f"{source} waits for its own source")
        tree.slow(peer)
        slower = tree.below(peer.receiver) | {peer.receiver}
        choice = self._choose(tree, transfer, without=slower, free=True)
        if choice is None:
            return self._stay(transfer, f"{source} is slow, but all others are busy")
        self._note(transfer, "its source is slow", "source_slow")
        choice.reason = f"{choice.reason}, past {source}, which is slow"
        pull = self._connect(tree, transfer, choice)
        transfer.passed = peer
        return [pull]

    def _is_divided(self, tree: Tree, transfer: Transfer) -> bool:
        """Whether a receiver gets its share of a link that carries other objects, too."""
        source = self.hosts.get(transfer.source or "")
        host = self.hosts.get(transfer.receiver)
        others = [other for other in self.trees.values() if other is not tree]
        leaving = sum(other.leaving(source) for other in others) if source is not None else 0
        coming = sum(other.coming(host) for other in others) if host is not None else 0
        beside = max(leaving, coming)
        share = self.cost.expected / (1 + beside)
        return beside > 0 and (transfer.rate or 0.0) >= FAIR * share

    def _is_new(self, peer: Transfer) -> bool:
        """Whether a source has so new a source itself that nothing can be said of it yet."""
        return self.now - peer.changed < self.stall_timeout

    @_handle.register
    def _measured(self, event: Measured) -> list[Instruction]:
        """Tell a receiver what to expect, when all who began with it have said what they get."""
        transfer = self._present(event)
        if transfer is None:
            return self._overtaken(event)
        self._advance(transfer, event.received)
        self.cost.guess = max(self.cost.guess, event.rate)
        if not transfer.early and not self.cost.link:
            transfer.early = True
            return self._stay(transfer, "others may get more", again=self._late)
        transfer.early = False
        transfer.due = self.now + self._late
        why = "this is what others get"
        return [Wait(event.key, event.receiver, event.epoch, why, rate=self.cost.expected)]

    def _silence_says_nothing(self, peer: Transfer | None) -> float:
        """Seconds until a receiver would have complained, had it been slow from the start."""
        if peer is None or peer.rate is not None:
            return 0.0
        return min(peer.due - self.now, self._late)

    def _stay(self, transfer: Transfer, reason: str, again: float = 0.0) -> list[Instruction]:
        return [Wait(transfer.key, transfer.receiver, transfer.epoch, reason, again)]

    @_handle.register
    def _stalled(self, event: Stalled) -> list[Instruction]:
        transfer = self._present(event)
        if transfer is None:
            return self._overtaken(event)
        self._advance(transfer, event.received)
        tree = self.trees[event.key]
        source = transfer.source
        if source is None:
            return self._decide(tree, transfer)
        peer = tree.transfers.get(source)
        if peer is None and source not in self.hosts:
            # A push from outside: only whoever pushes can do something about it.
            return self._stay(transfer, "the sender is outside")
        transfer.rate = 0.0
        patience = PATIENCE * self.stall_timeout
        if self.now - max(tree.moved, transfer.moved) >= patience:
            whole = self._whole(tree)
            if whole <= {*transfer.tried, *(t.source for t in tree.transfers.values())}:
                # Those who have parts of it would be sent to each other, one after the other.
                transfer.tried |= dict.fromkeys(whole, f"gave nobody anything for {patience:.0f} s")
                return self._no_source(tree, transfer)
        why = f"sent nothing for {self.stall_timeout:.1f} s"
        if peer is not None:
            quiet = self.now - peer.heard
            if peer.rate is not None and quiet < 2 * self.stall_timeout:
                return self._stay(transfer, f"{source} waits for its own source")
            if self._is_new(peer):
                return self._stay(transfer, f"{source} has just got another source")
            if quiet > 0.9 * self.stall_timeout:
                # Its source is free for the one that it left waiting.
                tree.mute(peer)
                why = f"silent for {quiet:.1f} s"
        alone = self._choose(tree, transfer, without={source}) is None
        if alone and self.now - transfer.moved < patience:
            # It may be computing, serialising, or reading from its disk.
            return self._stay(transfer, f"{source} {why}, but there is no other source")
        return self._replace_source(tree, transfer, why, "source_silent")

    @_handle.register
    def _source_failed(self, event: SourceFailed) -> list[Instruction]:
        transfer = self._present(event)
        if transfer is None:
            return self._overtaken(event)
        self._advance(transfer, event.received)
        tree = self.trees[event.key]
        peer = tree.transfers.get(transfer.source or "")
        if peer is not None and peer.ahead:
            self._end(tree, peer, "did not begin", "abandoned")  # or others would be sent to it too
        return self._replace_source(tree, transfer, event.reason, "source_failed")

    @_handle.register
    def _finished(self, event: Finished) -> list[Instruction]:
        transfer = self._concerned(event)
        if transfer is None:
            return []
        tree = self.trees[event.key]
        # Of one that went on elsewhere, it is not known when the first byte came from there.
        if transfer.epoch == event.epoch and event.latency >= 0:
            transfer.latency = event.latency
        if transfer.latency is not None and transfer.keeps_busy:  # it came over the network
            self.cost.learn(
                latency=event.latency / max(transfer.depth, 1),
                nbytes=tree.nbytes - transfer.resumed_from,
                seconds=event.seconds,
            )
        self._advance(transfer, tree.nbytes)
        self.shunned.pop((event.receiver, transfer.source or ""), None)
        transfer.path = event.path
        self._note(transfer, "finished", "finished")
        tree.land(transfer, self.now)
        self._tidy(tree)
        return []

    @_handle.register
    def _abandoned(self, event: Abandoned) -> list[Instruction]:
        transfer = self._concerned(event)
        if transfer is not None:
            self._advance(transfer, event.received)
            self._end(self.trees[event.key], transfer, event.reason, "abandoned")
        return []

    @_handle.register
    def _declined(self, event: Declined) -> list[Instruction]:
        transfer = self._present(event)
        if transfer is not None:
            self._end(self.trees[event.key], transfer, "declined", "declined")
        return []

    @_handle.register
    def _released(self, event: Released) -> list[Instruction]:
        tree = self.trees.pop(event.key, None)
        self._settling.pop(event.key, None)
        if tree is None:
            return []
        instructions: list[Instruction] = []
        for transfer in tree.transfers.values():
            self._note(transfer, "released", "released")
            reason = "the object was released"
            instructions.append(Cancel(event.key, transfer.receiver, transfer.epoch, reason))
        return instructions

    # Decisions

    def _decide(self, tree: Tree, transfer: Transfer) -> list[Instruction]:
        """Find a source for a receiver that has none, or has asked for one again."""
        if transfer.source is not None:
            self._note(transfer, "asked again", "asked_again")
            tree.disconnect(transfer)
        choice = self._choose(tree, transfer)
        if choice is not None:
            return [self._connect(tree, transfer, choice)]
        return self._no_source(tree, transfer)

    def _no_source(self, tree: Tree, transfer: Transfer) -> list[Instruction]:
        tried = dict(transfer.tried)
        reason = "every source failed" if tried else "no worker holds it"
        self._end(tree, transfer, reason, "no_source")
        if tried:
            self.record.fail(key=tree.key, receiver=transfer.receiver, reason=reason, tried=tried)
        return [NoSource(tree.key, transfer.receiver, tried, reason)]

    def _choose(
        self, tree: Tree, transfer: Transfer, without: Collection[str] = (), *, free: bool = False
    ) -> Choice | None:
        """The best source for a receiver, apart from those that have failed it, and some more."""
        whole = self._whole(tree)
        tried = transfer.tried
        transfer.tried = {**tried, **dict.fromkeys(without, "")}
        able = transfer.tried
        if shunned := self._shunned_by(transfer.receiver):
            transfer.tried = {**able, **dict.fromkeys(shunned, "")}
        choice = tree.choose(transfer, whole, free=free)
        if choice is None and shunned:
            transfer.tried = able
            choice = tree.choose(transfer, whole, free=free)
        transfer.tried = tried
        return choice

    def _whole(self, tree: Tree) -> set[str]:
        """Who has all of it. Whoever landed has, though ``holders`` may not know yet."""
        self._forget_landed(tree)
        return {*self.holders(tree.key), *tree.landed}

    def _shunned_by(self, receiver: str) -> list[str]:
        """Sources that gave nothing to a receiver lately: only if there is nobody else."""
        for pair, until in list(self.shunned.items()):
            if until < self.now or not self.hosts.keys() >= set(pair):
                del self.shunned[pair]
        return [source for one, source in self.shunned if one == receiver]

    def _replace_source(
        self, tree: Tree, transfer: Transfer, why: str, outcome: str
    ) -> list[Instruction]:
        source = transfer.source
        if source is not None:
            if source in self.hosts and transfer.received == transfer.resumed_from:
                # Perhaps these two cannot reach each other, while others can.
                self.shunned[transfer.receiver, source] = self.now + SHUN * self.stall_timeout
            transfer.tried[source] = why
            tree.landed.pop(source, None)
            self._note(transfer, why, outcome)
            tree.disconnect(transfer)
        return self._decide(tree, transfer)

    def _connect(self, tree: Tree, transfer: Transfer, choice: Choice) -> Pull:
        if transfer.former not in ("", choice.source):
            self._reparented(transfer, choice)
        self.epoch += 1
        transfer.start = transfer.heard = self.now
        if transfer.epoch:
            transfer.changed = self.now
        transfer.resumed_from = transfer.received
        transfer.latency = None
        tree.connect(transfer, choice, self.epoch)
        pull = self._pull(transfer)
        transfer.due = math.inf if pull.rate == 0 else self.now + self._due
        return pull

    def _reparented(self, transfer: Transfer, choice: Choice) -> None:
        self.record.reparent(
            transfer.parted,
            transfer.received,
            key=transfer.key,
            nbytes=transfer.nbytes,
            receiver=transfer.receiver,
            former=transfer.former,
            source=choice.source,
            reason=choice.reason,
        )

    def _pull(self, transfer: Transfer) -> Pull:
        assert transfer.source is not None
        host = self.hosts.get(transfer.receiver)
        source = self.hosts.get(transfer.source)
        tree = self.trees[transfer.key]
        peer = tree.transfers.get(transfer.source)
        return Pull(
            transfer.key,
            transfer.receiver,
            transfer.source,
            transfer.epoch,
            transfer.reason,
            shares_host=self.crowds[host] > 1 if host is not None else False,
            hops=tree.receivers,
            early=peer is not None and peer.ahead,
            rate=self.cost.expected if source not in (None, host) else None,
        )

    # Bookkeeping

    def _tree(self, key: Key, nbytes: int) -> Tree:
        if key not in self.trees:
            self.trees[key] = Tree(key, nbytes, self.hosts)
        return self.trees[key]

    def _begin(self, tree: Tree, receiver: str) -> Transfer:
        known = tree.remove(receiver)
        if known is not None:
            self._note(known, "begun anew", "begun_anew")
        transfer = Transfer(tree.key, receiver, tree.nbytes, since=self.epoch)
        transfer.start = transfer.heard = transfer.moved = self.now
        tree.landed.pop(receiver, None)
        tree.add(transfer)
        return transfer

    def _end(self, tree: Tree, transfer: Transfer, status: str, outcome: str) -> None:
        self._note(transfer, status, outcome)
        tree.remove(transfer.receiver)
        self._tidy(tree)

    def _tidy(self, tree: Tree) -> None:
        """Keep no row that says only what Dask knows by itself."""
        if tree.transfers or self.trees.get(tree.key) is not tree:
            return
        self._forget_landed(tree)
        if tree.landed:
            self._settling[tree.key] = None  # look again at the next event
        else:
            self._settling.pop(tree.key, None)
            del self.trees[tree.key]

    def _forget_landed(self, tree: Tree) -> None:
        """Leave those who landed to Dask as soon as it knows them.

        Some it never does, for they have dropped their copy at once.
        """
        if tree.landed:
            known = set(self.holders(tree.key))
            for worker, since in list(tree.landed.items()):
                if worker in known or self.now - since > 10 * self.stall_timeout:
                    del tree.landed[worker]

    def _hear(self, tree: Tree, transfer: Transfer) -> None:
        transfer.heard = self.now
        transfer.ahead = False
        if transfer.silent:
            tree.unmute(transfer)

    def _concerned(self, event: Any) -> Transfer | None:
        """The transfer that a report is about, though it may not know of the latest decision."""
        tree = self.trees.get(event.key)
        transfer = tree.transfers.get(event.receiver) if tree is not None else None
        if tree is None or transfer is None or event.epoch <= transfer.since:
            return None
        self._hear(tree, transfer)
        self._credit(transfer, event)
        return transfer

    def _credit(self, transfer: Transfer, event: Any) -> None:
        """See to it that what came from a source that left counts as that one's.

        The receiver was given another source before it could say how far it was.
        """
        epoch, row = transfer.before
        if event.epoch != epoch or isinstance(event, Declined):
            return
        received = transfer.nbytes if isinstance(event, Finished) else event.received
        self._advance(transfer, received, row["source"])
        row["received"] = transfer.resumed_from = received

    def _present(self, event: Any) -> Transfer | None:
        """The transfer that a report is about, unless it was overtaken by another decision."""
        transfer = self._concerned(event)
        return transfer if transfer is not None and transfer.epoch == event.epoch else None

    def _overtaken(self, event: Lagging | Measured | Stalled | SourceFailed) -> list[Instruction]:
        """Answer a receiver that asks on behalf of an epoch that is over."""
        tree = self.trees.get(event.key)
        transfer = tree.transfers.get(event.receiver) if tree is not None else None
        if transfer is None:
            return [NoSource(event.key, event.receiver, {}, "the object was released")]
        if transfer.source is None:
            return self._decide(tree, transfer)  # type: ignore[arg-type]
        return [self._pull(transfer)]

    def _advance(self, transfer: Transfer, received: int, source: str | None = None) -> None:
        """Note how far a receiver is, thanks to its present source or an earlier one.

        Less than before means that it had to start again.
        """
        source = source or transfer.source
        gained = received - transfer.received
        transfer.received = received
        if gained > 0:
            transfer.moved = self.trees[transfer.key].moved = self.now
        if gained > 0 and source is not None:
            self.bytes_in[transfer.receiver] += gained
            self.record.received += gained
            if source in self.hosts:
                self.bytes_out[source] += gained

    def _note(self, transfer: Transfer, status: str, outcome: str) -> dict[str, Any]:
        """Remember that a receiver takes no longer from its source."""
        self.record.outcomes[outcome] += 1
        if transfer.source is not None:
            transfer.former, transfer.parted = transfer.source, outcome
        row = self._row(transfer, status, self.now)
        self.ended.append(row)
        return row

    # What people see

    def receives(self, worker: str) -> bool:
        """Whether anything is on its way to a worker."""
        return any(worker in tree.transfers for tree in self.trees.values())

    def _row(self, transfer: Transfer, status: str, stop: float | None) -> dict[str, Any]:
        return {
            "key": transfer.key,
            "source": transfer.source,
            "receiver": transfer.receiver,
            "nbytes": transfer.nbytes,
            "received": transfer.received,
            "resumed_from": transfer.resumed_from,
            "start": transfer.start,
            "stop": stop,
            "latency": transfer.latency,
            "status": status,
            "path": transfer.path,
            "reason": transfer.reason,
        }

    def log(self) -> list[dict[str, Any]]:
        """All transfers that are remembered, the running ones last. Rows are the caller's."""
        running = [
            self._row(transfer, "running", None)
            for tree in self.trees.values()
            for transfer in tree.transfers.values()
        ]
        return [*map(dict, self.ended), *running]
