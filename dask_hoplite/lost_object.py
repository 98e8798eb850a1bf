"""What becomes of a scattered object whose last copy is lost, and of the tasks that need it.

Dask forgets them, and clients hear that they are cancelled, with a word in the scheduler's log
only. With Hoplite, clients hear an error that says what was lost, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import Serialized, serialize
from distributed.scheduler import TaskState

from dask_hoplite.core.events import Key


def install(scheduler: Scheduler, describe: Callable[[TaskState], Exception | None]) -> None:
    """Replace two of the scheduler's transitions, until :func:`uninstall`.

    Parameters
    ----------
    scheduler : Scheduler
        Where.
    describe : callable
        What the loss of an object is to be reported as; None: as Dask does.
    """
    doomed: dict[Key, Serialized] = {}  # tasks that are about to be forgotten, and why

    def forget(plain: Callable[..., Any], key: Key, stimulus_id: str, **kwargs: Any) -> Any:
        recommendations, messages, to_workers = plain(scheduler, key, stimulus_id, **kwargs)
        if (error := doomed.pop(key, None)) is not None:
            report = {"op": "task-erred", "key": key, "exception": error, "traceback": None}
            messages = {client: [report] for client in messages}
        return recommendations, messages, to_workers

    def memory_forgotten(scheduler: Scheduler, key: Key, stimulus_id: str, **kwargs: Any) -> Any:
        ts = scheduler.tasks[key]
        _need_no_more(ts)
        if not ts.who_has and not ts.run_spec and (error := describe(ts)) is not None:
            doomed.update(dict.fromkeys(_forgotten_with(ts), Serialized(*serialize(error))))
        return forget(table["memory", "forgotten"], key, stimulus_id, **kwargs)

    def released_forgotten(scheduler: Scheduler, key: Key, stimulus_id: str, **kwargs: Any) -> Any:
        return forget(table["released", "forgotten"], key, stimulus_id, **kwargs)

    table = scheduler._TRANSITIONS_TABLE
    scheduler._TRANSITIONS_TABLE = {  # type: ignore[misc]
        **table,
        ("memory", "forgotten"): memory_forgotten,
        ("released", "forgotten"): released_forgotten,
    }


def uninstall(scheduler: Scheduler) -> None:
    """Put Dask's transitions back."""
    scheduler.__dict__.pop("_TRANSITIONS_TABLE", None)


def _need_no_more(lost: TaskState) -> None:
    """Count for no worker any more what its tasks were to fetch and cannot have.

    Dask takes it from the tasks, and does not find it there when it takes these from the workers:
    they would seem busy for ever.
    """
    for dependent in lost.dependents:
        ws = dependent.processing_on
        if ws is not None and lost in ws.needs_what:
            ws._dec_needs_replica(lost)


def _forgotten_with(lost: TaskState) -> Iterator[Key]:
    """The keys that Dask will forget together with this one."""
    found, ahead = {lost}, [lost]
    while ahead:
        ts = ahead.pop()
        yield ts.key
        for dependent in ts.dependents - found:
            if dependent.state not in ("memory", "erred"):
                found.add(dependent)
                ahead.append(dependent)
