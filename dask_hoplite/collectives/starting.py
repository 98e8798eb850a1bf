"""How the task of a reduction begins: at once, since it only waits.

All threads of a worker may be busy with tasks that wait for the very result. In Dask's state
machine it would wait for one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed.worker_state_machine import RecsInstrs, StateMachineEvent, WorkerState

from dask_hoplite.core.events import Key

#: The annotation of a task that is a reduction
ANNOTATION = "hoplite-reduction"


@dataclass
class StartEvent(StateMachineEvent):
    """A task that is ready may begin, though there is no slot for it."""

    __slots__ = ("key",)
    key: Key


@WorkerState.__dict__["_handle_event"].register(StartEvent)
def _start(state: WorkerState, event: StartEvent) -> RecsInstrs:
    recommendations: dict[Any, Any] = {}
    ts = state.tasks.get(event.key)
    if ts is not None and ts.state == "ready" and state.running:
        state.ready.discard(ts)
        state.executing.add(ts)
        recommendations[ts] = "executing"
    return recommendations, []
