"""The deciding core under random orders of everything that can happen."""

from __future__ import annotations

from collections import Counter, defaultdict

import hypothesis.strategies as st
from hypothesis import assume, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dask_hoplite.core.directory import Directory
from dask_hoplite.core.events import (
    Abandoned,
    Declined,
    Finished,
    Lagging,
    Progressed,
    Pushed,
    Released,
    SourceFailed,
    Stalled,
    Wanted,
    WorkerJoined,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Cancel, NoSource, Pull, Wait

WORKERS = ["a0", "a1", "a2", "b0", "b1", "c0", "d0", "e0", "f0"]  # on the hosts a to f
KEYS = {"large": 10**9, "small": 1000}

workers = st.sampled_from(WORKERS)
keys = st.sampled_from(list(KEYS))
portions = st.integers(0, 10)


class Transfers(RuleBasedStateMachine):
    """Workers that ask, receive and fail in any order, some of which do not hear every answer.

    What is checked is worked out here from the rows of the trees and from what was told before, not
    by the code under test.
    """

    def __init__(self):
        super().__init__()
        self.holders: dict[str, set[str]] = {key: set() for key in KEYS}
        self.directory = Directory(lambda key: self.holders[key])
        self.now = 0.0
        self.epochs: set[int] = set()
        #: Of each receiver: epochs that it was told since it began, and sources that failed it.
        self.told: dict[tuple[str, str], list[int]] = {}
        self.failed: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    @initialize(away=st.sets(workers, max_size=2), holders=st.sets(workers, min_size=1, max_size=2))
    def begin(self, away, holders):
        for worker in sorted(set(WORKERS) - away):
            self.join(worker)
        for key in KEYS:
            self.holders[key] |= holders - away

    # What is true, from the rows

    def host(self, worker):
        return self.directory.hosts.get(worker)

    def row(self, key, worker):
        tree = self.directory.trees.get(key)
        return tree.transfers.get(worker) if tree is not None else None

    def ancestors(self, key, worker):
        seen = []
        row = self.row(key, worker)
        while row is not None and row.source is not None:
            assert row.source not in seen, f"cycle through {row.source}"
            seen.append(row.source)
            row = self.row(key, row.source)
        return seen

    def load(self, key):
        """How many receivers on others each host feeds, not counting the silent and the slow."""
        rows = self.directory.trees[key].transfers.values()
        return Counter(
            self.host(row.source)
            for row in rows
            if not row.silent
            and not row.slow
            and self.host(row.source) is not None
            and self.host(row.source) != self.host(row.receiver)
        )

    def able(self, key, receiver):
        """All that may feed a receiver."""
        tree = self.directory.trees[key]
        feeding = {w for w, row in tree.transfers.items() if row.source and not row.silent}
        return {
            worker
            for worker in feeding | self.holders[key] | set(tree.landed)
            if worker in self.directory.hosts
            and worker != receiver
            and worker not in self.failed[key, receiver]
            and receiver not in self.ancestors(key, worker)
        }

    # Telling the directory

    def handle(self, event):
        told = self.directory.handle(event, self.now)
        for instruction in told:
            if isinstance(instruction, Pull):
                self.check_pull(event, instruction)
            elif isinstance(instruction, Wait):
                assert self.row(instruction.key, instruction.receiver).source is not None
        return told

    def check_pull(self, event, pull):
        row = self.row(pull.key, pull.receiver)
        assert (row.source, row.epoch) == (pull.source, pull.epoch)
        if pull.epoch in self.epochs:
            # Who did not know is told again.
            assert isinstance(event, Lagging | Stalled | SourceFailed)
            assert event.epoch < pull.epoch
            return
        assert pull.epoch > max(self.epochs, default=0)
        self.epochs.add(pull.epoch)
        self.told.setdefault((pull.key, pull.receiver), []).append(pull.epoch)
        if isinstance(event, Pushed):
            return
        able = self.able(pull.key, pull.receiver)
        assert pull.source in able
        shunned = {source for one, source in self.directory.shunned if one == pull.receiver}
        able = able - shunned or able
        assert pull.source in able
        if isinstance(event, WorkerLeft):
            return  # others may have been decided about since
        host = self.host(pull.source)
        if host != self.host(pull.receiver):
            assert not any(self.host(worker) == self.host(pull.receiver) for worker in able)
            load = self.load(pull.key)
            free = [w for w in able if load[self.host(w)] < self.directory.trees[pull.key].fan_out]
            assert load[host] <= self.directory.trees[pull.key].fan_out or not free

    def ask(self, event):
        """An event that is answered, by one instruction for the one who asks."""
        [told] = self.handle(event)
        assert (told.key, told.receiver) == (event.key, event.receiver)
        if isinstance(told, NoSource):
            assert self.row(event.key, event.receiver) is None
            self.forget(event.key, event.receiver)
        return told

    def forget(self, key, receiver):
        self.told.pop((key, receiver), None)
        self.failed.pop((key, receiver), None)

    def receiver(self, data):
        """A receiver, and an epoch that it may know."""
        assume(self.told)
        key, worker = data.draw(st.sampled_from(sorted(self.told)))
        epoch = data.draw(st.sampled_from(self.told[key, worker][::-1]))  # mostly the latest
        return key, worker, epoch

    def report(self, data, portion, kind, *details):
        key, worker, epoch = self.receiver(data)
        return kind(key, worker, epoch, portion * KEYS[key] // 10, *details)

    # What can happen

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time_goes_by(self, seconds):
        self.now += seconds

    @rule(worker=workers)
    def join(self, worker):
        assert self.handle(WorkerJoined(worker, worker[0])) == []
        for failed in self.failed.values():
            failed.discard(worker)

    @rule(worker=workers)
    def leave(self, worker):
        for key in KEYS:
            self.holders[key].discard(worker)
            self.forget(key, worker)
            for receiver in WORKERS:
                row = self.row(key, receiver)
                if row is not None and row.source == worker:
                    self.failed[key, receiver].add(worker)
        for told in self.handle(WorkerLeft(worker)):
            assert told.receiver != worker
            if isinstance(told, NoSource):
                self.forget(told.key, told.receiver)

    @rule(key=keys, worker=workers)
    def holder_appears(self, key, worker):
        if worker in self.directory.hosts:
            self.holders[key].add(worker)

    @rule(key=keys, worker=workers)
    def holder_disappears(self, key, worker):
        self.holders[key].discard(worker)

    @rule(
        key=keys,
        worker=workers,
        portion=portions,
        expected=st.integers(1, 20),
        ahead=st.booleans(),
    )
    def want(self, key, worker, portion, expected, ahead):
        assume(worker in self.directory.hosts)
        event = Wanted(key, worker, KEYS[key], portion * KEYS[key] // 10, expected, ahead)
        if ahead and any(worker == receiver for _, receiver in self.told):
            assert self.handle(event) == []
        else:
            self.ask(event)

    @rule(key=keys, some=st.lists(workers, min_size=2, unique=True), expected=st.integers(1, 20))
    def many_want(self, key, some, expected):
        for worker in some:
            if worker in self.directory.hosts:
                self.ask(Wanted(key, worker, KEYS[key], expected=expected))

    @rule(key=keys, worker=workers)
    def push(self, key, worker):
        assume(worker in self.directory.hosts)
        self.forget(key, worker)
        told = self.ask(Pushed(key, worker, KEYS[key], "client"))
        assert told.source == "client"

    @precondition(lambda self: self.told)
    @rule(data=st.data(), portion=portions)
    def progress(self, data, portion):
        assert self.handle(self.report(data, portion, Progressed)) == []

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def one_falls_silent(self, data):
        """All others are heard, and one that it feeds gets nothing more."""
        key, worker, _ = self.receiver(data)
        silent = self.row(key, worker).source
        assume((key, silent) in self.told)
        self.now += 4.0
        for other in self.directory.trees[key].transfers.values():
            if other.receiver != silent:
                self.handle(Progressed(key, other.receiver, other.epoch, other.received))
        row = self.row(key, worker)
        self.failed[key, worker].add(silent)
        able = self.able(key, worker) - {silent}
        told = self.ask(Stalled(key, worker, row.epoch, row.received))
        assert isinstance(told, Pull) == bool(able)
        assert self.row(key, silent).silent

    @precondition(lambda self: self.told)
    @rule(data=st.data(), portion=portions, rate=st.sampled_from([0.0, 1.0, 10.0, 50.0]))
    def lag(self, data, portion, rate):
        event = self.report(data, portion, Lagging, rate)
        row = self.row(event.key, event.receiver)
        present, source = row.epoch == event.epoch, row.source
        told = self.ask(event)
        if not present:
            assert (told.source, told.epoch) == (source, row.epoch)
        elif isinstance(told, Wait):
            assert (told.epoch, row.source) == (event.epoch, source)
        else:  # never worse than before: nobody else, or the one that it tried to pass
            assert isinstance(told, Pull) and told.source != source

    @precondition(lambda self: self.told)
    @rule(data=st.data(), portion=portions)
    def stall(self, data, portion):
        event = self.report(data, portion, Stalled)
        row = self.row(event.key, event.receiver)
        source, failed = row.source, self.failed[event.key, event.receiver]
        if event.epoch != row.epoch:
            assert self.ask(event).epoch == row.epoch
            return
        failed.add(source)
        able = self.able(event.key, event.receiver)
        told = self.ask(event)
        if isinstance(told, Wait):
            assert told.epoch == event.epoch
            failed.discard(source)
        else:
            assert isinstance(told, Pull) == bool(able)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), portion=portions)
    def source_fails(self, data, portion):
        event = self.report(data, portion, SourceFailed, "reset")
        row = self.row(event.key, event.receiver)
        if event.epoch == row.epoch:
            self.failed[event.key, event.receiver].add(row.source)
            tree = self.directory.trees[event.key]
            tree.landed.pop(row.source, None)  # as the directory does, for all others too
            peer = tree.transfers.get(row.source)
            gone = peer is not None and peer.ahead
            able = self.able(event.key, event.receiver)
            told = self.ask(event)
            assert isinstance(told, Pull) == bool(able)
            if gone:  # it did not begin
                assert self.row(event.key, peer.receiver) is None
                self.forget(event.key, peer.receiver)
        else:
            told = self.ask(event)
            assert (told.source, told.epoch) == (row.source, row.epoch)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), known=st.booleans())
    def finish(self, data, known):
        key, worker, epoch = self.receiver(data)
        if known:  # Dask may hear of it before
            self.holders[key].add(worker)
        assert self.handle(Finished(key, worker, epoch, 0.001, 0.1)) == []
        assert self.row(key, worker) is None
        self.forget(key, worker)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), portion=portions)
    def abandon(self, data, portion):
        event = self.report(data, portion, Abandoned, "cancelled")
        assert self.handle(event) == []
        assert self.row(event.key, event.receiver) is None
        self.forget(event.key, event.receiver)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def decline(self, data):
        key, worker, epoch = self.receiver(data)
        present = epoch == self.row(key, worker).epoch
        assert self.handle(Declined(key, worker, epoch)) == []
        assert (self.row(key, worker) is None) == present
        if present:
            self.forget(key, worker)

    @rule(key=keys)
    def release(self, key):
        receiving = {worker for k, worker in self.told if k == key}
        told = self.handle(Released(key))
        assert all(isinstance(instruction, Cancel) for instruction in told)
        assert {instruction.receiver for instruction in told} == receiving
        assert key not in self.directory.trees
        for worker in receiving:
            self.forget(key, worker)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), kind=st.sampled_from([Progressed, Abandoned, Finished]))
    def report_of_another_generation(self, data, kind):
        key, worker, _ = self.receiver(data)
        before = self.row(key, worker).received
        details = {Progressed: (7,), Abandoned: (7, "cancelled"), Finished: (0.001, 0.1)}[kind]
        assert self.handle(kind(key, worker, self.told[key, worker][0] - 1, *details)) == []
        assert self.row(key, worker).received == before

    @rule(key=keys, worker=workers, epoch=st.integers(0, 3), kind=st.sampled_from(["f", "s"]))
    def stray_report(self, key, worker, epoch, kind):
        """From somebody who receives nothing, as far as anybody knows."""
        assume((key, worker) not in self.told)
        assert self.handle(Finished(key, worker, epoch, 0.001, 0.1)) == []
        if kind == "f":
            told = self.ask(SourceFailed(key, worker, epoch, 5, "reset"))
        else:
            told = self.ask(Stalled(key, worker, epoch, 5))
        assert isinstance(told, NoSource)

    # What is always true

    @invariant()
    def no_cycle(self):
        for key, tree in self.directory.trees.items():
            for worker in tree.transfers:
                assert worker not in self.ancestors(key, worker)

    @invariant()
    def rows_are_those_who_receive(self):
        rows = {(key, w) for key, tree in self.directory.trees.items() for w in tree.transfers}
        assert rows == set(self.told)
        for key, worker in rows:
            assert self.row(key, worker).epoch == self.told[key, worker][-1]
            assert self.row(key, worker).source is not None

    @invariant()
    def bookkeeping(self):
        for key, tree in self.directory.trees.items():
            fed, here = defaultdict(set), defaultdict(set)
            for worker, row in tree.transfers.items():
                fed[row.source].add(worker)
                here[self.host(worker)].add(worker)
            assert tree.children == fed  # so no receiver has two sources
            assert {host: on for host, on in tree._on_host.items() if on} == here
            assert +tree._load == self.load(key)
            assert min(tree._load.values(), default=0) >= 0

    def teardown(self):
        """When all are done and Dask knows it, nothing is left."""
        for key, worker in list(self.told):
            self.directory.handle(
                Finished(key, worker, self.told[key, worker][-1], 0.001, 0.1), self.now
            )
        for key, tree in self.directory.trees.items():
            assert not tree.transfers
            self.holders[key].update(tree.landed)
        self.directory.handle(WorkerJoined("z0", "z"), self.now)
        assert self.directory.trees == {}


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, derandomize=True
)
