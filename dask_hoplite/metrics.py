"""Metrics for Prometheus, in Dask's own ``/metrics``; ``docs/metrics.md`` lists them.

Dask collects metrics by one registry of the process, on behalf of the server that is asked at the
moment. So do we: there is one collector for schedulers and one for workers, while there are any
with Hoplite in the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dask_hoplite import seams, versions

if TYPE_CHECKING:
    from dask_hoplite.scheduler import Hoplite
    from dask_hoplite.worker import HopliteWorker

logger = logging.getLogger(__name__)

#: A value, or one for each value of the label, or count and sum of a summary
Reading = float | Mapping[str, float] | tuple[float, float]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Parameters
    ----------
    name : str
        With its unit, without the prefix, and without ``_total``.
    kind : {"Counter", "Gauge", "Summary"}
        As Prometheus calls it.
    read : callable of a plugin
        Gives what it is at the moment.
    help : str
        What it counts.
    label : str, optional
        What tells its values apart.
    """

    name: str
    kind: str
    read: Callable[[Any], Reading]
    help: str
    label: str = ""

    def family(self, name: str, plugin: Any) -> Any:
        """What the client library takes, under a full name."""
        make = getattr(import_module("prometheus_client.core"), f"{self.kind}MetricFamily")
        read = self.read(plugin)
        if self.label:
            assert isinstance(read, Mapping)
            family = make(name, self.help, labels=[self.label])
            for label, value in read.items():
                family.add_metric([label], value)
            return family
        if isinstance(read, tuple):
            return make(name, self.help, count_value=read[0], sum_value=read[1])
        return make(name, self.help, value=read)


def _running(plugin: Hoplite) -> dict[str, float]:
    """Receivers by whether anything has come to them."""
    trees = plugin.directory.trees.values()
    transfers = [transfer for tree in trees for transfer in tree.transfers.values()]
    waiting = sum(not transfer.received for transfer in transfers)
    return {"waiting": waiting, "receiving": len(transfers) - waiting}


def _pulls(plugin: HopliteWorker) -> dict[str, float]:
    """The same of one worker."""
    incoming = [pull for pull in plugin.puller.incoming.values() if not pull.task.done()]
    waiting = sum(not pull.received for pull in incoming)
    return {"waiting": waiting, "receiving": len(incoming) - waiting}


def _whole(plugin: HopliteWorker) -> list[int]:
    """Sizes of the large objects that a worker holds."""
    tasks = plugin.worker.state.tasks
    sizes = [tasks[key].get_nbytes() for key in plugin.worker.data if key in tasks]
    return [nbytes for nbytes in sizes if nbytes >= plugin.min_size]


def _partial(plugin: HopliteWorker) -> list[int]:
    """Bytes that it has of those that are still arriving."""
    return [pull.received for pull in plugin.puller.incoming.values() if not pull.task.done()]


SCHEDULER = (
    Metric(
        "transfers",
        "Counter",
        lambda p: p.record.outcomes,
        "Transfers from one source to one receiver that have ended, by how",
        "outcome",
    ),
    Metric(
        "reparentings",
        "Counter",
        lambda p: p.record.reparented,
        "Receivers that got another source, by how the former one ended",
        "cause",
    ),
    Metric(
        "resumes",
        "Counter",
        lambda p: p.record.resumed,
        "Receivers that went on with another source at the byte where they were",
    ),
    Metric(
        "received_bytes",
        "Counter",
        lambda p: p.record.received,
        "Bytes of objects that receivers have said to have received",
    ),
    Metric("receivers", "Gauge", _running, "Receivers of objects at the moment", "state"),
    Metric(
        "objects_moving",
        "Gauge",
        lambda p: sum(bool(tree.transfers) for tree in p.directory.trees.values()),
        "Objects that somebody receives at the moment",
    ),
    Metric(
        "objects_lost",
        "Counter",
        lambda p: p.record.lost,
        "Scattered objects whose last copy was lost",
    ),
    Metric(
        "reductions_running",
        "Gauge",
        lambda p: len(p.reductions.runs),
        "Reductions that are asked for and not over",
    ),
    Metric(
        "reductions",
        "Counter",
        lambda p: p.record.reductions,
        "Reductions that are over, by how they ended",
        "outcome",
    ),
    Metric(
        "reductions_replanned",
        "Counter",
        lambda p: p.record.replanned,
        "Times that a part of a reduction had to be made again",
    ),
    Metric(
        "decision_seconds",
        "Summary",
        lambda p: (p.record.decisions, p.record.deciding),
        "Events that the directory has handled, and the time that it took",
    ),
)

