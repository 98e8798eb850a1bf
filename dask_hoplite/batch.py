"""Tasks that go to the scheduler together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dask._task_spec import Task, parse_input
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future
from distributed.comm.core import CommClosedError


class Batch:
    """Submits tasks in one graph: all those that are there when the event loop comes around.

    Each graph costs the scheduler some milliseconds, however small it is, and the next one waits
    for that. Tasks may take futures of the same batch, and each has annotations of its own.

    Parameters
    ----------
    client : Client
        One whose event loop is the running one.
    """

    def __init__(self, client: Client):
        self.client = client
        self._layers: dict[str, MaterializedLayer] = {}

    def submit(
        self, function: Callable[..., Any], *args: Any, key: str, **annotations: Any
    ) -> Future:
        """Add a task, with annotations as of :func:`dask.annotate`.

        If it cannot be sent, its future has the error.
        """
        if not self._layers:
            asyncio.get_running_loop().call_soon(self._send)
        task = Task(key, function, *map(parse_input, args))
        self._layers[key] = MaterializedLayer({key: task}, annotations=annotations)
        return Future(key, self.client)

    def _send(self) -> None:
        layers, self._layers = self._layers, {}
        graph = HighLevelGraph(layers, {key: set() for key in layers})
        try:
            if self.client.status not in ("running", "connecting"):  # it would not be sent, quietly
                raise CommClosedError(f"the client is {self.client.status}")
            # Among tasks of equal priority, as those of Client.submit
            self.client.get(graph, list(layers), sync=False, fifo_timeout="100 ms")
        except Exception as error:  # or a function has no pickle
            for key in layers:
                if (state := self.client.futures.get(key)) is not None:
                    state.set_error(error, None)
