"""What users see first: ``dask hoplite demo``, small, and the examples of README and docs."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from dask_hoplite import cli
from dask_hoplite.cli import hoplite

README = pathlib.Path(__file__).parent.parent / "README.md"


def workers_of(processes):
    """Those of some processes that a cluster has started."""
    found = []
    for process in processes:
        try:
            if any("spawn_main" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


def in_session(leader):
    """The processes that a command has started, and their descendants."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            pass
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One run of the demo: what the command returned, and the figures that it wrote."""
    path = tmp_path_factory.mktemp("demo") / "figures.json"
    small = ["--workers", "2", "--size", "4MiB", "--repetitions", "1", "--wait", "2.5"]
    result = CliRunner().invoke(hoplite, ["demo", *small, "--json", str(path)])
    assert result.exit_code == 0, result.output
    return result, json.loads(path.read_text())


def test_demo_figures(demo):
    _, figures = demo
    assert figures["equal"]
    assert figures["workers"] == 2
    assert 0.98 * 4 * 2**20 <= figures["nbytes"] <= 4 * 2**20
    assert set(figures["operations"]) == {"scatter", "tasks", "gather"}
    for row in figures["operations"].values():
        assert set(row) == {"plain", "hoplite"}
        for side in row.values():
            assert side["equal"]
            assert len(side["seconds"]) == len(side["received"]) == 1
            assert side["seconds"][0] > 0
    scatter, gather = (figures["operations"][name] for name in ("scatter", "gather"))
    assert scatter["plain"]["received"][0] >= figures["nbytes"]
    assert gather["plain"]["received"][0] >= 2 * figures["nbytes"]
    assert scatter["hoplite"]["copies"] == scatter["hoplite"]["copies_later"] == [2]
    assert scatter["plain"]["copies_later"] == [1], "Dask's memory manager drops the others"
    assert scatter["plain"]["accuracy"] == scatter["hoplite"]["accuracy"] > 0.5
    assert sum(figures["paths"].values()) >= 3


def test_demo_output(demo):
    result, figures = demo
    for word in ("scatter to all", "2 → 2", "2 → 1", "equal", f"{figures['accuracy']:.1%}"):
        assert word in result.stdout
    assert "Traceback" not in result.output and "ERROR" not in result.output
    assert "Stop both clusters" in result.stderr, "the progress"
    assert "Stop both clusters" not in result.stdout


def test_demo_leaves_no_process(demo):
    assert not workers_of(psutil.Process().children(recursive=True))


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_interrupted(name):
    command = [sys.executable, "-m", "dask", "hoplite", name, "--workers", "2"]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while len(workers_of(in_session(process.pid))) < 2:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            try:
                output, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired as error:
                pytest.fail(f"it went on: {(error.output or b'').decode()}")
            assert process.returncode == 1
            assert "Aborted!" in output and "Traceback" not in output
            deadline = time.monotonic() + 5  # for multiprocessing's resource tracker
            while in_session(process.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not in_session(process.pid)
        finally:
            for left in in_session(process.pid):
                left.kill()


def test_demo_says_if_results_differ(demo, monkeypatch):
    _, figures = demo
    figures = copy.deepcopy(figures)
    figures["equal"] = figures["operations"]["tasks"]["hoplite"]["equal"] = False
    monkeypatch.setattr(cli, "run", lambda *args: figures)
    result = CliRunner().invoke(hoplite, ["demo"])
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout and "results differ" in result.stderr
    assert "are the same" not in result.stdout


def test_demo_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = CliRunner().invoke(hoplite, ["demo"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "pip install 'dask-hoplite[demo]'" in result.stderr


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--size", "large"], "'large' is not a size"),
        (["--size", "1kB"], "less than 1.00 MiB"),
        (["--workers", "1"], "--workers"),
        (["--json", "/no/such/folder/x"], "No such file"),
    ],
)
def test_demo_with_bad_options(options, complaint):
    result = CliRunner().invoke(hoplite, ["demo", *options])
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_help_by_the_dask_command():
    command = [sys.executable, "-m", "dask", "hoplite", "--help"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "demo" in output and "bench" in output


def test_examples_of_the_readme(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they may write
    with examples(README) as names:
        assert names["client"].gather(names["scores"])[0] == pytest.approx(0.5, abs=0.1)
    output = capsys.readouterr().out
    assert output.startswith("10000000.0\n")
    assert output.count(" finished ") >= 4


def test_examples_of_training():
    with examples(README.parent / "docs" / "training.md") as names:
        assert names["w"] == pytest.approx(np.arange(10), abs=0.5)


@contextlib.contextmanager
def examples(page):
    """What the names in the examples of a page stand for after they were run."""
    names = {}
    try:
        for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(example, names)
        yield names
    finally:
        names["client"].shutdown()
