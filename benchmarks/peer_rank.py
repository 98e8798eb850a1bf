"""One process of Gloo or of Open MPI: started by `benchmarks.peers` on each emulated host.

It needs numpy and torch, or numpy and mpi4py, but no Dask. The first one prints a line of JSON for
each repetition.

    python -m benchmarks.peer_rank gloo --ops reduce --sizes 1048576 --reps 3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

# By itself: the package that it is a part of needs Dask.
sys.path.append(str(Path(__file__).parents[1] / "dask_hoplite" / "bench"))
from operands import checksum, operand, total

SEED = 1

#: What is to be called, and then the arrays that this rank has to have.
Operation = tuple[Callable[[], object], list[np.ndarray]]


class Peer(Protocol):
    """What is needed of a library."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait for all ranks."""

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""

    def operation(self, op: str, x: np.ndarray) -> Operation:
        """Get ready for an operation on an array that is left as it is."""


class Gloo:
    """Gloo, through torch."""

    def __init__(self):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        self.dist.barrier()

    def largest(self, value: float) -> float:
        tensor = self.torch.tensor(value, dtype=self.torch.float64)
        self.dist.all_reduce(tensor, self.dist.ReduceOp.MAX)
        return tensor.item()

    def operation(self, op: str, x: np.ndarray) -> Operation:
        y = x.copy()
        tensor = self.torch.from_numpy(y)
        if op == "broadcast":
            if self.rank:
                y.fill(0)
            return lambda: self.dist.broadcast(tensor, 0), [y]
        if op == "reduce":
            return lambda: self.dist.reduce(tensor, 0), [y] if self.rank == 0 else []
        if op == "allreduce":
            return lambda: self.dist.all_reduce(tensor), [y]
        if op == "allgather":
            ys = [np.zeros_like(x) for _ in range(self.size)]
            tensors = list(map(self.torch.from_numpy, ys))
            return lambda: self.dist.all_gather(tensors, tensor), ys
        blocks = np.array_split(y, self.size)
        result = np.zeros_like(blocks[self.rank])
        tensors = list(map(self.torch.from_numpy, blocks))
        into = self.torch.from_numpy(result)
        return lambda: self.dist.reduce_scatter(into, tensors), [result]


class OpenMpi:
    """Open MPI, through mpi4py."""

    def __init__(self):
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def barrier(self) -> None:
        self.world.Barrier()

    def largest(self, value: float) -> float:
        return self.world.allreduce(value, self.mpi.MAX)

    def operation(self, op: str, x: np.ndarray) -> Operation:
        y = np.zeros_like(x)
        if op == "broadcast":
            y = y if self.rank else x
            return lambda: self.world.Bcast(y, 0), [y]
        if op == "reduce":
            return lambda: self.world.Reduce(x, y, self.mpi.SUM, 0), [y] if self.rank == 0 else []
        if op == "allreduce":
            return lambda: self.world.Allreduce(x, y, self.mpi.SUM), [y]
        if op == "allgather":
            ys = np.zeros((self.size, x.size), "f4")
            return lambda: self.world.Allgather(x, ys), list(ys)
        counts = [block.size for block in np.array_split(x, self.size)]
        result = np.zeros(counts[self.rank], "f4")
        return lambda: self.world.Reduce_scatter(x, result, counts, self.mpi.SUM), [result]


PEERS: dict[str, type[Peer]] = {"gloo": Gloo, "openmpi": OpenMpi}


def expected(ops: list[str], nbytes: int, rank: int, n: int) -> dict[str, list[int]]:
    """Checksums of what a rank has to have after each operation."""
    everything = total(nbytes, range(n), n, SEED)
    each = [checksum(operand(nbytes, index, n, SEED)) for index in range(n)]
    return {
        "broadcast": each[:1],
        "reduce": [checksum(everything)] if rank == 0 else [],
        "allreduce": [checksum(everything)],
        "allgather": each,
        "reduce-scatter": [checksum(np.array_split(everything, n)[rank])],
    }


def measure(peer: Peer, op: str, x: np.ndarray, sums: list[int]) -> dict[str, object]:
    """Do an operation once; the time is that of the slowest rank."""
    call, arrays = peer.operation(op, x)
    for array in arrays:
        array.reshape(-1)[:] += 0  # touch it: the clock is not for page faults
    peer.barrier()
    start = time.perf_counter()
    try:
        call()
    except (RuntimeError, ValueError) as error:  # what a library cannot do, no rank can do
        return {"error": str(error).splitlines()[0], "timeout": None}
    seconds = peer.largest(time.perf_counter() - start)
    wrong = peer.largest(float(list(map(checksum, arrays)) != sums))
    return {"seconds": seconds, "correct": not wrong, "copies": None}


def main() -> None:
    """Go through operations and sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=PEERS)
    parser.add_argument("--ops", nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    parser.add_argument("--reps", type=int, required=True)
    args = parser.parse_args()
    peer = PEERS[args.system]()
    known = {nbytes: expected(args.ops, nbytes, peer.rank, peer.size) for nbytes in args.sizes}
    for op in args.ops:
        measure(peer, op, operand(min(args.sizes), peer.rank, peer.size, SEED), [])  # a warm-up
        for nbytes in args.sizes:
            x = operand(nbytes, peer.rank, peer.size, SEED)
            for rep in range(args.reps):
                record = measure(peer, op, x, known[nbytes][op])
                if peer.rank == 0:
                    about = {"op": op, "nbytes": nbytes, "system": args.system, "rep": rep}
                    print(json.dumps(about | record), flush=True)
                if "error" in record:
                    break


if __name__ == "__main__":
    main()
