"""A rank of ringcomm, started by ringrun. With ARRAYS=shared its arrays are those of ``rc.empty``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Dict, List

sys.path.insert(0, str(Path(__file__).parents[1]))
import ringcomm as rc
from peers.worker import Adapter, Array, Operation, Run, main


class Ringcomm(Adapter):
    averages = True

    def __init__(self) -> None:
        rc.init()
        self.rank, self.size = rc.rank(), rc.size()

    def barrier(self) -> None:
        rc.barrier()

    def array(self, shape: Any) -> Array:
        if os.environ.get("ARRAYS") != "shared":
            return super().array(shape)
        array = rc.empty(shape)
        array.fill(1)
        return array

    def operation(self, collective: str, count: int) -> Operation:
        data = self.array(count)
        if collective == "allreduce":
            return Operation(data, lambda: rc.allreduce_(data, op=rc.Sum), lambda: data)
        if collective == "broadcast":
            return Operation(data, lambda: rc.broadcast_(data, 0), lambda: data)
        if collective == "allgather":
            return Operation(data, lambda: rc.allgather_(data), lambda: data)
        if collective == "reducescatter":
            share = count // self.size
            own = data[self.rank * share : (self.rank + 1) * share]
            return Operation(data, lambda: rc.reducescatter_(data, op=rc.Sum), lambda: own)
        if collective == "alltoall":
            kept: Dict[str, Array] = {}

            def run() -> None:
                kept["result"] = rc.alltoall(data)

            return Operation(data, run, lambda: kept["result"])
        raise ValueError(collective)

    def reducer(self, array: Array) -> Run:
        return lambda: rc.allreduce_(array, op=rc.Average)

    def grouped(self, arrays: List[Array]) -> Run:
        return lambda: rc.grouped_allreduce_(arrays, op=rc.Average)

    def close(self) -> None:
        rc.shutdown()


if __name__ == "__main__":
    main(Ringcomm)
