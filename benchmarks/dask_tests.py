"""Dask's own tests, with Hoplite and without.

What passes on plain Dask has to pass with Hoplite. Exceptions are listed one by one, with the
reason, in ``dask_tests_exceptions.toml``.
"""

from __future__ import annotations

import contextlib
import datetime
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import distributed
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.dask_tests_probe import CLIENTS, RECORDS

PROJECT = Path(__file__).parent.parent
EXCEPTIONS = Path(__file__).with_name("dask_tests_exceptions.toml")

#: What the environment says with Hoplite. From one byte on, everything goes by it.
HOPLITE = {
    "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": '["dask_hoplite", "benchmarks.dask_tests_probe"]',
    "DASK_HOPLITE__MIN_SIZE": "1",
}

#: What is run unless files are named: where keys move, and where workers leave.
FILES = [
    *(
        f"distributed/tests/test_{name}.py"
        for name in [
            "client",
            "worker",
            "active_memory_manager",
            "failed_workers",
            "scheduler",
            "cancelled_state",
            "worker_state_machine",
            "worker_memory",
            "worker_client",
            "worker_metrics",
            "spill",
            "stress",
            "steal",
            "publish",
            "variable",
            "actor",
            "as_completed",
            "client_executor",
            "collections",
            "nanny",
            "resources",
            "reschedule",
            "stories",
            "tls_functional",
            "utils_comm",
        ]
    ),
    *(
        f"distributed/shuffle/tests/test_{name}.py"
        for name in ["graph", "merge", "merge_column_and_index", "metrics", "rechunk", "shuffle"]
    ),
]

#: Seconds for one test, and for all of a file in one process
TEST_TIMEOUT, FILE_TIMEOUT = 90, 1800

PYTEST = [
    *(
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.dask_tests_probe",
        "--color=no",
        "--tb=native",
    ),
    *(f"--timeout={TEST_TIMEOUT}", "-o", "timeout_method=signal"),
]


@dataclass
class Result:
    """What became of one test, each way, each time."""

    test: str
    plain: list[str] = field(default_factory=list)
    hoplite: list[str] = field(default_factory=list)
    why: str = ""  #: its last failure with Hoplite
    installed: int = 0  #: schedulers that had Hoplite
    moved: int = 0  #: transfers that Hoplite completed
    exception: str | None = None  #: the reason for which it may fail

    @property
    def verdict(self) -> str:
        """One word on it."""
        if "passed" not in self.plain:
            return "failed plain" if "failed" in self.plain else "skipped"
        good = self.hoplite.count("passed")
        if good == len(self.hoplite):
            return "passed"
        if self.exception is not None:
            return "exception"
        # Of a test that now passes and now fails, more is not to be had from a few repetitions.
        return "flaky" if good and 2 * good >= len(self.hoplite) else "regression"


def compare(
    checkout: Path, files: Collection[str], out: Path, reruns: int, clients: bool, console: Console
) -> str | None:
    """Run test files both ways, and show and keep what became of them.

    Parameters
    ----------
    checkout : Path
        A checkout of dask/distributed, of the release that is installed.
    files : collection of str
        Test files, by their paths in the checkout.
    out : Path
        Folder for the JSON file with every test, and for what pytest says.
    reruns : int
        How often a test that differs is run again, both ways.
    clients : bool
        Whether the clients of the tests use Hoplite too.
    console : Console
        Where to print.

    Returns
    -------
    str or None
        What is wrong, if anything.
    """
    started = time.monotonic()
    about = report.header(code_that_differs=differences(checkout))
    out = out / f"dask-tests-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    tree = out / "tree"
    assemble(checkout, tree)
    side_by_side = SideBySide(tree, out, reruns, clients)
    results: dict[str, list[Result]] = {}
    for file in files:
        results[file] = side_by_side.run(file)
        for result in results[file]:
            if result.verdict in ("exception", "flaky", "regression"):
                console.print(f"{result.verdict}: {result.test}: {rates(result)}", soft_wrap=True)
        everything = [
            {"verdict": r.verdict, **asdict(r)} for each in results.values() for r in each
        ]
        about["seconds"] = time.monotonic() - started
        console.print(f"{about['seconds']:.0f} s: {file} done", soft_wrap=True)
        (out / "results.json").write_text(json.dumps({**about, "tests": everything}, indent=1))
    shutil.rmtree(tree)
    console.print(table(results))
    console.print(f"{out / 'results.json'}", soft_wrap=True)
    if not any(test["moved"] for test in everything):
        return "Hoplite moved nothing: this was no test of it"
    regressions = sum(test["verdict"] == "regression" for test in everything)
    return f"{regressions} regressions" if regressions else None


def assemble(checkout: Path, tree: Path) -> None:
    """Put the tests of a checkout beside the installed code, which comes without them."""
    if not (checkout / "distributed" / "tests").is_dir():
        raise ValueError(f"{checkout} is no checkout of dask/distributed: it has no tests")
    shutil.rmtree(tree, ignore_errors=True)
    hidden = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(checkout, tree, ignore=hidden)
    shutil.copytree(installed(), tree / "distributed", ignore=hidden, dirs_exist_ok=True)


