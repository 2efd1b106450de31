"""What the ranks of the jobs in these tests do. Found through PYTHONPATH by every process of a cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, Callable, Dict, List

import numpy as np

import ringcomm as rc


def describe(factor: float) -> List[Any]:
    """Rank, size, local rank, local size, process, and a sum over all ranks."""
    rc.init()
    total = rc.allreduce(np.full(3, factor * (rc.rank() + 1)), op=rc.Sum)
    return [rc.rank(), rc.size(), rc.local_rank(), rc.local_size(), os.getpid(), total.tolist()]


def sees_local_rank(local_rank: int) -> List[int]:
    """The argument, and ringcomm's own."""
    rc.init()
    return [local_rank, rc.local_rank()]


def add(number: float, *, priority: float) -> float:
    """Arguments of which one is called like an option of Dask."""
    return number + priority


def train_torch(fails: bool) -> List[Any]:
    """DistributedDataParallel; it leaves its process group to ringcomm."""
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401

    dist.init_process_group("ringcomm")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    for step in range(100):
        if fails and dist.get_rank() == 1 and step == 3:
            raise KeyError("no such sample")
        model(torch.ones(2, 3)).sum().backward()
    return [dist.get_rank(), dist.get_world_size(), model.module.weight.grad.flatten().tolist()]


def fail() -> None:
    """Rank 1 raises an error while the others are in a collective."""
    rc.init()
    for step in range(1000):
        if rc.rank() == 1 and step == 3:
            raise KeyError("no such sample")
        rc.allreduce(np.ones(4))


def die() -> None:
    """Rank 1 is killed while the others are in a collective."""
    rc.init()
    for step in range(1_000_000):
        if rc.rank() == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        rc.allreduce(np.ones(4))


def environment(name: str) -> List[Any]:
    """A variable, and what a program that this rank starts could read of the job's key."""
    rc.init()
    return [os.environ.get(name), [item for item in os.environ if item.startswith("RINGCOMM_KEY")]]


def error_of(function: Callable[[], Any]) -> Dict[str, Any]:
    """The facts of the error that a call raises."""
    try:
        value = function()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        cause = error.__cause__
        return {
            "type": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None),
            "host": getattr(error, "host", None), "cause": type(cause).__name__, "cause_text": str(cause),
        }  # fmt: skip
    return {"type": "", "text": f"no error, but {value!r}"}


def write(facts: Dict[str, Any]) -> None:
    """Give the test what a program has found out."""
    with open(sys.argv[1], "w") as file:
        json.dump(facts, file)
