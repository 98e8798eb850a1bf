"""All that Hoplite replaces in Dask, and relies on there, as it is known to be.

Dask promises nothing about most of this. So it is looked at where Hoplite is installed; see
:mod:`dask_hoplite.versions`. Nothing of Dask is imported before.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Seam:
    """Something of Dask's that Hoplite replaces or uses.

    Parameters
    ----------
    where : str
        ``module:name.name``; or ``.name.name``, of the scheduler, worker or client itself.
    takes : str, optional
        Names of parameters that we give, or take in its place. Without: it only has to be there.
    may : str
        Names of parameters that only some versions have.
    replaced : bool
        Whether ours stands in its place. Then Dask must not have parameters that we do not know.
    item : object, optional
        What a mapping or a collection must have.
    """

    where: str
    takes: str | None = None
    may: str = ""
    replaced: bool = False
    item: Any = None

    @property
    def name(self) -> str:
        """What it is called in messages."""
        name = self.where.rpartition(":")[2].lstrip(".")
        return name if self.item is None else f"{name}[{self.item!r}]"

    def problem(self, server: Any) -> str | None:
        """In what it is not as it is known, if it is not.

        Parameters
        ----------
        server : Scheduler, Worker or Client
            Whose names with a leading dot are.
        """
        try:
            found = self._find(server)
        except (ImportError, AttributeError):
            return f"has no {self.name}"
        if self.item is not None:
            return None if self.item in found else f"has no {self.name}"
        try:
            return None if self.takes is None else self._other_parameters(found)
        except (TypeError, ValueError):  # it is no function any more, or a compiled one
            return f"has another {self.name}"

    def _find(self, server: Any) -> Any:
        module, _, path = self.where.rpartition(":")
        found = import_module(module) if module else server
        for name in path.lstrip(".").split("."):
            found = getattr(found, name)
        return found

    def _other_parameters(self, function: Any) -> str | None:
        assert self.takes is not None
        parameters = inspect.signature(function).parameters.values()
        there = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        there.pop("self", None)
        takes = self.takes.split()
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            for name in takes:
                if name not in there:
                    return f"has a {self.name} without {name!r}"
        for name in there.keys() - {*takes, *self.may.split()}:
            if self.replaced or there[name].default is inspect.Parameter.empty:
                return f"has a {self.name} with {name!r}, which is not known"
        return None


def _of(owner: str, **takes: str) -> tuple[Seam, ...]:
    """What we call, and with which parameters."""
    return tuple(Seam(f"{owner}{name}", given) for name, given in takes.items())


def _names(module: str, names: str) -> tuple[Seam, ...]:
    """Names that we import."""
    return tuple(Seam(f"{module}:{name}") for name in names.split())


_SCHEDULER = "distributed.scheduler:Scheduler"
_WORKER = "distributed.worker:Worker"
_CLIENT = "distributed.client:Client"
_STATES = "distributed.worker_state_machine"
_PLUGINS = "distributed.diagnostics.plugin"

#: What has to be there before any other part of this package can be imported
PACKAGE = (
    *_names("distributed", "Client Future KilledWorker LocalCluster Reschedule Scheduler"),
    *_names("distributed", "SchedulerPlugin Worker WorkerPlugin get_client get_worker wait"),
    *_names(
        "distributed.active_memory_manager",
        "ActiveMemoryManagerPolicy ReduceReplicas SuggestionGenerator",
    ),
    *_names("distributed.client", "FutureCancelledError futures_of no_default"),
    *_names("distributed.comm.addressing", "get_address_host_port"),
    *_names("distributed.comm.core", "Comm CommClosedError"),
    *_names("distributed.comm.tcp", "TCP TLS convert_stream_closed_error"),
    *_names("distributed.batched", "BatchedSend"),
    *_names("distributed.core", "ConnectionPool ErrorMessage Status"),
    *_names("distributed.core", "context_meter_to_server_digest error_message send_recv"),
    *_names("distributed.metrics", "context_meter time"),
    *_names("distributed.protocol.pickle", "dumps loads"),
    *_names("distributed.protocol.serialize", "Serialize Serialized ToPickle"),
    *_names("distributed.protocol.serialize", "merge_and_deserialize serialize"),
    *_names("distributed.protocol.utils", "host_array"),
    *_names("distributed.scheduler", "Scheduler TaskState WorkerState"),
    *_names("distributed.utils", "TimeoutError ensure_memoryview offload silence_logging_cmgr"),
    *_names("distributed.worker", "WORKER_ANY_RUNNING"),
    *_names(_STATES, "FreeKeysEvent GatherDepBusyEvent GatherDepFailureEvent"),
    *_names(_STATES, "GatherDepNetworkFailureEvent GatherDepSuccessEvent RecsInstrs"),
    *_names(_STATES, "SecedeEvent StateMachineEvent TaskErredMsg WorkerState"),
    *_names("distributed.comm", "get_address_host"),
    *_names("distributed.core", "connect"),
    *_names("distributed.diagnostics.progress", "format_time"),
    *_names("distributed.diagnostics.progressbar", "ProgressBar ProgressWidget TextProgressBar"),
    *_names("distributed.utils", "is_kernel"),
    *_names("dask._task_spec", "Task parse_input"),
    *_names("dask.base", "is_dask_collection"),
    *_names("dask.core", "iskey"),
    *_names("dask.delayed", "Delayed"),
    *_names("dask.highlevelgraph", "HighLevelGraph MaterializedLayer"),
    *_names("dask.sizeof", "sizeof"),
    Seam("dask.sizeof:sizeof._lookup"),
    *_of("dask.sizeof:sizeof.", dispatch="cls", register="type"),
    *_names("dask.tokenize", "tokenize"),
    *_names("dask.utils", "SerializableLock format_bytes key_split parse_bytes parse_timedelta"),
    Seam(f"{_CLIENT}.__dict__", item="_register_plugin"),
    Seam(f"{_STATES}:WorkerState.__dict__", item="_handle_event"),
)

SCHEDULER = (
    # Replaced
    Seam(
        f"{_SCHEDULER}.scatter",
        "data workers client broadcast timeout",
        may="comm",
        replaced=True,
    ),
    Seam(
        f"{_SCHEDULER}.replicate",
        "keys n workers branching_factor delete stimulus_id",
        may="comm",
        replaced=True,
    ),
    Seam(f"{_SCHEDULER}.adaptive_target", "target_duration", replaced=True),
    Seam(f"{_SCHEDULER}.gather_on_worker", "worker_address who_has", replaced=True),
    Seam(f"{_SCHEDULER}._task_to_msg", "ts", may="duration", replaced=True),
    Seam(f"{_SCHEDULER}.remove_plugin", "name", replaced=True),
    Seam(f"{_SCHEDULER}.unregister_scheduler_plugin", "name", replaced=True),
    Seam(f"{_SCHEDULER}._transition_memory_forgotten", "key stimulus_id"),
    Seam(f"{_SCHEDULER}._transition_released_forgotten", "key stimulus_id"),
    Seam("._TRANSITIONS_TABLE", item=("memory", "forgotten")),
    Seam("._TRANSITIONS_TABLE", item=("released", "forgotten")),
    Seam(".handlers", item="scatter"),
    Seam(".handlers", item="replicate"),
    Seam(".stream_handlers", item="worker-status-change"),
    # Called
    *_of(
        f"{_SCHEDULER}.",
        _reschedule="key worker stimulus_id",
        add_keys="worker keys",
        add_plugin="plugin idempotent",
        add_replica="ts ws",
        client_desires_keys="keys client",
        client_releases_keys="keys client",
        coerce_address="addr",
        delete_worker_data="worker_address keys stimulus_id",
        handle_worker_status_change="status worker stimulus_id",
        log_event="topic msg",
        register_worker_plugin="comm plugin name idempotent",
        request_acquire_replicas="addr keys stimulus_id",
        transition="key finish stimulus_id",
        transitions="recommendations stimulus_id",
        unregister_worker_plugin="comm name",
        update_data="who_has nbytes client",
        worker_send="worker msg",
        workers_list="workers",
    ),
    *_of(
        f"{_PLUGINS}:SchedulerPlugin.",
        add_worker="scheduler worker",
        close="",
        log_event="topic msg",
        remove_client="scheduler client",
        remove_worker="scheduler worker stimulus_id",
        restart="scheduler",
        start="scheduler",
        transition="key start finish stimulus_id",
        valid_workers_downscaling="scheduler workers",
    ),
    Seam("distributed.scheduler:WorkerState._dec_needs_replica", "ts"),
    Seam("distributed.active_memory_manager:ActiveMemoryManagerExtension.add_policy", "policy"),
    Seam("distributed.active_memory_manager:ReduceReplicas.run", "", replaced=True),
    # Looked at
    *(
        Seam(f".{name}")
        for name in (
            "_active_graph_updates",
            "_ongoing_background_tasks.call_soon",
            "_replica_lock",
            "aliases",
            "clients",
            "extensions",
            "plugins",
            "rpc",
            "running",
            "stream_comms",
            "tasks",
            "worker_plugins",
            "workers",
        )
    ),
    Seam("distributed.scheduler:TaskState.__slots__", item="_queueable"),
    Seam("distributed.scheduler:TaskState.__slots__", item="processing_on"),
    Seam("distributed.scheduler:WorkerState.__slots__", item="needs_what"),
    Seam("distributed.scheduler:TaskState.__slots__", item="loose_restrictions"),
    Seam("distributed.scheduler:TaskState.__slots__", item="worker_restrictions"),
)

CLIENT = (
    Seam(
        f"{_CLIENT}._scatter",
        "data workers broadcast direct local_worker timeout hash",
        replaced=True,
    ),
    Seam(f"{_CLIENT}._gather", "futures errors direct local_worker", replaced=True),
    Seam(f"{_CLIENT}._gather_remote", "direct local_worker", replaced=True),
    Seam(f"{_CLIENT}._send_to_scheduler_safe", "msg", replaced=True),
    Seam(f"{_CLIENT}.unregister_scheduler_plugin", "name", replaced=True),
    *_of(
        f"{_CLIENT}.",
        _register_scheduler_plugin="plugin name idempotent",
        _send_to_scheduler="msg",
    ),
    *(
        Seam(f".{name}")
        for name in (
            "_gather_future",
            "_gather_keys",
            "_gather_semaphore",
            "_timeout",
            "direct_to_workers",
            "futures",
            "rpc",
            "scheduler_comm",
        )
    ),
    *(
        Seam("distributed.batched:BatchedSend.__init__.__code__.co_names", item=name)
        for name in ("batch_count", "interval", "next_deadline")
    ),
)

WORKER = (
    # Replaced
    Seam(f"{_WORKER}.gather_dep", "worker to_gather total_nbytes stimulus_id", replaced=True),
    Seam(f"{_WORKER}._get_client", "timeout", replaced=True),
    Seam(".stream_handlers", item="compute-task"),
    Seam(f"{_STATES}:ComputeTaskEvent.__annotations__", item="annotations"),
    # Called
    *_of(
        f"{_WORKER}.",
        _get_cause="keys",
        _update_metrics_received_data="start stop data cause worker",
        digest_metric="name value",
        handle_stimulus="",
        log_event="topic msg",
        update_data="data stimulus_id",
    ),
    *_of(
        f"{_PLUGINS}:WorkerPlugin.",
        setup="worker",
        teardown="worker",
        transition="key start finish",
    ),
    *_of(
        f"{_STATES}:",
        FreeKeysEvent="keys stimulus_id",
        GatherDepBusyEvent="worker total_nbytes stimulus_id",
        GatherDepNetworkFailureEvent="worker total_nbytes stimulus_id",
        GatherDepSuccessEvent="worker total_nbytes data stimulus_id",
        SecedeEvent="key compute_duration stimulus_id",
    ),
    Seam(f"{_STATES}:GatherDepFailureEvent.from_exception", "err worker total_nbytes stimulus_id"),
    Seam(f"{_STATES}:TaskErredMsg.from_task", "ts run_id stimulus_id thread"),
    Seam("distributed.core:send_recv", "comm"),
    Seam("distributed.core:ConnectionPool.connect", "addr timeout"),
    Seam("distributed.core:ConnectionPool.reuse", "addr comm"),
    Seam("tornado.iostream:IOStream.read_into", "buf partial"),
    Seam("tornado.iostream:IOStream.set_close_callback", "callback"),
    # Looked at
    *(
        Seam(f".{name}")
        for name in (
            "_ongoing_background_tasks.call_soon",
            "data",
            "handlers",
            "memory_manager.memory_limit",
            "rpc",
            "state.executing",
            "state.log",
            "state.ready",
            "state.tasks",
            "state.transfer_incoming_bytes_limit",
            "transfer_incoming_log",
            "transfer_outgoing_bytes",
            "transfer_outgoing_bytes_total",
            "transfer_outgoing_count",
            "transfer_outgoing_count_total",
            "transfer_outgoing_log",
        )
    ),
    # Tasks have clients that take part
    *(seam for seam in CLIENT if not seam.where.startswith(".")),
)

#: Without these the dashboard has no page, and all else works.
DASHBOARD = (
    *_names("distributed.dashboard.components.scheduler", "BOKEH_THEME env"),
    *_names("distributed.dashboard.core", "DaskBokehTornado"),
    *_names("distributed.dashboard.scheduler", "template_variables"),
    Seam("distributed.dashboard.core:DaskBokehTornado.find_handler", "request"),
    Seam(".http_application.applications"),
)

#: Without these there are no metrics, and all else works.
METRICS = (
    Seam("distributed.http.prometheus:PrometheusCollector"),
    Seam("distributed.http.prometheus:PrometheusCollector.build_name", "name"),
    Seam("distributed.http.scheduler.prometheus.core:PrometheusHandler._collectors"),
    Seam("distributed.http.worker.prometheus.core:PrometheusHandler._collector"),
)
