"""A rank of torch.distributed over Gloo; ringrun sets RANK, WORLD_SIZE and MASTER_ADDR as torchrun does."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Callable, Optional

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist

from peers.worker import Adapter, Array, Operation, Run, main


class Gloo(Adapter):
    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def operation(self, collective: str, count: int) -> Operation:
        data = np.ones(count, np.float32)
        tensor = torch.from_numpy(data)
        if collective == "allreduce":
            return Operation(data, lambda: dist.all_reduce(tensor), lambda: data)
        if collective == "broadcast":
            return Operation(data, lambda: dist.broadcast(tensor, 0), lambda: data)
        if collective == "alltoall":
            received = torch.ones(count)
            return Operation(data, lambda: dist.all_to_all_single(received, tensor), received.numpy)
        part = np.ones(count // self.size, np.float32)
        small = torch.from_numpy(part)
        if collective == "allgather":
            return Operation(part, lambda: dist.all_gather_into_tensor(tensor, small), lambda: data)
        if collective == "reducescatter":
            return Operation(data, lambda: dist.reduce_scatter_tensor(small, tensor), lambda: part)
        raise ValueError(collective)

    def reducer(self, array: Array) -> Run:
        tensor = torch.from_numpy(array)
        return lambda: dist.all_reduce(tensor)

    def starter(self, array: Array) -> Optional[Callable[[], Run]]:
        tensor = torch.from_numpy(array)
        return lambda: dist.all_reduce(tensor, async_op=True).wait

    def close(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Gloo)
