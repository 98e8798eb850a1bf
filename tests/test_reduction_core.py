"""The planner of reductions: what it chooses, and random orders of everything that can happen."""

from __future__ import annotations

import itertools
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import assume, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.events import (
    Broken,
    Combined,
    Combining,
    Due,
    Gone,
    Look,
    Missing,
    Promoted,
    Ready,
    Returned,
    Rooted,
    Silent,
    Unfit,
    WorkerLeft,
)
from dask_hoplite.core.instructions import Ask, Combine, Done, Fail, Forget, Later
from dask_hoplite.core.reduction import FAILURES, Reduction

KEY = "sum"


class Cluster:
    """Workers, what they hold, and what they were told about one reduction.

    Each operand ``x...`` is held by the worker of the same name, if nothing else is said. A
    worker's host is the first letter of its name.
    """

    def __init__(self, workers, operands=None, count=None, *, nbytes=10**9, **plan):
        self.now = 0.0
        self.hosts = {worker: worker[0] for worker in workers}
        if operands is None:
            operands = {f"x{worker}": [worker] for worker in workers}
        self.holders = {key: set(holders) for key, holders in operands.items()}
        self.plan = Reduction(
            KEY,
            list(operands),
            len(operands) if count is None else count,
            self.holders.__getitem__,
            self.hosts,
            lambda key: nbytes,
            itertools.count(1).__next__,
            **plan,
        )
        self.nodes: dict[int, Combine] = {}
        self.done: set[int] = set()
        self.timers: list[float] = []
        self.asked: set[str] = set()
        self.end: Done | Fail | None = None

    def handle(self, event):
        told = self.plan.handle(event, self.now)
        for instruction in told:
            self.take_in(instruction)
        return told

    def take_in(self, told):
        assert self.end is None
        if isinstance(told, Combine):
            self.check(told)
            self.nodes[told.node] = told
        elif isinstance(told, Forget):
            assert self.nodes.pop(told.node).worker == told.worker
            self.done.discard(told.node)
        elif isinstance(told, Later):
            self.timers.append(self.now + told.seconds)
        elif isinstance(told, Ask):
            self.asked.add(told.worker)
        else:
            assert isinstance(told, Done | Fail)
            self.end = told

    def check(self, told):
        assert told.node > max(self.nodes, default=0)
        assert told.worker in self.hosts
        assert told.worker not in self.asked
        assert all(told.worker in self.holders[key] for key in told.operands)
        if not told.ring:
            assert all(self.nodes[number].worker == worker for worker, number in told.sources)
        users = Counter(n for node in [*self.nodes.values(), told] for _, n in node.sources)
        assert set(users.values()) <= {1}
        placed = Counter(key for node in [*self.nodes.values(), told] for key in node.operands)
        assert set(placed.values()) <= {1}
        if told.count:
            assert told.count == self.plan.count
            assert told.ring or told.worker == self.plan.root
            if not told.ring:
                assert len(self.contents(told)) == told.count

    def contents(self, told):
        """The operands in a node, and in all that it takes from."""
        found, ahead = list(told.operands), [number for _, number in told.sources]
        while ahead:
            node = self.nodes[ahead.pop()]
            found += node.operands
            ahead += [number for _, number in node.sources]
        return found

    # What can happen

    def ready(self, *keys):
        return [told for key in keys for told in self.handle(Ready(KEY, key))]

    def root(self, worker):
        return self.handle(Rooted(KEY, worker))

    def due(self):
        self.timers.sort()
        self.now = max(self.now, self.timers.pop(0))
        return self.handle(Due(KEY))

    def all_ready(self, root):
        self.ready(*self.holders)
        return self.root(root)

    def combined(self, number, nbytes=100):
        self.done.add(number)
        return self.handle(Combined(KEY, self.nodes[number].worker, number, 0.1, nbytes))

    def combining(self, number, *received, made=0):
        return self.handle(Combining(KEY, self.nodes[number].worker, number, received, made))

    def broken(self, number, source, gone=False):
        return self.handle(Broken(KEY, self.nodes[number].worker, number, source, "reset", gone))

    def missing(self, number):
        return self.handle(Missing(KEY, self.nodes[number].worker, number, "not here"))

    def leave(self, worker):
        del self.hosts[worker]
        self.asked.discard(worker)
        for holders in self.holders.values():
            holders.discard(worker)
        return self.handle(WorkerLeft(worker))

    def returned(self, worker):
        self.asked.discard(worker)
        return self.handle(Returned(KEY, worker))

    def look(self):
        """The workers that are asked. What becomes of that is told by itself."""
        told = self.plan.handle(Look(KEY), self.now)
        assert all(isinstance(each, Ask) for each in told)
        return {each.worker for each in told}

    def silent(self, worker):
        self.asked.add(worker)
        return self.handle(Silent(KEY, worker))

    # What is planned

    def chain(self):
        """The workers on the way from the first node to the root."""
        [last] = [node for node in self.nodes.values() if node.count]
        way = [last]
        while way[-1].sources:
            [(_, number)] = way[-1].sources
            way.append(self.nodes[number])
        return [node.worker for node in reversed(way)]

    def at(self, worker):
        """The latest node of a worker."""
        return max(number for number, node in self.nodes.items() if node.worker == worker)

    def finish(self):
        """Nothing goes wrong from now on."""
        for _ in range(1000):
            if self.end is not None:
                break
            able = [
                number
                for number, node in self.nodes.items()
                if number not in self.done
                and (node.ring or self.done.issuperset(n for _, n in node.sources))
            ]
            if able:
                self.combined(able[0])
            elif self.timers:
                self.due()
            else:
                break
        return self.end


