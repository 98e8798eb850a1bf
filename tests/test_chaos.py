"""The command ``python -m benchmarks chaos``, and that it does not overlook anything."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from benchmarks.chaos import leftovers
from benchmarks.chaos.cluster import ROOT, Cluster
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.load import Load, Operation
from benchmarks.chaos.run import problems
from benchmarks.chaos.values import digest, make, same
from dask_hoplite.exceptions import TransferError
from dask_hoplite.transfer.buffer import Buffer
from dask_hoplite.transfer.layout import dump
from tests.helpers import array, hoplite_cluster, plugin


def chaos(tmp_path: Path, *options: str) -> tuple[int, list[dict]]:
    """Run the command; return its exit code and what it has noted."""
    command = [sys.executable, "-m", "benchmarks", "chaos", "--out", str(tmp_path), *options]
    code = subprocess.run(command, cwd=ROOT, timeout=110).returncode
    [path] = tmp_path.glob("*.jsonl")
    return code, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_short_run(tmp_path):
    code, rows = chaos(tmp_path, "--minutes", "0.1", "--workers", "3", "--seed", "5")
    verdicts = [row["verdict"] for row in rows if row["what"] == "verdict"]
    assert code == 0 and rows[-1]["failures"] == 0
    assert verdicts.count("right") > 10
    assert set(verdicts) <= {"right", "justified"}


def test_sabotage_is_found(tmp_path):
    sabotage = ["value", "hang", "leak", "error"]
    options = ["--minutes", "0", "--workers", "2", "--settle", "8"]
    code, rows = chaos(tmp_path, *options, "--sabotage", *sabotage)
    found = [row for row in rows if row["what"] == "verdict" and row["verdict"] != "right"]
    assert code == 1 and rows[-1]["failures"] == 4
    assert [row["verdict"] for row in found] == ["wrong", "hang", "unexplained", "leak"]
    assert found[-1]["wishes"] == ["leaked"]


# The parts


@pytest.fixture
def load(tmp_path):
    cluster = Cluster(tmp_path)
    journal = Journal(tmp_path / "journal.jsonl")
    yield Load(cluster, journal, {}, seed=0, deadline=0.2)
    journal.close()


def judged(load: Load, method, nbytes: int = 10**6, copies: int | None = None) -> str:
    """What is said of an operation."""
    load.clients = {"hoplite": None}
    op = Operation("test", "tag", nbytes, None)
    op.copies = copies
    asyncio.run(load.perform(op, method))
    [verdict] = load.journal.verdicts.pop("test")
    return verdict


def raising(error: BaseException):
    async def fail(op: Operation) -> None:
        raise error

    return fail


async def nothing(op: Operation) -> None:
    pass


async def for_ever(op: Operation) -> None:
    await asyncio.Event().wait()


async def right(op: Operation) -> None:
    op.check(make(op.tag, op.nbytes))
    op.check_digest(digest(make(op.tag, op.nbytes)))


async def one_bit(op: Operation) -> None:
    value = make(op.tag, op.nbytes)
    value[op.nbytes // 2] ^= 1
    op.check(value)


async def wrong_digest(op: Operation) -> None:
    op.check_digest(digest(make("another", op.nbytes)))


def test_judgement(load):
    assert judged(load, nothing) == judged(load, right) == "right"
    assert judged(load, one_bit) == judged(load, wrong_digest) == "wrong"
    assert judged(load, for_ever) == "hang"
    assert judged(load, raising(RuntimeError())) == "unexplained"
    assert [row["verdict"] for row in load.journal.failures] == [
        "wrong",
        "wrong",
        "hang",
        "unexplained",
    ]


def test_errors_need_a_reason(load):
    lost = raising(TransferError("x", "lost"))
    assert judged(load, lost, copies=1) == "unexplained"
    soon = time.monotonic() + 60
    load.cluster.departures.append((soon, "tcp://a", "kill"))
    assert judged(load, lost, copies=1) == "justified"
    assert judged(load, lost, copies=2) == "unexplained", "there was another copy"
    assert judged(load, lost, copies=None) == "unexplained", "it can be computed again"
    assert judged(load, raising(CancelledError()), copies=1) == "unexplained", "of what?"
    assert judged(load, raising(ValueError("no such worker: 'tcp://a'"))) == "justified"
    assert judged(load, raising(ValueError("no such worker: 'tcp://b'"))) == "unexplained"
    assert judged(load, raising(OSError())) == "unexplained"
    assert judged(load, raising(OSError()), nbytes=100) == "justified"


def test_values():
    for n in (1, 2, 1000):
        for i in range(20):
            value = make(f"{i}", n)
            assert same(value, make(f"{i}", n)) and digest(value) == digest(make(f"{i}", n))
            assert n == 1 or not same(value, make(f"another {i}", n))
    assert {type(make(f"{i}", 10)).__name__ for i in range(20)} == {"ndarray", "dict", "bytes"}
    assert not same(b"1", "1")


@hoplite_cluster(nthreads=[("127.0.0.1", 1)])
async def test_what_is_left_is_found(c, s, a):
    from dask_hoplite import Hoplite

    await c.register_plugin(Hoplite())
    before = leftovers.of_process()  # other tests were here, too
    assert {name for name, items in leftovers.of_scheduler(s).items() if items} <= set(before)
    assert {name for name, items in leftovers.of_worker(a).items() if items} <= set(before)
    x = await c.scatter(array(), broadcast=True)
    plugin(s).wishes.add("leaked", None)
    entry = a.plugins["hoplite"].shelf.promise("leaked")
    task = asyncio.create_task(asyncio.sleep(100), name="hoplite-pull-leaked")
    found = leftovers.of_scheduler(s)
    assert x.key in found["Dask's tasks"][0] and "leaked" in found["wishes"]
    found = leftovers.of_worker(a)
    assert found["values"] == [x.key] and "leaked" in str(found["shelf"])
    assert any("hoplite-pull-leaked" in item for item in found["asyncio tasks"])
    buffer = Buffer(*dump(array()))
    assert len(leftovers.of_process()["buffers"]) > len(before["buffers"])
    del buffer
    task.cancel()
    entry.buffer.cancel()


def test_growth_is_found():
    before = dict.fromkeys(leftovers.TOLERANCE, 100)
    assert not leftovers.excess(before, before)
    after = dict.fromkeys(before, 1000)
    assert set(leftovers.excess(before, after)) == set(before)


def test_errors_in_logs_are_found(tmp_path):
    trace = 'Traceback (most recent call last):\n  File "/x/dask_hoplite/worker.py", line 1\n'
    start = "2030-01-01 00:00:00,000 - distributed.core - ERROR - it failed\n"
    (tmp_path / "a.log").write_text(f"{start}{trace}KeyError: 'x'\n{start}{trace}OSError: gone\n")
    assert [problem["error"] for problem in problems(tmp_path)] == ["KeyError: 'x'"]
