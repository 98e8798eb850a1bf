"""What Gloo and Open MPI need for the same operations on the same emulated hosts.

Their processes are all there and do nothing else than wait for each other: no tasks, no scheduler.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.laboratory import SUBNET, Laboratory, LaboratoryError
from dask_hoplite.bench.operations import OPS
from dask_hoplite.bench.turns import Record

SYSTEMS = ("gloo", "openmpi")

#: The operations, and which of ours has the same limit.
LIKE = {
    "broadcast": "tasks",
    "reduce": "reduce",
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reduce-scatter": "reduce-scatter",
}

#: What Open MPI can do when it is told: pipelined chains and rings. Its defaults are slower here.
TUNED = {
    "use_dynamic_rules": 1,
    "bcast_algorithm": 3,
    "bcast_algorithm_segmentsize": 131072,
    "reduce_algorithm": 3,
    "reduce_algorithm_segmentsize": 131072,
    "allreduce_algorithm": 4,
    "allgather_algorithm": 4,
    "reduce_scatter_algorithm": 3,
}

#: How to ask an interpreter for the version of a library.
ASK = {
    "gloo": "import numpy, torch.distributed as d, torch; assert d.is_gloo_available(); "
    "print('torch', torch.__version__)",
    "openmpi": "import numpy; from mpi4py import MPI; "
    "print(MPI.Get_library_version().split(',')[0])",
}


def find(system: str, python: str) -> tuple[str | None, str]:
    """The version of a library, or None and what is missing."""
    if system == "openmpi" and shutil.which("mpirun") is None:
        return None, "there is no command `mpirun` (Debian: openmpi-bin)"
    try:
        # From elsewhere, so that nothing of this folder is taken for a package.
        asked = subprocess.run(
            [python, "-c", ASK[system]], capture_output=True, text=True, timeout=120, cwd="/"
        )
    except OSError as error:
        return None, str(error)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return None, f"{python} cannot use it: {last}"
    version = asked.stdout.strip()
    if system == "openmpi" and not version.startswith("Open MPI"):
        return None, f"mpi4py of {python} uses {version}"
    return version, ""


def run(
    lab: Laboratory,
    system: str,
    python: str,
    ops: list[str],
    sizes: list[int],
    reps: int,
    goodput: float,
    timeout: float,
    logs: Path,
) -> Iterator[Record]:
    """Measure a system; a record is yielded as soon as it is there."""
    logs.mkdir(parents=True, exist_ok=True)
    rank = [python, "-m", "benchmarks.peer_rank", system, "--reps", str(reps)]
    rank += ["--ops", *ops, "--sizes", *map(str, sizes)]
    start = {"gloo": start_gloo, "openmpi": start_openmpi}[system]
    processes = start(lab, rank, logs)
    try:
        left = len(ops) * len(sizes) * reps
        while left and (line := read_line(processes[0], timeout, system, logs)):
            record = json.loads(line)
            left -= reps if "error" in record else 1
            crossings = OPS[LIKE[record["op"]]].crossings(lab.n, 1)
            yield record | {"limit": crossings * record["nbytes"] / goodput}
        for process in processes:
            if process.wait(timeout):
                raise LaboratoryError(f"a process of {system} has failed: see {logs}")
    finally:
        for process in processes:
            process.kill()  # what mpirun has started on other hosts ends with the laboratory
            process.wait()


def start_gloo(lab: Laboratory, rank: list[str], logs: Path) -> list[subprocess.Popen]:
    """Start a rank on each host."""
    common = {
        "WORLD_SIZE": str(lab.n),
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": "29500",  # the host is a new one: all its ports are free
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    return [
        start(lab, host, rank, logs / f"gloo-{host}.log", common | {"RANK": str(host)})
        for host in range(lab.n)
    ]


def start_openmpi(lab: Laboratory, rank: list[str], logs: Path) -> list[subprocess.Popen]:
    """Start `mpirun` on host 0, which reaches the others by a script instead of ssh."""
    script = Path(__file__).with_name("mpi_agent.sh")
    options = {
        "plm_rsh_agent": f"sh {script} {lab.name}",
        "plm_rsh_no_tree_spawn": 1,
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": f"{SUBNET}.0/24",
        "oob_tcp_if_include": f"{SUBNET}.0/24",
        "mpi_yield_when_idle": 1,
        **{f"coll_tuned_{name}": value for name, value in TUNED.items()},
    }
    hosts = ",".join(map(lab.address, range(lab.n)))
    command = ["mpirun", "--allow-run-as-root", "-np", str(lab.n), "--host", hosts]
    command += ["--bind-to", "none", "-x", "OMP_NUM_THREADS"]
    for name, value in options.items():
        command += ["--mca", name, str(value)]
    return [start(lab, 0, [*command, *rank], logs / "openmpi.log", {})]


def start(
    lab: Laboratory, host: int, argv: list[str], log: Path, environment: dict[str, str]
) -> subprocess.Popen:
    """Start a process with one thread whose output can be read as it comes."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    with log.open("ab") as file:
        return lab.popen(
            host, argv, stdout=subprocess.PIPE, stderr=file, env=env, cwd=ROOT, bufsize=0
        )


def read_line(process: subprocess.Popen, timeout: float, system: str, logs: Path) -> bytes:
    """Read the next line, or complain that there is none."""
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    if not ready:
        raise LaboratoryError(f"nothing from {system} within {timeout:g} s: see {logs}")
    line = process.stdout.readline()
    if not line:
        raise LaboratoryError(f"{system} has ended too early: see {logs}")
    return line