SMALL = {"nbytes": 100, "cost": CostModel(latency=0.001, bandwidth=1e9)}

# Choices


def test_large_objects_take_a_chain_through_the_hosts():
    cluster = Cluster(["b1", "a1", "c1", "b0", "a0", "c0"])
    cluster.all_ready("b0")
    chain = cluster.chain()
    assert chain[-1] == "b0"
    assert len(list(itertools.groupby(chain, key=lambda worker: worker[0]))) == 3
    [final] = [node for node in cluster.nodes.values() if node.count]
    assert final.operands == ("xb0",)
    assert final.hops == 6
    assert cluster.finish().contributors == tuple(cluster.holders)


def test_each_worker_combines_its_own_first():
    cluster = Cluster(["a0", "b0"], {"x": ["a0"], "y": ["b0"], "z": ["a0"]})
    cluster.all_ready("b0")
    assert [node.operands for node in cluster.nodes.values()] == [("x", "z"), ("y",)]


def test_few_workers_if_there_are_copies():
    cluster = Cluster(["a0", "b0", "c0"], {"x": ["a0", "c0"], "y": ["b0", "c0"], "z": ["c0"]})
    cluster.all_ready("c0")
    [node] = cluster.nodes.values()
    assert (node.worker, node.operands, node.sources) == ("c0", ("x", "y", "z"), ())


def test_a_root_without_operands():
    cluster = Cluster(["a0", "b0"], {"x": ["a0"]})
    cluster.all_ready("b0")
    assert cluster.chain() == ["a0", "b0"]
    assert cluster.finish() == Done(KEY, ("x",))


def test_small_objects_take_a_bush():
    cluster = Cluster([f"{host}0" for host in "abcdefgh"], **SMALL)
    cluster.all_ready("c0")
    assert [node.hops for node in cluster.nodes.values() if node.count] == [2]
    assert cluster.finish().contributors == tuple(cluster.holders)


def test_a_given_degree():
    cluster = Cluster([f"{host}0" for host in "abcdefg"], degree=2)
    cluster.all_ready("a0")
    assert sorted(len(node.sources) for node in cluster.nodes.values()) == [0, 0, 0, 0, 2, 2, 2]


def test_in_the_order_given():
    operands = {"x0": ["b0"], "x1": ["a0"], "x2": ["a0", "c0"], "x3": ["b0"]}
    cluster = Cluster(["a0", "b0", "c0"], operands, ordered=True)
    cluster.root("a0")
    cluster.ready("x3", "x1", "x2")
    assert not cluster.nodes and not cluster.timers
    cluster.ready("x0")
    assert [(node.worker, node.operands) for node in cluster.nodes.values()] == [
        ("b0", ("x0",)),
        ("a0", ("x1", "x2")),
        ("b0", ("x3",)),
        ("a0", ()),
    ]
    assert cluster.chain() == ["b0", "a0", "b0", "a0"]


def test_in_the_order_given_it_grows_too():
    cluster = Cluster(["a0", "b0", "c0"], ordered=True)
    cluster.ready("xb0", "xa0")
    cluster.due()
    assert [node.operands for node in cluster.nodes.values()] == [("xa0",), ("xb0",)]
    cluster.ready("xc0")
    cluster.root("c0")
    assert cluster.chain() == ["a0", "b0", "c0"]


