"""The simulator of reductions does what it says, and what the real planner achieves in it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict

import pytest

import dask_hoplite.simulate_reduction as module
from dask_hoplite.core.cost import CostModel
from dask_hoplite.core.reduction import Reduction
from dask_hoplite.simulate import main
from dask_hoplite.simulate_reduction import Fault, scenario, simulate_reduction

#: A network that is easy to compute with: 100 MB/s, 1 ms, nothing to wait for at a relay.
PLAIN = {"bandwidth": 1e8, "latency": 1e-3, "granule": 0}

# The network


def test_two_workers_by_hand():
    result = simulate_reduction(2, 10**8, **PLAIN)
    # Ready, told, requested, first byte; then all of it at the full rate.
    assert result.completion == pytest.approx(4e-3 + 1)
    assert result.lower_bound == pytest.approx(1e-3 + 1)
    assert (result.outcome, result.depth, result.sums) == ("done", 2, 2)
    assert result.contributors == ("x0", "x1")
    assert sorted(result.bytes_in.values()) == sorted(result.bytes_out.values()) == [0, 1e8]
    assert not result.violations


def test_a_node_waits_for_the_slower_of_its_sources():
    """Two leaves share the link of the root; the third operand is the root's."""
    result = simulate_reduction(3, 10**8, **PLAIN, degree=2)
    assert result.depth == 2
    assert result.completion == pytest.approx(4e-3 + 2)


def test_each_hop_of_a_chain_costs_its_lag():
    result = simulate_reduction(4, 10**8, bandwidth=1e8, latency=1e-3, granule=50_000)
    # Told, requested; the first source is complete, the other two read 0.5 ms.
    assert result.completion == pytest.approx(3e-3 + 3 * 1e-3 + 2 * 5e-4 + 1)


def test_within_a_host_bytes_are_free():
    result = simulate_reduction(8, 10**8, **PLAIN, per_host=4)
    assert result.completion == pytest.approx(1.0, abs=0.05)
    assert sum(result.bytes_in.values()) == 10**8


def test_a_ring_by_hand():
    result = simulate_reduction(4, 10**8, **PLAIN, op="allreduce")
    assert result.ring and result.sums == 4
    assert result.completion == pytest.approx(4e-3 + 1.5)
    assert set(result.bytes_in.values()) == {1.5e8}


def test_a_result_that_spreads_shares_the_links():
    """Without a ring, each link in the middle carries two objects."""

    class NoRing(CostModel):
        def rings(self, nbytes, members):
            return False

    result = simulate_reduction(4, 10**8, **PLAIN, op="allreduce", cost=NoRing())
    assert not result.ring
    assert result.completion == pytest.approx(2, rel=0.02)
    assert not result.violations


def test_the_same_seed_gives_the_same():
    arguments = scenario(7)
    assert simulate_reduction(**arguments) == simulate_reduction(**arguments)


def test_nothing_to_combine():
    with pytest.raises(ValueError, match="not enough"):
        simulate_reduction(0)


# What the plans achieve


@pytest.mark.parametrize(("workers", "ratio"), [(16, 1.003), (128, 1.02), (1024, 1.15)])
def test_one_gibibyte_at_ten_gigabit(workers, ratio):
    result = simulate_reduction(workers)
    assert not result.violations
    assert result.depth == workers
    assert result.ratio < ratio


@pytest.mark.parametrize("workers", [4, 16, 128, 1024])
def test_all_get_one_gibibyte_at_ten_gigabit(workers):
    result = simulate_reduction(workers, op="allreduce")
    assert not result.violations
    assert result.ring
    assert result.ratio < 1.001


@pytest.mark.parametrize("nbytes", [10**3, 10**5, 10**7])
def test_no_other_degree_is_much_better(nbytes):
    cost = CostModel(latency=1.2e-4, bandwidth=1.25e9)
    chosen = simulate_reduction(64, nbytes, cost=cost)
    others = [simulate_reduction(64, nbytes, degree=n).completion for n in (1, 2, 4, 8, 16, 63)]
    assert chosen.completion < 1.3 * min(others)


def test_what_comes_late_is_all_that_is_left_to_do():
    """All but one are combined while that one is not ready."""
    times = [0.0] * 15 + [20.0]
    result = simulate_reduction(16, 10**8, **PLAIN, arrivals=times)
    assert result.completion < 21.01


def test_hosts_are_not_crossed_for_each_operand():
    """Operands come one by one, three on each of three workers of each host."""
    few = simulate_reduction(24, 10**8, **PLAIN, per_host=3, each=3, arrivals=1.0)
    assert few.completion < 1 + 2.2
    assert max(few.bytes_in.values()) <= 3e8


def test_the_first_are_enough():
    times = [0.0] * 10 + [100.0] * 6
    result = simulate_reduction(16, 10**8, **PLAIN, arrivals=times, count=10)
    assert result.completion < 1.1
    assert result.contributors == tuple(f"x{i}" for i in range(10))


# Faults


def chain(seed, kind, whom, **arguments):
    """16 operands of 10 s of bytes, and a fault in the middle of it."""
    fault = Fault(2 + seed / 2, kind, whom)
    result = simulate_reduction(16, 10**9, **PLAIN, seed=seed, faults=[fault], **arguments)
    assert not result.violations
    return result


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("whom", ["streaming", "root", "w3"])
def test_a_killed_worker_costs_two_more_passes_at_the_most(seed, whom):
    result = chain(seed, "kill", whom, cost=CostModel(bandwidth=1e8))
    assert result.outcome == "done"
    assert len(result.contributors) == 16
    # What it had is computed again after some seconds; the new root may be in the middle of what
    # is still under way, and on a link that two share it takes two passes.
    assert result.completion < 2 + seed / 2 + 20 + 8


