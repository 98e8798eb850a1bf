"""Whether memory stays as it is over many versions of large parameters, on every process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
from distributed import Client, LocalCluster, wait

from dask_hoplite import Hoplite, sgd


def run(versions: int, nbytes: int, workers: int) -> Iterator[dict[str, Any]]:
    """Train, and yield how much each process has in memory, now and then."""
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=40
        ) as cluster,
        Client(cluster.scheduler_address) as client,
    ):
        client.register_plugin(Hoplite())
        data = client.map(float, range(workers), pure=False)
        wait(data)
        training = sgd.train(
            gradient, np.zeros(nbytes // 4, "f4"), data, sgd.Sum(0.01), workers // 2, versions
        )
        for step in training:
            if step.number % (versions // 10) == versions // 10 - 1:
                yield {
                    "step": step.number + 1,
                    "tasks": client.run_on_scheduler(count_tasks),
                    "client and scheduler": psutil.Process(os.getpid()).memory_info().rss,
                    **{
                        f"worker {index}": rss
                        for index, rss in enumerate(client.run(resident).values())
                    },
                }


def gradient(parameters: np.ndarray, data: float) -> np.ndarray:
    """Something of the same size."""
    return parameters - np.float32(1)


def resident() -> int:
    """Bytes that this process has in memory."""
    return psutil.Process(os.getpid()).memory_info().rss


def count_tasks(dask_scheduler) -> int:
    """Count the tasks that a scheduler knows."""
    return len(dask_scheduler.tasks)
