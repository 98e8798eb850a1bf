"""``dask hoplite bench``, small: on a cluster that others use, and on one of its own."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster, wait

from benchmarks.laboratory import Laboratory, why_not
from dask_hoplite import Hoplite, versions
from dask_hoplite.bench import cluster as shared
from dask_hoplite.bench import command, link
from dask_hoplite.bench.cluster import BenchError, SharedCluster, limit, look
from dask_hoplite.bench.workloads import Tasks, in_order, workers_of
from dask_hoplite.cli import hoplite

SMALL = ["--sizes", "1MiB", "--repetitions", "2", "--wait", "0"]


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    """A user of the cluster, and of Hoplite, made with an argument."""
    with Client(cluster, set_as_default=False) as client:
        client.register_plugin(Hoplite(min_size="600 KiB"))
        yield client
        client.unregister_scheduler_plugin("hoplite")


def bench(*options):
    return CliRunner().invoke(hoplite, ["bench", *options])


def test_a_cluster_that_is_in_use(cluster, client, tmp_path):
    x = client.submit(np.arange, 1000, pure=False)
    x.result()
    result = bench("--scheduler-address", cluster.scheduler_address, *SMALL)
    assert result.exit_code == 1
    assert "1 other clients are connected and it has 1 tasks or data" in result.stderr
    assert "--yes" in result.stderr and not result.stdout

    path, file = tmp_path / "figures.json", tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": cluster.scheduler.address}))
    where = ["--scheduler-file", str(file), "--yes", "--json", str(path)]
    result = bench(*where, "--ops", "tasks, scatter,allreduce", *SMALL)
    assert result.exit_code == 0, result.output
    for word in ("2 workers on 1 host", "tasks", "scatter", "allreduce", "× plain", "1.00 MiB"):
        assert word in result.stdout
    assert "tasks 1.00 MiB hoplite #2: " in result.stderr, "the progress"
    figures = json.loads(path.read_text())
    assert figures["goodput"] is None and list(figures["hosts"].values()) == [2]
    counts = {"tasks": [2, 2], "scatter": [1, 2], "allreduce": [2, 2]}
    for op, expected in counts.items():
        rows = [row for row in figures["records"] if row["op"] == op]
        assert [sum(row["system"] == s for row in rows) for s in ("plain", "hoplite")] == expected
        assert all(row["correct"] and row["seconds"] > 0 for row in rows), rows

    assert cluster.scheduler.plugins["hoplite"].overrides["min_size"] == "600 KiB"
    assert set(cluster.scheduler.tasks) == {x.key}
    assert np.array_equal(x.result(), np.arange(1000))


def test_a_cluster_without_hoplite(cluster):
    result = bench("--scheduler-address", cluster.scheduler_address, "--ops", "reduce", *SMALL)
    assert result.exit_code == 0, result.output
    assert "reduce" in result.stdout and "hoplite" in result.stdout
    assert "hoplite" not in cluster.scheduler.plugins and not cluster.scheduler.tasks


def test_an_operation_without_an_end(cluster, client, monkeypatch):
    monkeypatch.setattr(Tasks, "run", lambda self: wait(self.on(self.workers[0], time.sleep, 2)))
    with SharedCluster(
        lambda: Client(cluster, set_as_default=False), timeout=0.5, alone=False
    ) as c:
        record = c.measure(shared.Side("plain"), "tasks", 2**20, 0)
        assert record["error"] == "no end within 0.5 s" and record["timeout"] == 0.5
        assert "hoplite" not in cluster.scheduler.plugins
    assert "hoplite" in cluster.scheduler.plugins, "as before"
    assert client.run_on_scheduler(look, client.id)["tasks"] == 0


def test_a_worker_that_leaves_in_the_middle(cluster, monkeypatch):
    """A copy is lacking then, but no value is wrong, and the time is not that of all workers."""
    with SharedCluster(lambda: Client(cluster, set_as_default=False), timeout=30) as c:
        left = iter([{*c.workers, "tcp://10.0.0.1:1"}, set(c.workers)])
        monkeypatch.setattr(c, "_addresses", lambda: next(left))
        record = c.measure(shared.Side("plain"), "tasks", 2**20, 0)
    assert record == {"error": "BenchError: workers have left or joined meanwhile", "timeout": None}
    assert not cluster.scheduler.tasks


def test_where_hoplite_steps_aside_plain_dask_is_not_measured_in_its_place(cluster, monkeypatch):
    monkeypatch.setattr(versions, "check", lambda *_: "this Dask is not known")
    with SharedCluster(lambda: Client(cluster, set_as_default=False), timeout=30) as c:
        with pytest.warns(UserWarning, match="not known"):
            record = c.measure(shared.Side("hoplite"), "tasks", 2**20, 0)
        assert "NotInstalledError: " in record["error"] and "not known" in record["error"]
    assert not cluster.scheduler.tasks and "hoplite" not in cluster.scheduler.plugins


def test_what_keeps_a_cluster_from_being_measured(cluster, monkeypatch):
    def connect():
        return Client(cluster, set_as_default=False)

    with SharedCluster(connect, timeout=60) as c:
        with pytest.raises(BenchError, match=r"allgather of 1\.00 TiB needs up to 4\.00 TiB"):
            c.check_memory(["allgather"], 2**40)
        c.check_memory(["tasks", "allgather"], 2**20)
    monkeypatch.setattr(shared.dask_hoplite, "__version__", "9.9")
    with pytest.raises(BenchError, match=r"9\.9 has to be installed .* has 0\.\d"):  # noqa: SIM117
        with SharedCluster(connect, timeout=60):
            pass


def refuse(host):
    raise OSError("no ports here")


def test_workers_are_known_whatever_the_client_has_asked_last(cluster, monkeypatch):
    with Client(cluster, set_as_default=False) as client:
        monkeypatch.setattr(client, "_scheduler_identity", {"workers": {}})  # as at any moment
        found = workers_of(client)
        assert found.keys() == client.nthreads().keys()
        assert {worker["host"] for worker in found.values()} == {"127.0.0.1"}
        assert {str(worker["name"]) for worker in found.values()} == {"0", "1"}


def test_a_raw_stream(cluster, monkeypatch):
    with Client(cluster, set_as_default=False) as client:
        a, b = client.nthreads()
        with pytest.raises(OSError):
            client.run(link.fill, "127.0.0.1", 1, workers=[a])
    with SharedCluster(lambda: Client(cluster, set_as_default=False), timeout=60) as c:
        c.workers = {a: {"host": "x"}, b: {"host": "y"}}  # as if they were
        c.hosts = Counter("xy")
        monkeypatch.setattr(link, "TIMES", 1)
        goodput, about = c.measure_link()
        assert goodput > 1e6 and "Mbit/s" in about
        assert c.limit("tasks", 10**6) == 10**6 / goodput
        monkeypatch.setattr(link, "drain", refuse)
        assert c.measure_link() == (None, f"no raw stream from {a} to {b}: no ports here")


def test_limits():
    assert limit(8, 2, 1e6, "tasks", 10**6) == 1
    assert limit(8, 2, 1e6, "allgather", 10**6) == 6
    assert limit(8, 2, 1e6, "scatter", 10**6) is None, "the client's link is another one"
    assert limit(2, 2, 1e6, "allgather", 10**6) is None


def test_the_order_of_workers():
    names = {"a": "SLURM-10-0", "b": "SLURM-9-1", "c": "SLURM-9-0", "d": 2, "e": "x"}
    hosts = {"a": "1", "b": "2", "c": "1", "d": "2", "e": "3"}
    workers = {worker: {"name": name, "host": hosts[worker]} for worker, name in names.items()}
    assert in_order(workers) == ["e", "d", "b", "c", "a"]


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--sizes", "1MiB,large"], "'large' is not a size"),
        (["--sizes", "1kB"], "less than 1.00 MiB"),
        (["--sizes", ","], "names nothing"),
        (["--ops", "tasks,scater"], "'scater' is none of tasks, graph"),
        (["--workers", "1"], "--workers"),
        (["--repetitions", "0"], "--repetitions"),
        (["--timeout", "0"], "--timeout"),
        (["--scheduler-file", "/no/such/file"], "No such file"),
        (["--scheduler-file", __file__], "is not what a scheduler writes"),
        (["--scheduler-file", __file__, "--scheduler-address", "x"], "not both"),
        (["--scheduler-address", "x", "--workers", "2"], "--workers is for a local cluster"),
        (["--json", "/no/such/folder/x"], "No such file"),
    ],
)
def test_bad_options(options, complaint):
    result = bench(*options)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x", "tcp://"])
def test_no_scheduler(address, monkeypatch):
    monkeypatch.setattr(command, "PATIENCE", 0.2)
    result = bench("--scheduler-address", address)
    assert result.exit_code == 1
    assert f"No scheduler answers at {address}" in result.stderr


def test_no_address(monkeypatch):
    monkeypatch.setattr("distributed.Client", None)  # one that never connects closes slowly
    result = bench("--scheduler-address", "nonsense")
    assert result.exit_code == 1
    assert "No scheduler answers at nonsense: missing port number" in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.lab
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_cluster_with_links():
    dask = [sys.executable, "-m", "dask"]
    with Laboratory(hosts=2, rate="200mbit") as lab:
        address = f"tcp://{lab.address('scheduler')}:8786"
        here = ["--no-dashboard", "--host"]
        lab.popen("scheduler", [*dask, "scheduler", *here, lab.address("scheduler")])
        for host in range(2):
            small = ["--no-nanny", "--nthreads", "1"]
            lab.popen(host, [*dask, "worker", address, *small, *here, lab.address(host)])
        script = "import sys, distributed as d; d.Client(sys.argv[1]).wait_for_workers(2)"
        lab.run("client", [sys.executable, "-c", script, address])
        options = ["--ops", "tasks", "--sizes", "4MiB", "--repetitions", "1"]
        command = [*dask, "hoplite", "bench", "--scheduler-address", address, *options]
        output = lab.run("client", command)
    assert "2 workers on 2 hosts; a raw stream between two hosts carries 1" in output
    assert "× limit" in output and "× the limit)" in output