def test_the_first_that_are_ready():
    cluster = Cluster(["a0", "b0", "c0", "d0"], count=2)
    cluster.root("a0")
    cluster.ready("xd0", "xb0", "xc0")
    assert cluster.chain() == ["d0", "b0", "a0"] or cluster.chain() == ["b0", "d0", "a0"]
    assert cluster.finish() == Done(KEY, ("xb0", "xd0"))


def test_it_grows_as_operands_become_ready():
    cluster = Cluster(["a0", "b0", "c0", "d0"])
    told = cluster.ready("xc0")
    assert told == [Later(KEY, pytest.approx(0.1))], "one per cent of 10 s"
    assert cluster.ready("xb0") == []
    assert [told.worker for told in cluster.due()] == ["c0", "b0"]
    cluster.ready("xd0")
    [told] = cluster.due()
    assert told.sources == (("b0", 2),)
    cluster.ready("xa0")
    cluster.root("a0")
    assert cluster.chain() == ["c0", "b0", "d0", "a0"]


def test_what_the_root_has_waits_for_the_end():
    cluster = Cluster(["a0", "b0", "c0", "d0"], count=3)
    cluster.root("a0")
    cluster.ready("xa0")
    assert cluster.due() == []
    cluster.ready("xb0")
    [told] = cluster.due()
    assert told.operands == ("xb0",)
    cluster.ready("xc0")
    assert cluster.chain() == ["b0", "c0", "a0"]
    assert cluster.finish().contributors == ("xa0", "xb0", "xc0")


def test_a_host_that_is_busy_with_one_sum_gathers_for_the_next():
    cluster = Cluster(["a0", "a1", "a2", "b0", "c0"])
    cluster.ready("xa0")
    cluster.due()
    cluster.ready("xa1", "xb0")
    told = cluster.due()
    assert [each.worker for each in told if isinstance(each, Combine)] == ["b0"]
    assert cluster.timers == [pytest.approx(0.1 + 10)]
    cluster.ready("xa2")
    cluster.due()
    [later] = cluster.timers
    assert later == pytest.approx(0.1 + 10)
    told = cluster.due()
    assert [each.worker for each in told] == ["a1", "a2"]


def test_a_part_that_is_there_joins_its_host():
    """It is taken where that costs nothing, not at the end of the chain."""
    cluster = Cluster(["a0", "a1", "b0", "c0"])
    cluster.ready("xa0")
    cluster.due()
    cluster.ready("xb0", "xc0", "xa1")
    cluster.root("c0")
    node = cluster.nodes[cluster.at("a1")]
    assert ("a0", 1) in node.sources
    crossing = [
        (worker[0], node.worker[0])
        for node in cluster.nodes.values()
        for worker, _ in node.sources
        if worker[0] != node.worker[0]
    ]
    assert len(crossing) == 2


# The ring


def ring():
    cluster = Cluster(["a0", "a1", "b0", "c0"], ring=True)
    cluster.all_ready("b0")
    return cluster


def test_a_ring():
    cluster = ring()
    nodes = list(cluster.nodes.values())
    assert [node.index for node in nodes] == [0, 1, 2, 3]
    assert {node.ring for node in nodes} == {4}
    assert {node.count for node in nodes} == {4}
    for before, node in zip([nodes[-1], *nodes], nodes, strict=False):
        assert node.sources == ((before.worker, before.node),)
    hosts = [node.worker[0] for node in nodes]
    assert len(list(itertools.groupby(hosts))) == 3
    for number in list(cluster.nodes)[1:]:
        assert cluster.combined(number) == []
    assert cluster.combined(nodes[0].node) == [Done(KEY, tuple(cluster.holders))]


def test_a_ring_that_breaks_becomes_a_tree():
    cluster = ring()
    cluster.combined(cluster.at("a0"))
    told = cluster.missing(cluster.at("c0"))
    assert sum(isinstance(each, Forget) for each in told) == 4
    assert cluster.chain()[-1] == "b0"
    assert cluster.finish().contributors == tuple(cluster.holders)


def test_a_ring_keeps_its_root():
    cluster = ring()
    assert cluster.root("b0") == []
    assert cluster.root("c0") == []
    told = cluster.root(None)
    assert {type(each) for each in told} == {Forget}
    cluster.root("a0")
    assert all(node.ring for node in cluster.nodes.values()), "nothing is wrong with it"


