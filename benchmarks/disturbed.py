"""What the uses of collectives suffer when a worker fails, or is slow.

Steps are made in three stages: before a fault, while a worker is away, and when it is back.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.laboratory import Laboratory
from benchmarks.uses import WARM_UP

#: Steps of each stage: a worker goes at step 20 and is back at 30.
STAGES = {"before": 20 - WARM_UP, "away": 10, "after": 20}

#: How much longer a slow worker takes, in times an object on its way.
SLOW = 10


@dataclass
class Case:
    """What is the matter with the last worker."""

    killed: bool = False
    slow: float = 0.0  #: in times an object on its way
    link: bool = False  #: whether its link has a tenth of the rate


CASES = {
    "undisturbed": Case(),
    "killed": Case(killed=True),
    "slow worker": Case(slow=SLOW),
    "slow link": Case(link=True),
}


def run(
    lab: Laboratory,
    clusters: list[Cluster],
    ops: list[str],
    cases: list[str],
    nbytes: int,
    reps: int,
    goodput: float,
    timeout: float,
) -> Iterator[dict[str, Any]]:
    """Go through operations and cases, the systems in turns, and yield a record for each."""
    for op in ops:
        for rep in range(reps):
            for case in cases:
                for cluster in clusters:
                    record = once(lab, cluster, op, CASES[case], nbytes, goodput, timeout)
                    yield {
                        "op": op,
                        "case": case,
                        "system": cluster.system,
                        "rep": rep,
                        "nbytes": nbytes,
                        "object": nbytes / goodput,
                        **record,
                    }


def once(
    lab: Laboratory,
    cluster: Cluster,
    op: str,
    case: Case,
    nbytes: int,
    goodput: float,
    timeout: float,
) -> dict[str, Any]:
    """All stages of one operation in one case."""
    last = cluster.workers - 1
    client = cluster.client()
    client.call("warm_up")
    slow, spare = case.slow * nbytes / goodput, int(case.link or case.slow > 0)
    how = {"goodput": goodput, "slow": slow, "spare": spare}
    client.call("prepare", timeout, op=op, nbytes=nbytes, **how)
    record: dict[str, Any] = {}
    try:
        for stage, steps in STAGES.items():
            if stage == "away" and case.killed:
                cluster.worker(last).send_signal(signal.SIGKILL)
            if stage == "after" and case.killed:
                cluster.replace(last)
            if stage == "away" and case.link:
                lab.set_rate(last, lab.tenth())
            # Plain Dask waits for the slow one.
            patience = timeout + 2 * steps * SLOW * nbytes / goodput
            record[stage] = client.call("advance", patience, count=steps)
        record |= client.call("figures", timeout)
        record["correct"] = client.call("correct")
    finally:
        if case.link:
            lab.set_rate(last, lab.rate)
        if case.killed:
            cluster.restart()
        else:
            client.call("release")
    return record


def medians(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The median and the longest step of each stage, in seconds."""
    return {stage: (statistics.median(record[stage]), max(record[stage])) for stage in STAGES}
