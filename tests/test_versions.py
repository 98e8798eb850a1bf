"""Another Dask than is known, other versions of this package, a preload in the wrong place."""

from __future__ import annotations

import ast
import configparser
import logging
import pathlib
import subprocess
import sys

import distributed
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import captured_logger, gen_test

import dask_hoplite as hoplite
from dask_hoplite import Hoplite, NotInstalledError, seams, versions
from dask_hoplite.seams import Seam
from tests.helpers import array, hoplite_cluster, until

PACKAGE = pathlib.Path(hoplite.__file__).parent
OURS = hoplite.__version__


def other_scheduler(self, worker_address, who_has, urgent=False):
    """As Scheduler.gather_on_worker may be one day."""


async def works_as_plain_dask(c, s, workers):
    """Nothing is replaced, and objects move."""
    assert "gather_on_worker" not in s.__dict__ and "_scatter" not in c.__dict__
    assert not any("gather_dep" in w.__dict__ for w in workers)
    x = await c.scatter(array(), broadcast=True)
    total = c.submit(np.sum, x, workers=[workers[-1].address])
    assert await total == array().sum(dtype=int)
    assert np.array_equal(await x, array())


async def refuse(c, reason):
    """Collectives say why there are none."""
    with pytest.raises(NotInstalledError, match=reason):
        await hoplite.broadcast(array(), client=c)
    with pytest.raises(NotInstalledError, match=reason):
        await hoplite.reduce(c.map(array, [1000, 1000], pure=False), client=c)


# What seams are


def test_all_is_known_here():
    assert versions.check(seams.PACKAGE) is None


def test_the_list_names_all_that_is_imported():
    listed = {seam.where for seam in (*seams.PACKAGE, *seams.METRICS, *seams.DASHBOARD)}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in (
                "dask",
                "distributed",
            ):
                assert {f"{node.module}:{alias.name}" for alias in node.names} <= listed, path


def test_the_list_names_all_that_is_replaced_or_called():
    listed = {seam.where.rpartition(".")[2] for seam in (*seams.SCHEDULER, *seams.WORKER)}
    calls = {"scheduler": Scheduler, "worker": Worker}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = node.func.value, node.func.attr
                whose = getattr(owner, "attr", getattr(owner, "id", ""))
                if whose in calls and hasattr(calls[whose], name):
                    assert name in listed, f"{path}: {whose}.{name}"


def function(self, a, b, *, c=1):
    """Something of Dask's."""


@pytest.mark.parametrize(
    "takes, may, replaced, problem",
    [
        ("a b c", "", True, None),
        ("a b", "c", True, None),
        ("a b", "", False, None),
        ("a b", "", True, "has a function with 'c', which is not known"),
        ("a", "c", True, "has a function with 'b', which is not known"),
        ("a", "", False, "has a function with 'b', which is not known"),
        ("a b c d", "", False, "has a function without 'd'"),
    ],
)
def test_parameters(takes, may, replaced, problem):
    seam = Seam(f"{__name__}:function", takes, may, replaced)
    assert seam.problem(None) == problem


def test_what_is_missing():
    assert Seam("distributed.nowhere:x").problem(None) == "has no x"
    assert Seam("distributed:Client.nothing").problem(None) == "has no Client.nothing"
    assert Seam(".nothing.at_all").problem(object()) == "has no nothing.at_all"
    assert Seam("sys:maxsize", "key").problem(None) == "has another maxsize"
    assert Seam("builtins:max", "key").problem(None) == "has another max"
    found = Seam(".handlers", item="op").problem(type("Server", (), {"handlers": {}}))
    assert found == "has no handlers['op']"


def test_the_oldest_is_what_setup_says():
    parser = configparser.ConfigParser()
    parser.read(PACKAGE.parent / "setup.cfg")
    requirements = parser["options"]["install_requires"].split("\n")
    assert f"distributed >= {versions.OLDEST}" in requirements


@pytest.mark.parametrize("version", ["2024.12.1", "2023.1.0"])
def test_too_old(monkeypatch, version):
    monkeypatch.setattr(distributed, "__version__", version)
    reason = versions.check(())
    assert f"distributed {version} is too old" in reason
    assert "2025.1.0 to" in reason and "install" in reason


def test_one_that_is_not_released_is_not_too_old(monkeypatch):
    monkeypatch.setattr(distributed, "__version__", "0+unknown")
    assert versions.check(()) is None


# Each side


@hoplite_cluster()
async def test_the_scheduler_steps_aside(c, s, *workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "gather_on_worker", other_scheduler)
        said = captured_logger("dask_hoplite", logging.WARNING)
        with said as log, pytest.warns(UserWarning, match="goes on as a plain Dask client"):
            await c.register_plugin(Hoplite())
    said = log.getvalue()
    assert said.count("\n") == 1
    assert f"distributed {distributed.__version__} has a Scheduler.gather_on_worker" in said
    assert "with 'urgent'" in said and "install one of these" in said
    assert not any("hoplite" in w.plugins for w in workers)
    await works_as_plain_dask(c, s, workers)
    await refuse(c, "gather_on_worker with 'urgent'")
    async with Client(s.address, asynchronous=True) as late:
        with pytest.warns(UserWarning, match="'urgent'"):
            await late.register_plugin(Hoplite())
    await c.unregister_scheduler_plugin("hoplite")
    await refuse(c, r"register_plugin\(Hoplite\(\)\) first")
    assert not [name for name in s.handlers if "hoplite" in name]
    await c.register_plugin(Hoplite())
    await hoplite.broadcast(array(), client=c)


