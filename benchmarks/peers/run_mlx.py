"""A rank of MLX's ring over TCP; RANK and WORLD_SIZE identify it, and rank 0 writes the hosts' file to STORE.

MLX has no broadcast: it is the sum of the root's array and of zeros, as in programs for MLX.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import mlx.core as mx

from peers.worker import Adapter, Array, Operation, Run, main

START_S = 60.0


def hosts_file(rank: int, size: int) -> Path:
    """The file with one free port of this machine for each rank."""
    path = Path(os.environ["STORE"])
    if rank == 0:
        taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        addresses = [[f"127.0.0.1:{sock.getsockname()[1]}"] for sock in taken]
        for sock in taken:
            sock.close()
        new = path.with_suffix(".new")
        new.write_text(json.dumps(addresses))
        new.rename(path)
    until = time.monotonic() + START_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return path


class Mlx(Adapter):
    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["MLX_RANK"] = str(self.rank)
        os.environ["MLX_HOSTFILE"] = str(hosts_file(self.rank, self.size))
        mx.set_default_device(mx.cpu)
        self._group = mx.distributed.init(strict=True, backend="ring")

    def barrier(self) -> None:
        mx.eval(mx.distributed.all_sum(mx.array(1.0)))

    def operation(self, collective: str, count: int) -> Operation:
        calls = {
            "allreduce": mx.distributed.all_sum, "allgather": mx.distributed.all_gather,
            "broadcast": mx.distributed.all_sum,
        }  # fmt: skip
        if collective not in calls:
            raise ValueError(collective)
        given = mx.ones(count // self.size if collective == "allgather" else count)
        mx.eval(given)
        source = np.asarray(given)  # the same memory
        sent = mx.zeros(count) if collective == "broadcast" and self.rank else given
        mx.eval(sent)
        results = [sent]

        def run() -> None:
            results[0] = calls[collective](sent)
            mx.eval(results[0])

        return Operation(source, run, lambda: np.asarray(results[0]))

    def reducer(self, array: Array) -> Run:
        def run() -> None:
            array[:] = np.asarray(mx.distributed.all_sum(mx.array(array)))

        return run

    def facts(self) -> Dict[str, Any]:
        return {"version": version("mlx")}

    def close(self) -> None:
        self.barrier()


if __name__ == "__main__":
    main(Mlx)
