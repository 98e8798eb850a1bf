"""Programs by other people's libraries do the same with Hoplite, which moves what is large."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_hoplite as hoplite
from benchmarks.programs import PROGRAMS
from dask_hoplite import Hoplite

#: Of the objects that go to several workers
SIZE = 2**21

WORKERS = 3

#: Which worker has which rank is by chance, and so is the order in which gradients are added.
BY_CHANCE = {"xgboost-train"}

#: Here Dask may find it quicker to run all tasks where the large object is.
SOMETIMES = {"dask-grid-search", "post-fit"}


@pytest.fixture(scope="module")
def client():
    # In one process, since each one would have to import these libraries, but on real sockets
    with (
        LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def run(client):
    """Run a program from its beginning, and let go of everything."""

    def run(name):
        program = PROGRAMS[name]
        return program.run(client, program.load(client, SIZE))

    return run


def count_received(dask_worker):
    """How many fetches of a worker Dask has noted so far, by whatever way."""
    return len(dask_worker.transfer_incoming_log)


def received(counts, dask_worker):
    """The large objects that a worker has fetched since then."""
    rows = list(dask_worker.transfer_incoming_log)[counts[dask_worker.contact_address] :]
    return {repr(key) for row in rows for key, size in row["keys"].items() if size >= SIZE / 3}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_plain_dask(name, client, run):
    expected = run(name)
    before = client.run(count_received)
    client.register_plugin(Hoplite())
    try:
        found = run(name)
        moved = {(row["receiver"], repr(row["key"])) for row in hoplite.transfers(client=client)}
    finally:
        client.unregister_scheduler_plugin("hoplite")
    assert found.dtype == expected.dtype
    if name in BY_CHANCE:
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    else:
        np.testing.assert_array_equal(found, expected)
    fetched = client.run(received, before)
    large = {(worker, key) for worker, keys in fetched.items() for key in keys}
    assert large <= moved, "all that is large goes by Hoplite"
    if PROGRAMS[name].hot and name not in SOMETIMES:
        assert moved