WORKER = (
    Metric(
        "received_bytes",
        "Counter",
        lambda p: p.puller.bytes_in,
        "Bytes that have come to this worker, by how they went",
        "path",
    ),
    Metric(
        "sent_bytes",
        "Counter",
        lambda p: p.puller.bytes_out,
        "Bytes that have left this worker, by how they went",
        "path",
    ),
    Metric(
        "pulls",
        "Counter",
        lambda p: p.puller.outcomes,
        "Objects that this worker has asked for, by how that ended",
        "outcome",
    ),
    Metric("pulls_running", "Gauge", _pulls, "Objects that it is about to get", "state"),
    Metric(
        "objects",
        "Gauge",
        lambda p: {"whole": len(_whole(p)), "partial": len(_partial(p))},
        "Large objects that this worker holds",
        "state",
    ),
    Metric(
        "objects_bytes",
        "Gauge",
        lambda p: {"whole": sum(_whole(p)), "partial": sum(_partial(p))},
        "Bytes of them",
        "state",
    ),
    Metric(
        "sums_running",
        "Gauge",
        lambda p: sum(not made.task.done() for made in p.reducer.sums.values()),
        "Sums that this worker makes at the moment for reductions",
    ),
)


def _scraped_scheduler() -> Any:
    handler = import_module("distributed.http.scheduler.prometheus.core").PrometheusHandler
    return handler._collectors[0].server if handler._collectors else None


def _scraped_worker() -> Any:
    handler = import_module("distributed.http.worker.prometheus.core").PrometheusHandler
    return handler._collector.server if handler._collector else None


class Exporter:
    """Lets Dask's ``/metrics`` have the metrics of one kind of server.

    Parameters
    ----------
    subsystem : str
        What names begin with, behind the namespace of Dask's configuration.
    metrics : tuple of Metric
        What there is.
    scraped : callable
        Gives the server for which Dask collects at the moment.
    """

    def __init__(self, subsystem: str, metrics: tuple[Metric, ...], scraped: Callable[[], Any]):
        self.subsystem = subsystem
        self.metrics = metrics
        self.scraped = scraped
        self.servers: WeakSet[Any] = WeakSet()
        self.collector: Any = None

    def install(self, server: Any) -> None:
        """A server has Hoplite now. Without the client library, all else works."""
        if find_spec("prometheus_client") is None:
            logger.info("Hoplite has no metrics: prometheus_client is not installed")
        elif reason := versions.check(seams.METRICS):
            logger.info("Hoplite has no metrics: %s", reason)
        else:
            self.servers.add(server)
            if self.collector is None:
                from distributed.http.prometheus import PrometheusCollector
                from prometheus_client import REGISTRY

                names: Any = PrometheusCollector(None)
                names.subsystem = self.subsystem
                self.collector = Collector(self, names.build_name)
                REGISTRY.register(self.collector)

    def uninstall(self, server: Any) -> None:
        """It has it no longer."""
        self.servers.discard(server)
        if self.collector is not None and not self.servers:
            from prometheus_client import REGISTRY

            REGISTRY.unregister(self.collector)
            self.collector = None


class Collector:
    """What the registry asks."""

    def __init__(self, exporter: Exporter, name: Callable[[str], str]):
        self.exporter = exporter
        self.name = name

    def describe(self) -> list[Any]:
        """Nothing: what there is depends on who is asked."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics of the server that is asked, if it has Hoplite."""
        server = self.exporter.scraped()
        plugin = server.plugins.get("hoplite") if server in self.exporter.servers else None
        if plugin is not None:
            for metric in self.exporter.metrics:
                yield metric.family(self.name(metric.name), plugin)


SCHEDULERS = Exporter("scheduler_hoplite", SCHEDULER, _scraped_scheduler)
WORKERS = Exporter("worker_hoplite", WORKER, _scraped_worker)