def test_no_ring_if_some_are_early():
    cluster = Cluster(["a0", "b0", "c0", "d0"], ring=True)
    cluster.ready("xa0")
    cluster.due()
    cluster.ready("xb0", "xc0", "xd0")
    cluster.root("d0")
    assert cluster.chain() == ["a0", *cluster.chain()[1:3], "d0"]


# Faults


def running():
    """A chain from a0 to d0, in which a0 is done."""
    cluster = Cluster(["a0", "b0", "c0", "d0", "e0"], {f"x{w}": [f"{w}0"] for w in "abcd"})
    cluster.all_ready("d0")
    first = cluster.chain()[0]
    return cluster, cluster.chain(), cluster.at(first)


def test_only_ancestors_of_the_lost_start_again():
    cluster, chain, first = running()
    cluster.combined(first)
    second = cluster.at(chain[1])
    cluster.combined(second)
    told = cluster.leave(chain[2])
    assert {each.node for each in told if isinstance(each, Forget)} == {3, 4}
    assert set(cluster.nodes) == {first, second}
    lost = f"x{chain[2][0]}"
    cluster.holders[lost].add("e0")
    cluster.root("d0")
    cluster.ready(lost)
    assert cluster.chain() == [*chain[:2], "e0", "d0"]
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_what_is_done_stands_for_the_dead():
    cluster, chain, first = running()
    cluster.combined(first)
    cluster.combined(cluster.at(chain[1]))
    assert cluster.leave(chain[0]) == []
    assert cluster.handle(Gone(KEY, f"x{chain[0][0]}", "lost")) == []
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_what_was_taken_by_one_that_is_lost_is_not_taken_again():
    """Found by simulation: the third stands for the first, though the second is lost."""
    cluster, chain, _ = running()
    for worker in chain[:3]:
        cluster.combined(cluster.at(worker))
    assert cluster.leave(chain[1]) == []
    cluster.leave(chain[3])
    cluster.holders[f"x{chain[3][0]}"].add("e0")
    cluster.ready(f"x{chain[3][0]}")
    cluster.root("e0")
    assert cluster.chain() == [chain[0], chain[1], chain[2], "e0"]
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_a_spare_takes_the_lost_place():
    cluster = Cluster(["a0", "b0", "c0", "d0"], count=2)
    cluster.root("d0")
    cluster.ready("xa0", "xb0", "xc0")
    assert "c0" not in cluster.chain()
    cluster.leave("a0")
    assert sorted(cluster.chain()) == ["b0", "c0", "d0"]
    assert cluster.finish() == Done(KEY, ("xb0", "xc0"))


def test_another_root():
    cluster, _, first = running()
    cluster.combined(first)
    cluster.root(None)
    cluster.root("e0")
    assert cluster.chain()[-1] == "e0"
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_a_silent_worker_is_done_without_until_it_answers():
    cluster, chain, _ = running()
    second, third, fourth = map(cluster.at, chain[1:])
    for _ in range(4):
        cluster.now += 1.5
        for number in (third, fourth):
            if number in cluster.nodes:
                cluster.combining(number, 50, made=50)
    assert cluster.asked == {chain[1]}
    assert second not in cluster.nodes and third not in cluster.nodes
    assert cluster.end is None
    cluster.now += 10
    cluster.returned(chain[1])
    assert not cluster.plan.apart, "it was frozen"
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_a_root_that_does_not_answer():
    cluster, chain, _ = running()
    for worker in chain[1:-1]:
        cluster.combined(cluster.at(worker))
    assert cluster.look() == set()
    cluster.now += 2
    cluster.combining(cluster.at("d0"), 50, made=50)
    assert cluster.look() == set(), "it has said something"
    cluster.now += 3
    assert cluster.look() == {"d0"}
    before = dict(cluster.nodes)
    told = cluster.silent("d0")
    assert [type(each) for each in told] == [Forget]
    assert cluster.root(None) == []
    assert cluster.root("e0") == [], "its operand is needed"
    told = cluster.returned("d0")
    assert {each.worker for each in told} == {"d0", "e0"}
    assert before.items() & cluster.nodes.items(), "the others have theirs"
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_a_member_of_a_ring_that_does_not_answer_at_the_end():
    cluster = ring()
    for worker in ("a0", "a1", "b0"):
        cluster.combined(cluster.at(worker))
    cluster.now += 3
    assert cluster.look() == {"c0"}
    assert cluster.silent("c0") == [Done(KEY, tuple(cluster.holders))], "nobody needs it"


