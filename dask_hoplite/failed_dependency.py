"""What becomes of tasks whose dependency is there but cannot be brought to them.

When a dependency cannot be serialised at its source, or deserialised here, Dask's worker marks it
as erred and leaves the tasks that wait for it waiting for ever (dask/distributed#6705). With
Hoplite they fail, with the error.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from distributed.core import ErrorMessage
from distributed.worker_state_machine import (
    RecsInstrs,
    StateMachineEvent,
    TaskErredMsg,
    WorkerState,
)

from dask_hoplite.core.events import Key


@dataclass
class FailedDependencyEvent(StateMachineEvent):
    """Dependencies cannot be brought here, for a reason that is not the network's."""

    __slots__ = ("error", "keys")
    keys: Collection[Key]
    error: ErrorMessage


@WorkerState.__dict__["_handle_event"].register(FailedDependencyEvent)
def _fail_dependents(state: WorkerState, event: FailedDependencyEvent) -> RecsInstrs:
    recommendations: dict[Any, Any] = {}
    messages: list[Any] = []
    for key in event.keys:
        for task in state.tasks[key].dependents if key in state.tasks else ():
            if task.state == "waiting" and task not in recommendations:
                task.exception = event.error["exception"]
                task.traceback = event.error["traceback"]
                task.exception_text = event.error["exception_text"]
                task.traceback_text = event.error["traceback_text"]
                messages.append(
                    TaskErredMsg.from_task(
                        task, run_id=task.run_id, stimulus_id=event.stimulus_id, thread=None
                    )
                )
                recommendations[task] = "released"
    return recommendations, messages