@hoplite_cluster()
async def test_workers_step_aside_and_then_all(c, s, *workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Worker, "_get_cause")
        said = captured_logger("dask_hoplite", logging.WARNING)
        with said as log, pytest.warns(UserWarning, match="has no Worker._get_cause"):
            await c.register_plugin(Hoplite())
    lines = log.getvalue().splitlines()
    assert len([line for line in lines if line.startswith("on tcp://")]) == 1
    assert len(lines) == 5, lines  # each worker says it once, and the scheduler
    await until(lambda: not any("hoplite" in w.plugins for w in workers))
    await works_as_plain_dask(c, s, workers)
    await refuse(c, "has no Worker._get_cause")


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_late_worker_steps_aside(c, s, *workers):
    await c.register_plugin(Hoplite())
    held = await hoplite.broadcast(array(seed=1), client=c)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "_get_client", lambda self, how: None)
        async with Worker(s.address, nthreads=1) as late:
            await until(lambda: not any("hoplite" in w.plugins for w in (*workers, late)))
            total = c.submit(np.sum, held, workers=[late.address])
            assert await total == array(seed=1).sum(dtype=int)
    assert "hoplite" not in s.extensions
    with pytest.raises(NotInstalledError):
        await hoplite.status(client=c)


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_client_steps_aside(c, s, *workers):
    async with Client(s.address, asynchronous=True) as other:
        await other.register_plugin(Hoplite())
        assert "_scatter" in other.__dict__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "_scatter", lambda self, data, where: None)
        with pytest.warns(UserWarning, match=r"Client\._scatter without 'workers'"):
            await c.register_plugin(Hoplite())
        with pytest.raises(NotInstalledError, match=r"Client\._scatter"):
            await hoplite.status(client=c)
    assert "_scatter" not in c.__dict__
    assert "hoplite" in s.extensions, "others go on"


OTHER_DASK = """
import logging
import distributed
from distributed import Client, LocalCluster
{change}

if __name__ == "__main__":
    import dask_hoplite as hoplite
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0",
                      silence_logs=logging.WARNING) as cluster, Client(cluster) as client:
        client.register_plugin(hoplite.Hoplite(min_size="1 MiB"))
        assert client.scatter(1, broadcast=True).result() == 1
        try:
            hoplite.broadcast(1)
        except hoplite.NotInstalledError as error:
            print(error)
"""


@pytest.mark.parametrize(
    "change, reason",
    [
        ("distributed.__version__ = '2024.1.0'", "distributed 2024.1.0 is too old"),
        (
            "import distributed.worker_state_machine as w; del w.GatherDepBusyEvent",
            "has no GatherDepBusyEvent",
        ),
    ],
)
def test_what_cannot_even_be_imported(change, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OTHER_DASK.format(change=change))
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert reason in run.stdout and "steps aside" in run.stdout
    assert "Traceback" not in run.stderr
    assert reason in run.stderr


# Versions of this package


def test_one_sentence():
    same = {"the scheduler": "1.0", "this client": "1.0"}
    assert versions.differing(same) is None
    workers = {f"w{i}": "2.0" for i in range(5)}
    assert versions.differing({**same, **workers}) == (
        "Versions of dask-hoplite differ: the scheduler, this client have 1.0; "
        "w0, w1, w2, 2 more have 2.0"
    )


@hoplite_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_with_another_version(c, s, a, b):
    with captured_logger("dask_hoplite.peers", logging.WARNING) as log:
        await c.register_plugin(Hoplite())
        assert not log.getvalue()
        await s.handlers["hoplite_meet"](a.address, "9.9", None)  # as such a worker says
    assert f"{a.address} has 9.9" in log.getvalue()
    async with Client(s.address, asynchronous=True) as other:
        with pytest.warns(UserWarning, match="differ") as warned:
            await other.register_plugin(Hoplite())
        [said] = [str(warning.message) for warning in warned]
        assert said == (
            f"Versions of dask-hoplite differ: the scheduler, {b.address}, this client have {OURS}"
            f"; {a.address} has 9.9"
        )
        x = await hoplite.broadcast(array(), client=other)
        assert len(s.tasks[x.key].who_has) == 2, "it works all the same"


# Preload


@gen_test()
async def test_preload_on_a_worker():
    async with Scheduler(dashboard_address=":0", port=0) as s:
        with captured_logger("dask_hoplite", logging.WARNING) as log:
            async with Worker(s.address, preload=["dask_hoplite"]) as w:
                assert "hoplite" not in w.plugins
    assert log.getvalue().count("\n") == 1
    assert "dask scheduler --preload dask_hoplite" in log.getvalue()
    assert "on a worker it does nothing" in log.getvalue()