def installed() -> Path:
    """Where the installed distributed is."""
    return Path(distributed.__file__).parent


def differences(checkout: Path) -> list[str]:
    """Files whose code in a checkout is not what is installed."""
    code = [path.relative_to(installed()) for path in installed().rglob("*.py")]
    ours = [path for path in code if path.name != "_version.py"]
    _, different, missing = filecmp.cmpfiles(
        checkout / "distributed", installed(), map(str, ours), shallow=False
    )
    return sorted(different + missing)


class SideBySide:
    """Runs tests plain and with Hoplite.

    Parameters
    ----------
    tree : Path
        Where the tests are, beside the code that they test.
    out, reruns, clients
        As for :func:`compare`.
    """

    def __init__(self, tree: Path, out: Path, reruns: int, clients: bool):
        self.tree = tree
        self.out = out
        self.reruns = reruns
        self.ways = {"plain": {}, "hoplite": HOPLITE | ({CLIENTS: "1"} if clients else {})}
        self.exceptions = tomllib.loads(EXCEPTIONS.read_text())

    def run(self, file: str) -> list[Result]:
        """Run a file, and some more times what differs without being an exception."""
        results: dict[str, Result] = {}
        for way in self.ways:
            self.run_one_way(way, [file], results)
        for result in results.values():
            result.exception = reason(self.exceptions, result.test)
        differ = [r.test for r in results.values() if r.plain != r.hoplite and r.exception is None]
        for _ in range(self.reruns if differ else 0):
            for way in self.ways:
                self.run_one_way(way, differ, results)
        return list(results.values())

    def run_one_way(self, way: str, tests: list[str], results: dict[str, Result]) -> None:
        """Run tests in a process of their own, and add what became of them.

        Should the process end before all tests were run, another one goes on with the rest.
        """
        records, log = self.out / "records.jsonl", self.out / f"{way}.log"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DASK_")},
            **self.ways[way],
            RECORDS: str(records),
            "PYTHONPATH": os.pathsep.join([str(self.tree), str(PROJECT)]),
        }
        while tests:
            records.unlink(missing_ok=True)
            command = [sys.executable, "-m", "pytest", *PYTEST, *tests]
            with log.open("a") as output:
                call(command, cwd=self.tree, env=environment, stdout=output, stderr=output)
            tests = evaluate(way, read(records), results)


def call(command: list[str], **options: Any) -> None:
    """Run a command, and end it, with all its children, when its time is over."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        process.wait(FILE_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(records: Path) -> list[dict[str, Any]]:
    """What the probe wrote. If that is nothing, pytest did not even begin."""
    if not records.exists():
        raise ValueError(f"no test could be run; see {records.parent} for what pytest said")
    return [json.loads(line) for line in records.read_text().splitlines()]


def evaluate(way: str, records: Iterable[dict[str, Any]], results: dict[str, Result]) -> list[str]:
    """Add what became of tests; return those that were not run, because one ended the process."""
    outcomes: dict[str, tuple[str, str]] = {}
    left: dict[str, None] = {}
    for record in records:
        test = record["test"]
        result = results.setdefault(test, Result(test))
        match record["kind"]:
            case "collected":
                left[test] = None
            case "began":
                left.pop(test)
                outcomes[test] = ("failed", "the process ended")  # unless there is another word
            case "outcome":
                outcomes[test] = (record["outcome"], record["why"])
            case "installed":
                result.installed += 1
            case "moved":
                result.moved += 1
    for test, (outcome, why) in outcomes.items():
        getattr(results[test], way).append(outcome)
        if outcome == "failed" and way == "hoplite":
            results[test].why = why
    return list(left) if outcomes else []


def reason(exceptions: dict[str, dict[str, str]], test: str) -> str | None:
    """Why a test may fail with Hoplite, if it may."""
    file, _, name = test.partition("::")
    listed = exceptions.get(file, {})
    return listed.get(name) or listed.get(name.partition("[")[0])


def rates(result: Result) -> str:
    """How often a test passed, each way."""
    ways = {"plain": result.plain, "with Hoplite": result.hoplite}
    return ", ".join(f"{way} {each.count('passed')}/{len(each)}" for way, each in ways.items())


def table(results: dict[str, list[Result]]) -> Table:
    """Counts for each file."""
    verdicts = ["skipped", "failed plain", "passed", "flaky", "exception", "regression"]
    names = ["passed with Hoplite" if name == "passed" else name for name in verdicts]
    shown = Table("file", "tests", "passed plain", *names, "transfers")
    everything = [result for each in results.values() for result in each]
    for file, each in {**results, "all": everything}.items():
        counts = Counter(result.verdict for result in each)
        plain = sum("passed" in result.plain for result in each)
        moved = sum(result.moved for result in each)
        numbers = [len(each), plain, *(counts[verdict] for verdict in verdicts), moved]
        shown.add_row(file, *map(str, numbers))
    return shown
