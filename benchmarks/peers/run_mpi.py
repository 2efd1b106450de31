"""A rank of an MPI, through mpi4py's buffer interface (the fast one)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable, Optional

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from mpi4py import MPI

from peers.worker import Adapter, Array, Operation, Run, main


class Mpi(Adapter):
    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def barrier(self) -> None:
        self._world.Barrier()

    def operation(self, collective: str, count: int) -> Operation:
        world, here, kind = self._world, MPI.IN_PLACE, MPI.FLOAT
        data = np.ones(count, np.float32)
        whole = [data, kind]
        if collective == "allreduce":
            return Operation(data, lambda: world.Allreduce(here, whole, MPI.SUM), lambda: data)
        if collective == "broadcast":
            return Operation(data, lambda: world.Bcast(whole, 0), lambda: data)
        if collective == "allgather":
            return Operation(data, lambda: world.Allgather(here, whole), lambda: data)
        if collective == "reducescatter":
            part = np.ones(count // self.size, np.float32)
            small = [part, kind]
            return Operation(data, lambda: world.Reduce_scatter_block(whole, small, MPI.SUM), lambda: part)
        if collective == "alltoall":
            received = np.ones(count, np.float32)
            target = [received, kind]
            return Operation(data, lambda: world.Alltoall(whole, target), lambda: received)
        raise ValueError(collective)

    def reducer(self, array: Array) -> Run:
        world, here, buffer = self._world, MPI.IN_PLACE, [array, MPI.FLOAT]
        return lambda: world.Allreduce(here, buffer, MPI.SUM)

    def starter(self, array: Array) -> Optional[Callable[[], Run]]:
        world, here, buffer = self._world, MPI.IN_PLACE, [array, MPI.FLOAT]
        return lambda: world.Iallreduce(here, buffer, MPI.SUM).Wait

    def close(self) -> None:
        MPI.Finalize()


if __name__ == "__main__":
    main(Mpi)
