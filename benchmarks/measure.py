"""The systems take turns: the loops over operations, sizes, repetitions and systems."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.cluster import ClientError, ClientTimeout, Cluster
from benchmarks.laboratory import Laboratory
from benchmarks.operations import WORKLOADS
from benchmarks.programs import RUNNING
from benchmarks.uses import USES
from dask_hoplite.bench import turns
from dask_hoplite.bench.turns import Record

SLOW_IN_PLAIN = (*turns.SLOW_IN_PLAIN, "grid-search-scattered")

#: Size at which `Comparison.arrivals` and programs are warmed up.
WARM_UP = 2**20


@dataclass
class Comparison:
    """How the systems are compared.

    Parameters
    ----------
    clusters : list of Cluster
        One per system; all are up, and all but one are idle at any time.
    reps, slow_reps : int
        Repetitions, and those of plain Dask in the operations where it is slow.
    timeout : float
        Seconds after which an operation is given up.
    later : float
        Copies are counted at the end of an operation and again this many seconds later.
    goodput : float, optional
        Bytes per second of a link; gives the limit. None if there are no links.
    """

    clusters: list[Cluster]
    reps: int = 3
    slow_reps: int = 1
    timeout: float = 150
    later: float = 10
    goodput: float | None = None

    def ops(self, ops: list[str], sizes: list[int]) -> Iterator[Record]:
        """Measure operations; a record is yielded as soon as it is there."""
        return turns.compare(
            self.clusters,
            self._operation,
            ops,
            sizes,
            self.reps,
            self.slow_reps,
            self.later,
            cold=USES,  # they begin with some steps
            slow=SLOW_IN_PLAIN,
            least=min(*sizes, WARM_UP) if RUNNING.keys() >= set(ops) else None,
        )

    def arrivals(self, cases: list[Record], nbytes: int) -> Iterator[Record]:
        """Measure reductions whose operands come later; a record is yielded as soon as it is there.

        Parameters
        ----------
        cases : list of dict
            ``"case"``, which is its name, ``"op"``, and arguments of the operation.
        nbytes : int
            Size of an operand.
        """
        for case in cases:
            case = dict(case)
            name = case.pop("case")
            measure = partial(self._operation, nbytes=nbytes, later=0, **case)
            warm_up = partial(measure, nbytes=min(nbytes, WARM_UP))
            for cluster in self.clusters:
                warm_up(cluster)
            for record in turns.take_turns(self.clusters, measure, warm_up, self.reps):
                yield {"op": name, "nbytes": nbytes, **record}

    def degrees(self, degrees: dict[str, int | None], sizes: list[int]) -> Iterator[Record]:
        """Measure reduce with trees of given degrees, in turns; the only cluster is Hoplite's."""
        [cluster] = self.clusters
        measure = partial(self._operation, cluster, op="reduce", later=0)
        measure(nbytes=min(sizes))
        for nbytes in sizes:
            for rep in range(self.reps):
                names = list(degrees)
                names = names[rep % len(names) :] + names[: rep % len(names)]
                for name in names:
                    cluster.client().call("degree", degree=degrees[name])
                    record = measure(nbytes=nbytes)
                    yield {
                        "op": f"reduce, {name}",
                        "nbytes": nbytes,
                        "system": cluster.system,
                        "rep": rep,
                        **record,
                    }

    def effects(self, effects: list[str], shrink: int) -> Iterator[Record]:
        """Measure side effects; a record is yielded as soon as it is there."""
        for effect in effects:
            measure = partial(self._effect, effect=effect, shrink=shrink)
            for cluster in self.clusters:
                measure(cluster)
            for record in turns.take_turns(self.clusters, measure, measure, self.reps):
                yield {"effect": effect, **record}

    def _operation(
        self, cluster: Cluster, op: str, nbytes: int, later: float, **how: object
    ) -> Record:
        record: Record = {}
        if self.goodput:
            crossings = WORKLOADS[op].crossings(cluster.workers, cluster.per_host)
            record["limit"] = crossings * nbytes / self.goodput
        if op in USES:
            how["goodput"] = self.goodput
        with self._restarted_on_error(cluster, record):
            client = cluster.client(registers=op != "scatter-plain-client")
            alone = self._alone(cluster, record)
            record |= turns.once(client.call, op, nbytes, later, self.timeout, alone, **how)
        return record

    def _effect(self, cluster: Cluster, effect: str, shrink: int) -> Record:
        record: Record = {}
        with self._restarted_on_error(cluster, record):
            arguments = {"name": effect, "shrink": shrink}
            client = cluster.client()
            with self._others_frozen(cluster):
                record["figures"] = client.call("effect", timeout=self.timeout, **arguments)
        return record

    @contextlib.contextmanager
    def _alone(self, cluster: Cluster, record: Record) -> Iterator[None]:
        """What is around an operation that is timed."""
        with self._others_frozen(cluster), count_bytes(cluster, record):
            yield

    @contextlib.contextmanager
    def _others_frozen(self, cluster: Cluster) -> Iterator[None]:
        """Let one cluster have the processors: an idle one takes a fifth of two cores."""
        others = [other for other in self.clusters if other is not cluster]
        for other in others:
            other.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for other in others:
                other.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _restarted_on_error(self, cluster: Cluster, record: Record) -> Iterator[None]:
        """Note an error rather than end the run, and go on with a fresh cluster."""
        try:
            yield
        except ClientError as error:
            record["error"] = str(error)
            record["timeout"] = self.timeout if isinstance(error, ClientTimeout) else None
            cluster.restart()
            with contextlib.suppress(ClientError):
                cluster.client()  # the others must not be measured while this one starts


@contextlib.contextmanager
def count_bytes(cluster: Cluster, record: Record) -> Iterator[None]:
    """Note how many bytes enter and leave each host of a laboratory within the block."""
    lab = cluster.place
    if not isinstance(lab, Laboratory):
        yield
        return
    before = {host: lab.counters(host) for host in lab.hosts}
    yield
    after = {host: lab.counters(host) for host in lab.hosts}
    for index, name in enumerate(("entered", "left")):
        record[name] = {str(host): after[host][index] - before[host][index] for host in lab.hosts}