def test_a_root_in_a_ring_that_does_not_answer_at_the_end():
    cluster = ring()
    for worker in ("a0", "a1", "c0"):
        cluster.combined(cluster.at(worker))
    told = cluster.silent("b0")
    assert {type(each) for each in told} == {Forget}
    cluster.root("a0")
    cluster.returned("b0")
    assert cluster.finish().contributors == tuple(cluster.holders)


def test_who_waits_itself_is_not_blamed():
    cluster, chain, _ = running()
    for _ in range(10):
        cluster.now += 1.5
        assert cluster.combining(cluster.at(chain[0]), made=50) == []
        for worker in chain[1:]:
            assert cluster.combining(cluster.at(worker), 50, made=50) == []


def test_a_source_that_has_given_all_is_not_blamed():
    """Another one is late: from the first, nothing comes any more, as it should be."""
    cluster = Cluster(["a0", "b0", "c0", "d0"], degree=2)
    cluster.all_ready("a0")
    top = cluster.at("a0")
    (_, early), (_, late) = cluster.nodes[top].sources
    if cluster.nodes[early].sources:
        early, late = late, early
    order = [number for _, number in cluster.nodes[top].sources]
    cluster.combined(early, nbytes=100)
    for _ in range(10):
        cluster.now += 1.5
        [(_, leaf)] = cluster.nodes[late].sources
        cluster.combining(leaf, made=10)
        cluster.combining(late, 10, made=10)
        received = [100 if number == early else 10 for number in order]
        assert cluster.combining(top, *received, made=10) == []


def test_a_source_that_is_done_and_gives_nothing():
    cluster, chain, first = running()
    cluster.combined(first, nbytes=100)
    told = []
    for _ in range(3):
        cluster.now += 1.5
        if not told:
            told = cluster.combining(cluster.at(chain[1]), 50, made=50)
    assert told[0] == Ask(KEY, chain[0])


def test_who_was_frozen_itself_blames_nobody():
    cluster, chain, first = running()
    second = cluster.at(chain[1])
    cluster.now = 1.5
    cluster.combining(second, 50, made=50)
    cluster.combined(first, nbytes=100)
    cluster.now = 20.0
    assert cluster.combining(second, 50, made=50) == []
    cluster.now = 21.5
    assert cluster.combining(second, 100, made=100) == []


def test_two_that_do_not_reach_each_other():
    cluster, chain, _ = running()
    one, other = chain[1:3]
    cluster.broken(cluster.at(other), cluster.at(one))
    assert cluster.asked == {one}
    cluster.returned(one)
    assert cluster.plan.apart == {frozenset((one, other))}
    way = cluster.chain()
    assert set(way) >= {"a0", "b0", "c0", "d0"}
    assert all({one, other} != set(pair) for pair in itertools.pairwise(way))
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_a_third_one_stands_between():
    cluster = Cluster(["a0", "b0", "c0"], {"x": ["a0"], "y": ["b0"]}, ordered=True)
    cluster.all_ready("b0")
    cluster.broken(cluster.at("b0"), cluster.at("a0"))
    cluster.returned("a0")
    assert cluster.chain() == ["a0", "c0", "b0"]
    assert cluster.nodes[cluster.at("c0")].operands == ()
    cluster.leave("b0")
    assert not cluster.plan.apart


def test_who_fails_again_and_again():
    cluster = Cluster(["a0", "b0"])
    cluster.all_ready("b0")
    for _ in range(FAILURES):
        assert cluster.end is None
        cluster.missing(cluster.at("a0"))
    told = cluster.missing(cluster.at("a0"))
    assert isinstance(told[-1], Fail)
    assert told[-1].operands == ("xa0",)
    assert "a0 fails again and again: not here" in told[-1].reason


def test_another_copy_is_taken_after_a_failure():
    cluster = Cluster(["a0", "b0", "c0"], {"x": ["a0", "b0"], "y": ["c0"]})
    cluster.all_ready("c0")
    cluster.missing(cluster.at("a0"))
    assert cluster.chain() == ["b0", "c0"]


