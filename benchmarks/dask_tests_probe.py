"""What is put into the processes of Dask's tests: it writes down what happens there.

As a plugin of pytest, it notes which tests there are and what became of each, at once, so that
nothing is lost if the process has to be killed. As a preload of the scheduler, it notes where
Hoplite was installed and how often it moved something, for the test that is running, also in the
processes that a test starts.

Many of these tests use workers that override ``gather_dep`` or ``get_data`` in order to hold up a
fetch, or to let it fail. Hoplite does not call these methods for what it moves itself. So that the
tests hold up Hoplite's fetches just the same, such a worker gets them in these two places.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
from typing import Any

#: Names the file to which lines of JSON are appended
RECORDS = "HOPLITE_DASK_TESTS_RECORDS"

#: If this is set, clients in the process of the tests use Hoplite too.
CLIENTS = "HOPLITE_DASK_TESTS_CLIENTS"


def note(kind: str, test: str, **more: Any) -> None:
    """Append a record."""
    with open(os.environ[RECORDS], "a") as file:
        file.write(json.dumps({"kind": kind, "test": test, **more}) + "\n")


# pytest


def pytest_configure() -> None:
    """Do for clients what ``client.register_plugin(Hoplite())`` does to the one that calls it."""
    if not os.environ.get(CLIENTS):
        return
    from distributed import Client

    from dask_hoplite.client import extension
    from dask_hoplite.exceptions import NotInstalledError

    plain_start = Client._start

    @functools.wraps(plain_start)
    async def start(self: Client, *args: Any, **kwargs: Any) -> Any:
        client = await plain_start(self, *args, **kwargs)
        if self.status == "running":
            with contextlib.suppress(NotInstalledError, OSError):
                await extension(self)
        return client

    Client._start = start  # type: ignore[method-assign]


def pytest_collection_finish(session: Any) -> None:
    """Note which tests there are."""
    for item in session.items:
        note("collected", item.nodeid)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins: if nothing else follows, it took the process with it."""
    note("began", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Note what became of one phase (set-up, call, tear-down) of a test."""
    outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
    if report.when == "call" or outcome != "passed":
        why = str(report.longrepr) if outcome == "failed" else ""
        note("outcome", report.nodeid, outcome=outcome, why=why[-20_000:])


# Dask


async def dask_setup(scheduler: Any) -> None:
    """Note that a scheduler has Hoplite, and count what this moves."""
    from dask_hoplite import Hoplite
    from dask_hoplite.core.events import Event, Finished
    from dask_hoplite.core.instructions import Instruction

    let_tests_override()

    # Set by pytest, as "path::name (phase)", and inherited by the processes that a test starts
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    [hoplite] = [plugin for plugin in scheduler.plugins.values() if isinstance(plugin, Hoplite)]
    note("installed", test)
    handle = hoplite.handle

    def counted(event: Event) -> list[Instruction]:
        if isinstance(event, Finished):
            note("moved", test)
        return handle(event)

    hoplite.handle = counted  # type: ignore[method-assign]


@functools.cache
def let_tests_override() -> None:
    """Let what a subclass of :class:`distributed.Worker` overrides apply to Hoplite's fetches."""
    from distributed import Worker

    from dask_hoplite.worker import HopliteWorker

    plain_gather_dep, plain_get_data = Worker.gather_dep, Worker.get_data
    plain_install, plain_teardown = HopliteWorker._install, HopliteWorker.teardown
    pulled: contextvars.ContextVar[dict[str, Any] | None]
    pulled = contextvars.ContextVar("pulled", default=None)

    @functools.wraps(plain_gather_dep)
    async def gather_dep(self: Worker, *args: Any, **kwargs: Any) -> Any:
        hoplite = self.__dict__.get("_hoplite")
        if hoplite is None:
            return await plain_gather_dep(self, *args, **kwargs)
        return await hoplite.gather_dep(*args, **kwargs)

    @functools.wraps(plain_get_data)  # Dask looks at its parameters
    async def get_data(self: Worker, comm: Any, *args: Any, **kwargs: Any) -> Any:
        pull = pulled.get()
        if pull is None:
            return await plain_get_data(self, comm, *args, **kwargs)
        return await self._hoplite.serve(comm, **pull)  # type: ignore[attr-defined]

    def install(self: HopliteWorker, worker: Worker) -> None:
        plain_install(self, worker)
        self.plain_gather_dep = functools.partial(plain_gather_dep, worker)
        worker._hoplite = self  # type: ignore[attr-defined]
        if type(worker).gather_dep is not gather_dep:
            del worker.gather_dep
        if type(worker).get_data is not get_data:

            async def serve(comm: Any, **pull: Any) -> Any:
                token = pulled.set(pull)
                try:
                    return await worker.get_data(comm, keys=[pull["key"]], who=pull["receiver"])
                finally:
                    pulled.reset(token)

            worker.handlers["hoplite_pull"] = serve

    async def teardown(self: HopliteWorker, worker: Worker) -> None:
        worker.__dict__.pop("_hoplite", None)
        await plain_teardown(self, worker)

    Worker.gather_dep, Worker.get_data = gather_dep, get_data  # type: ignore[method-assign]
    HopliteWorker._install, HopliteWorker.teardown = install, teardown  # type: ignore[method-assign]
