"""An object of more than 2 GiB on a TLS cluster: does it arrive, and within which memory?"""

from __future__ import annotations

import os
import time
from typing import Any

import dask
from distributed import Client, LocalCluster, Security, wait

from benchmarks.probes import memory_growth
from dask_hoplite.bench.workloads import checksum, make


def run(nbytes: int, workers: int = 3) -> dict[str, Any]:
    """Bring an array from a worker to the others, over TLS and not by shared memory."""
    from dask_hoplite import Hoplite, transfers

    config = {"hoplite.shared-memory": False, "distributed.worker.memory.terminate": False}
    with (
        dask.config.set(config),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            security=Security.temporary(),
            memory_limit="8GiB",
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Hoplite())
        assert cluster.scheduler_address.startswith("tls://")
        first, *others = list(client.nthreads())
        array = client.submit(make, nbytes, 0, workers=[first])
        wait(array)
        expected = client.submit(checksum, array, workers=[first]).result()
        [pid] = client.run(os.getpid, workers=others[:1]).values()
        with memory_growth(pid) as samples:
            start = time.perf_counter()
            found = [client.submit(checksum, array, workers=[w], pure=False) for w in others]
            wait(found)
            seconds = time.perf_counter() - start
        return {
            "nbytes": nbytes,
            "seconds": seconds,
            "correct": client.gather(found) == [expected] * len(others),
            "growth": max(samples) - samples[0],
            "paths": sorted({row["path"] for row in transfers(client) if row["nbytes"] >= nbytes}),
        }