def test_a_spare_for_one_that_fails_again_and_again():
    cluster = Cluster(["a0", "b0", "c0"], count=2)
    cluster.root("c0")
    cluster.ready("xa0", "xb0")
    for _ in range(FAILURES + 1):
        cluster.missing(cluster.at("a0"))
    assert cluster.end is None
    cluster.ready("xc0")
    assert cluster.finish() == Done(KEY, ("xb0", "xc0"))


def test_who_cannot_take_from_anybody_is_at_fault():
    """It is blamed itself as soon as several answer that it says it cannot reach."""
    cluster = Cluster(["r0", *(f"{host}0" for host in "abcdefghijklmnop")])
    cluster.all_ready("r0")
    for _ in range(FAILURES + 1):
        top = cluster.at("r0")
        (worker, source), *_ = cluster.nodes[top].sources
        cluster.broken(top, source)
        cluster.returned(worker)
    assert isinstance(cluster.end, Fail)
    assert "r0" in cluster.end.reason


def test_impossible():
    cluster = Cluster(["a0", "b0", "c0"], count=2)
    cluster.ready("xa0")
    assert cluster.handle(Gone(KEY, "xb0", "its task failed")) == []
    [told] = cluster.handle(Gone(KEY, "xc0", "lost"))
    assert told.operands == ("xb0", "xc0")
    assert "2 operands are needed and 1 are left" in told.reason
    assert "'xb0': its task failed" in told.reason
    assert cluster.ready("xb0") == []


def test_it_fails_with_what_a_worker_raised():
    cluster, chain, first = running()
    [told] = cluster.handle(Unfit(KEY, chain[0], first, "ValueError: shapes", b"pickled"))
    assert (told.reason, told.error) == ("ValueError: shapes", b"pickled")
    assert told.operands == cluster.nodes[first].operands


def test_all_are_combined_anew_in_a_common_form():
    cluster, chain, first = running()
    cluster.combined(first)
    told = cluster.handle(Promoted(KEY, chain[1], cluster.at(chain[1]), b"f8"))
    assert sum(isinstance(each, Forget) for each in told) == 4
    assert {node.common for node in cluster.nodes.values()} == {b"f8"}
    assert cluster.finish().contributors == ("xa", "xb", "xc", "xd")


def test_reports_of_what_is_forgotten():
    cluster, chain, _ = running()
    old = cluster.nodes[cluster.at(chain[2])]
    source = old.sources[0][1]
    cluster.leave(chain[1])
    for event in [
        Combined(KEY, old.worker, old.node),
        Combining(KEY, old.worker, old.node, (7,), 7),
        Broken(KEY, old.worker, old.node, source, "reset"),
        Missing(KEY, old.worker, old.node, "not here"),
        Promoted(KEY, old.worker, old.node, b"f8"),
        Unfit(KEY, old.worker, old.node, "no", b""),
    ]:
        assert cluster.handle(event) == []


def test_growth_is_near_linear():
    """Each operand comes alone, or all come at once."""
    operands = {f"x{i}": [f"{i} host"] for i in range(3000)}
    asked = 0

    class Counted(dict):
        def __getitem__(self, key):
            nonlocal asked
            asked += 1
            return super().__getitem__(key)

    for alone in (True, False):
        asked = 0
        cluster = Cluster([], operands)
        cluster.hosts.update({f"{i} host": str(i) for i in range(3000)})
        cluster.check = lambda told: None
        cluster.plan.holders = Counted(cluster.holders).__getitem__
        for key in operands:
            cluster.ready(key)
            if alone and cluster.timers:
                cluster.due()
        cluster.root("7 host")
        assert len(cluster.nodes) in (3000, 3001)
        assert asked < 5 * 3000


# Any order of events

WORKERS = ["a0", "a1", "b0", "b1", "c0", "d0"]
OPERANDS = [f"x{i}" for i in range(7)]

workers = st.sampled_from(WORKERS)
operands = st.sampled_from(OPERANDS)


def test_a_copy_that_is_dropped_before_there_is_a_root():
    """It is seen when there is one; nobody says so before."""
    cluster = Cluster("abc", {"x": ["c"], "y": ["b", "c"]})
    cluster.ready("x", "y")
    cluster.due()
    cluster.silent("b")
    cluster.holders["y"] = {"b"}
    assert not cluster.nodes and not cluster.timers
    cluster.root("a")
    cluster.due()
    assert [node.operands for node in cluster.nodes.values()] == [("x",)]


