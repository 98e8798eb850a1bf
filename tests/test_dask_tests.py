"""The command that runs Dask's own tests plain and with Hoplite."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import dask_tests
from benchmarks.dask_tests import Result, compare, evaluate

TESTS = """
import os
import pytest
from distributed import Worker
from distributed.utils_test import gen_cluster


@gen_cluster(client=True)
async def test_move(c, s, a, b):
    x = c.submit(lambda: 1, workers=[a.address])
    assert await c.submit(lambda x: x + 1, x, workers=[b.address]) == 2


class Counting(Worker):
    asked = 0

    async def get_data(self, comm, *args, **kwargs):
        self.asked += 1
        return await super().get_data(comm, *args, **kwargs)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_override(c, s, a):
    async with Counting(s.address) as b:
        x = c.submit(lambda: 1, workers=[b.address])
        assert await c.submit(lambda x: x + 1, x, workers=[a.address]) == 2
        assert b.asked == 1


@gen_cluster()
async def test_plain_only(s, a, b):
    assert "hoplite" not in s.plugins


@gen_cluster()
async def test_listed(s, a, b):
    assert "hoplite" not in s.plugins


def test_end():
    if "DASK_HOPLITE__MIN_SIZE" in os.environ:
        os._exit(1)


def test_after_the_end():
    pass


def test_fails():
    assert False
"""

LIST = """
["distributed/tests/test_some.py"]
test_listed = "it looks at the plugins"
"""


def test_compare(tmp_path, monkeypatch):
    folder = tmp_path / "checkout" / "distributed" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    listed = tmp_path / "exceptions.toml"
    listed.write_text(LIST)
    monkeypatch.setattr(dask_tests, "EXCEPTIONS", listed)
    out = tmp_path / "out"
    file = "distributed/tests/test_some.py"
    console = Console(quiet=True)
    wrong = compare(tmp_path / "checkout", [file], out, reruns=0, clients=True, console=console)
    assert wrong == "2 regressions"
    [path] = out.glob("*/results.json")
    tests = {t["test"].partition("::")[2]: t for t in json.loads(path.read_text())["tests"]}
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "test_move": "passed",
        "test_override": "passed",
        "test_plain_only": "regression",
        "test_listed": "exception",
        "test_end": "regression",
        "test_after_the_end": "passed",
        "test_fails": "failed plain",
    }
    for name in ("test_move", "test_override"):
        assert tests[name]["installed"] == tests[name]["moved"] == 1
    assert "not in s.plugins" in tests["test_plain_only"]["why"]


def test_no_checkout(tmp_path):
    with pytest.raises(ValueError, match="no checkout"):
        compare(tmp_path, [], tmp_path, reruns=0, clients=False, console=Console(quiet=True))


@pytest.mark.parametrize(
    "plain, hoplite, verdict",
    [
        ("p", "p", "passed"),
        ("p", "fppp", "flaky"),
        ("p", "ffpf", "regression"),
        ("ff", "pf", "failed plain"),
        ("fp", "fp", "flaky"),
        ("s", "s", "skipped"),
    ],
)
def test_verdict(plain, hoplite, verdict):
    words = {"p": "passed", "f": "failed", "s": "skipped"}
    assert Result("x", [words[c] for c in plain], [words[c] for c in hoplite]).verdict == verdict


def test_evaluate():
    """A test without a word after its beginning has ended the process; the rest is still to do."""
    results = {}
    records = [{"kind": "collected", "test": test} for test in "abc"]
    records += [
        {"kind": "began", "test": "a"},
        {"kind": "outcome", "test": "a", "outcome": "passed", "why": ""},
        {"kind": "began", "test": "b"},
    ]
    assert evaluate("hoplite", records, results) == ["c"]
    assert {test: result.hoplite for test, result in results.items()} == {
        "a": ["passed"],
        "b": ["failed"],
        "c": [],
    }
