"""A rank of Horovod (its Gloo build), for torch tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import horovod
import horovod.torch as hvd
import torch

from peers.worker import Adapter, Array, Operation, Run, main


class Horovod(Adapter):
    """Every buffer has a name of its own: Horovod recognises repeated operations by it."""

    averages = True

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self._names = 0

    def _name(self) -> str:
        self._names += 1
        return f"buffer.{self._names}"

    def barrier(self) -> None:
        hvd.barrier()

    def operation(self, collective: str, count: int) -> Operation:
        data = np.ones(count, np.float32)
        tensor, name, kept = torch.from_numpy(data), self._name(), {}
        if collective == "allreduce":
            return Operation(data, lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum), lambda: data)
        if collective == "broadcast":
            return Operation(data, lambda: hvd.broadcast_(tensor, 0, name=name), lambda: data)
        part = np.ones(count // self.size, np.float32)
        small = torch.from_numpy(part)
        calls: Dict[str, Callable[[], Any]] = {
            "allgather": lambda: hvd.allgather(small, name=name),
            "reducescatter": lambda: hvd.reducescatter(tensor, name=name, op=hvd.Sum),
            "alltoall": lambda: hvd.alltoall(tensor, name=name),
        }

        def run() -> None:
            kept["result"] = calls[collective]()

        source = part if collective == "allgather" else data
        return Operation(source, run, lambda: kept["result"].numpy())

    def reducer(self, array: Array) -> Run:
        tensor, name = torch.from_numpy(array), self._name()
        return lambda: hvd.allreduce_(tensor, name=name, op=hvd.Average)

    def starter(self, array: Array) -> Optional[Callable[[], Run]]:
        tensor, name = torch.from_numpy(array), self._name()

        def start() -> Run:
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Average)
            return lambda: hvd.synchronize(handle)

        return start

    def facts(self) -> Dict[str, Any]:
        return {"version": horovod.__version__}

    def close(self) -> None:
        hvd.shutdown()


if __name__ == "__main__":
    main(Horovod)