class Orders(RuleBasedStateMachine):
    """Operands, workers and nodes that come, fail and go in any order."""

    @initialize(
        data=st.data(),
        ring=st.booleans(),
        ordered=st.booleans(),
        degree=st.sampled_from([None, 1, 2, 3]),
        nbytes=st.sampled_from([100, 10**9]),
    )
    def begin(self, data, ring, ordered, degree, nbytes):
        count = len(OPERANDS) if ordered else data.draw(st.integers(1, len(OPERANDS)))
        self.cluster = Cluster(
            WORKERS,
            {key: [] for key in OPERANDS},
            count,
            nbytes=nbytes,
            ring=ring,
            ordered=ordered,
            degree=degree,
        )
        self.gone: set[str] = set()
        self.root: str | None = None
        self.dropped = False  # whether copies were, since there was a root
        if data.draw(st.booleans()):  # or hardly any plan is ever complete
            for index, key in enumerate(OPERANDS):
                self.ready(key, WORKERS[index % len(WORKERS)])

    def goes_on(self):
        return self.cluster.end is None

    def node(self, data, *, sources=False):
        able = [n for n, node in self.cluster.nodes.items() if n not in self.cluster.done]
        able = [n for n in able if self.cluster.nodes[n].worker in self.cluster.hosts]
        if sources:
            able = [n for n in able if self.cluster.nodes[n].sources]
        assume(able)
        return data.draw(st.sampled_from(able))

    @rule(seconds=st.sampled_from([0.1, 1.5, 4.0]))
    def time_goes_by(self, seconds):
        if not any(time < self.cluster.now + seconds for time in self.cluster.timers):
            self.cluster.now += seconds

    @precondition(goes_on)
    @rule(key=operands, worker=workers)
    def ready(self, key, worker):
        assume(worker in self.cluster.hosts)
        self.cluster.holders[key].add(worker)
        self.gone.discard(key)
        self.cluster.ready(key)

    @precondition(goes_on)
    @rule(key=operands)
    def is_gone(self, key):
        self.cluster.holders[key].clear()
        self.gone.add(key)
        self.cluster.handle(Gone(KEY, key, "lost"))

    @precondition(goes_on)
    @rule(key=operands, worker=workers)
    def copy_is_dropped(self, key, worker):
        if len(self.cluster.holders[key]) > 1:
            self.cluster.holders[key].discard(worker)
            self.dropped = True

    @precondition(goes_on)
    @rule(worker=st.one_of(st.none(), workers))
    def rooted(self, worker):
        assume(worker is None or worker in self.cluster.hosts)
        self.root = worker
        self.cluster.root(worker)

    @precondition(lambda self: self.goes_on() and self.cluster.timers)
    @rule()
    def due(self):
        self.cluster.due()

    @precondition(lambda self: self.goes_on() and self.cluster.nodes)
    @rule(data=st.data(), times=st.integers(1, 4))
    def combined(self, data, times):
        for _ in range(times):
            number = self.node(data)
            node = self.cluster.nodes[number]
            assume(node.ring or self.cluster.done.issuperset(n for _, n in node.sources))
            self.heard(node.worker)
            self.cluster.combined(number)
            if not self.goes_on():
                break

    @precondition(lambda self: self.goes_on() and self.cluster.nodes)
    @rule(data=st.data(), received=st.integers(0, 100))
    def combining(self, data, received):
        number = self.node(data)
        node = self.cluster.nodes[number]
        self.heard(node.worker)
        self.cluster.combining(number, *[received] * len(node.sources), made=received)

    @precondition(lambda self: self.goes_on() and self.cluster.nodes)
    @rule(data=st.data(), gone=st.booleans(), answers=st.booleans())
    def broken(self, data, gone, answers):
        number = self.node(data, sources=True)
        worker, source = data.draw(st.sampled_from(self.cluster.nodes[number].sources))
        self.heard(self.cluster.nodes[number].worker)
        self.cluster.broken(number, source, gone)
        if answers and self.goes_on() and worker in self.cluster.hosts:
            self.cluster.returned(worker)

    @precondition(lambda self: self.goes_on() and self.cluster.nodes)
    @rule(data=st.data())
    def missing(self, data):
        number = self.node(data)
        self.heard(self.cluster.nodes[number].worker)
        self.cluster.missing(number)

    @precondition(lambda self: self.goes_on() and self.cluster.nodes)
    @rule(data=st.data(), common=st.sampled_from([b"f8", b"whole"]))
    def promoted(self, data, common):
        number = self.node(data)
        self.heard(self.cluster.nodes[number].worker)
        self.cluster.handle(Promoted(KEY, self.cluster.nodes[number].worker, number, common))

    @precondition(goes_on)
    @rule(worker=workers, first=st.booleans())
    def leave(self, worker, first):
        assume(worker in self.cluster.hosts and len(self.cluster.hosts) > 1)
        if self.root == worker:
            self.root = None
            if first:
                self.cluster.root(None)
        self.cluster.leave(worker)

    @precondition(goes_on)
    @rule(worker=workers)
    def join(self, worker):
        self.cluster.hosts[worker] = worker[0]

    @precondition(goes_on)
    @rule(worker=workers)
    def returned(self, worker):
        assume(worker in self.cluster.hosts)
        self.cluster.returned(worker)

    @precondition(goes_on)
    @rule(worker=workers)
    def silent(self, worker):
        assume(worker in self.cluster.hosts)
        self.cluster.silent(worker)

    @precondition(goes_on)
    @rule()
    def look(self):
        self.cluster.look()

    def heard(self, worker):
        """Whoever reports is there."""
        self.cluster.asked.discard(worker)

    # What is always true

    def able(self):
        """The operands that may still be placed, and those that are."""
        cluster = self.cluster
        out = cluster.asked | set(cluster.plan.barred)
        placed = {key for node in cluster.nodes.values() for key in node.operands}
        return placed, [
            key
            for key, holders in cluster.holders.items()
            if key not in placed
            and key in cluster.plan.ready
            and (holders & cluster.hosts.keys()) - out
        ]

    @invariant()
    def what_can_be_planned_is(self):
        if not hasattr(self, "cluster") or not self.goes_on():
            return
        cluster = self.cluster
        placed, able = self.able()
        rooted = self.root is not None and self.root not in cluster.asked
        self.dropped = self.dropped and not rooted
        final = any(node.count for node in cluster.nodes.values())
        missing = cluster.plan.count - len(placed)
        assert missing >= 0
        if len(able) >= missing:
            assert final == rooted
        elif not cluster.plan.ordered:
            waiting = [key for key in able if self.root not in cluster.holders[key]]
            assert not final
            # Nobody says that a copy is dropped. If only the root was missing before, it is seen
            # when there is one.
            assert cluster.timers or not waiting or self.dropped

    @invariant()
    def a_node_is_at_a_worker_that_can_be_had(self):
        if not hasattr(self, "cluster") or not self.goes_on():
            return
        stand_for = set()
        for number in sorted(self.cluster.nodes, reverse=True):
            node = self.cluster.nodes[number]
            if number in self.cluster.done or number in stand_for:
                stand_for.update(n for _, n in node.sources)
            if number not in stand_for:
                assert node.worker in self.cluster.hosts
                assert node.worker not in self.cluster.asked

    @invariant()
    def the_end_is_right(self):
        if not hasattr(self, "cluster") or self.goes_on():
            return
        cluster, end = self.cluster, self.cluster.end
        if isinstance(end, Done):
            finals = [node for node in cluster.nodes.values() if node.count]
            assert all(
                node.node in cluster.done or (node.ring and node.worker in cluster.asked)
                for node in finals
            )
            assert any(node.node in cluster.done for node in finals if node.worker == self.root)
            total = (
                [key for node in finals for key in node.operands]
                if finals[0].ring
                else cluster.contents(finals[0])
            )
            assert Counter(total) == Counter(end.contributors)
            assert len(total) == len(set(total)) == cluster.plan.count
            assert {node.common for node in cluster.nodes.values()} == {finals[0].common}
        else:
            assert self.gone or cluster.plan.barred

    def teardown(self):
        """If nothing goes wrong any more, there is a result, unless some of it is gone."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for worker in WORKERS:
            cluster.hosts.setdefault(worker, worker[0])
        for worker in sorted(cluster.asked):
            if self.goes_on():
                cluster.returned(worker)
        for key in OPERANDS:
            if self.goes_on() and key not in self.gone:
                cluster.holders[key].add("d0")
                cluster.ready(key)
        if self.goes_on():
            self.root = self.root or "c0"
            cluster.root(self.root)
        if self.goes_on():
            assert cluster.finish() is not None
        self.the_end_is_right()


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