@pytest.mark.parametrize("seed", range(10))
def test_a_spare_takes_the_place_of_a_frozen_one(seed):
    result = chain(seed, "freeze", "streaming", idle=1, each=2, count=28)
    assert result.outcome in ("done", "waits")
    if result.outcome == "done":
        assert result.completion < 2 + seed / 2 + 4.5 + 10 + 1


def test_a_frozen_one_that_returns():
    faults = [Fault(3.0, "freeze", "w5", 8.0)]
    result = simulate_reduction(16, 10**9, **PLAIN, faults=faults)
    assert result.outcome == "done" and not result.violations
    assert result.completion < 11 + 10 + 1


def test_two_that_do_not_reach_each_other():
    undisturbed = simulate_reduction(3, 10**9, **PLAIN)
    for one, other in [("w0", "w1"), ("w1", "w2"), ("w0", "w2")]:
        faults = [Fault(5.0, "cut", one, other=other)]
        result = simulate_reduction(3, 10**9, **PLAIN, faults=faults)
        assert result.outcome == "done" and not result.violations
        # If the third one is the root, both must go through it.
        assert result.completion < 5 + 4.5 + 2 * undisturbed.completion


def test_one_that_nobody_reaches():
    faults = [Fault(5.0, "cut", "w3")]
    result = simulate_reduction(16, 10**8, **{**PLAIN, "bandwidth": 1e7}, faults=faults)
    assert result.outcome == "failed" and not result.violations
    assert "w3 fails again and again" in result.reason


def test_an_operand_that_is_gone():
    result = simulate_reduction(
        16, 10**9, **PLAIN, count=15, recomputed=0.0, faults=[Fault(5.0, "kill", "w3")]
    )
    assert result.outcome == "done" and len(result.contributors) == 15
    faults = [Fault(5.0, "kill", "w3"), Fault(6.0, "kill", "w4")]
    result = simulate_reduction(16, 10**9, **PLAIN, count=15, recomputed=0.0, faults=faults)
    assert result.outcome == "failed"
    assert "its worker left" in result.reason


@pytest.mark.parametrize("block", range(4))
def test_random_faults(block):
    for seed in range(100 * block, 100 * block + 100):
        result = simulate_reduction(**scenario(seed))
        assert not result.violations, f"seed {seed}: {result.violations[:3]}"


def test_random_scenarios_are_rich(monkeypatch):
    """What the test above goes through does occur."""
    ends: Counter[str] = Counter()
    seen = defaultdict(int)

    class Recorded(module.ReductionSimulation):
        def decide(self, event):
            seen[type(event).__name__] += 1
            super().decide(event)

        def perform(self, told):
            seen[type(told).__name__] += 1
            if isinstance(told, module.Combine) and not told.operands and not told.count:
                seen["relay"] += 1
            super().perform(told)

    monkeypatch.setattr(module, "ReductionSimulation", Recorded)
    for seed in range(150):
        result = simulate_reduction(**scenario(seed))
        ends[result.outcome] += 1
        ends["ring"] += result.ring
    assert all(ends[end] >= 2 for end in ["done", "failed", "waits", "erred", "ring"]), ends
    for kind in ["Broken", "Gone", "WorkerLeft", "Returned", "Promoted", "Forget", "relay"]:
        assert seen[kind] >= 2, dict(seen)


@pytest.mark.parametrize("block", range(2))
def test_random_scenarios_without_faults(block):
    for seed in range(50 * block, 50 * block + 50):
        result = simulate_reduction(**scenario(seed, faults=False))
        assert not result.violations
        assert result.outcome == "done"


def test_violations_would_show(monkeypatch):
    class Deaf(Reduction):
        def handle(self, event, now):
            return [] if now > 2 else super().handle(event, now)

    monkeypatch.setattr(module, "Reduction", Deaf)
    faults = [Fault(5.0, "kill", "w3")]
    result = simulate_reduction(16, 10**9, **PLAIN, faults=faults)
    assert result.outcome == "hangs"
    assert any("hangs" in violation for violation in result.violations)


def test_what_counts_twice_would_show(monkeypatch):
    class Greedy(Reduction):
        """Takes from the first node once more at the end."""

        def _add(self, worker, operands, sources, final, reason, now):
            if final:
                sources = [*sources, min(self.nodes)]
            return super()._add(worker, operands, sources, final, reason, now)

    monkeypatch.setattr(module, "Reduction", Greedy)
    result = simulate_reduction(16, 10**9, **PLAIN)
    assert any("is used 2 times" in violation for violation in result.violations)
    assert any("Done" in violation for violation in result.violations)


# The command


@pytest.mark.parametrize("op", ["reduce", "allreduce"])
def test_command(capsys, op):
    arguments = f"--op {op} --workers 2 16 --nbytes 10MB --bandwidth 1Gbit --latency 1ms"
    assert main(arguments.split()) == 0
    head, two, many = capsys.readouterr().out.splitlines()
    assert head == "workers  completion  lower bound  ratio  depth  CPU seconds"
    assert two.split()[3:5] == ["0.0810", "s"]
    assert 1 < float(two.split()[5]) < 1.06
    assert many.split()[0] == "16"


def test_command_with_seeds():
    arguments = ["--op", "reduce", "--seeds", "20", "--faults"]
    command = [sys.executable, "-m", "dask_hoplite.simulate", *arguments]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert out.startswith("20 scenarios without a violation")
