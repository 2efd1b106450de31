"""Trains a pipeline of one layer per stage until a stage is lost; each rank writes what it sees to a file.

The files are seen by all hosts, also where the launcher is not reached any more.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ringcomm.torch.distributed  # noqa: F401
from ringcomm import RingcommError

FIRST = 5
"""The step after which it counts as running."""

directory = Path(sys.argv[1])
dist.init_process_group("ringcomm", init_method="ringcomm://")
rank, size = dist.get_rank(), dist.get_world_size()


def report(name: str, **facts: object) -> None:
    path = directory / f"{name}{rank}"
    path.with_suffix(".part").write_text(json.dumps({"at_s": time.time(), **facts}))
    path.with_suffix(".part").rename(path)


stage = PipelineStage(nn.Linear(256, 256), rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 8, loss_fn=nn.functional.mse_loss)
batch = torch.ones(8 * 64, 256)
number = 0
try:
    while True:
        given = [batch] if rank == 0 else []
        schedule.step(*given, **({"target": batch} if rank == size - 1 else {}))
        number += 1
        if number == FIRST:
            report("running")
except RingcommError as error:
    found = {name: getattr(error, name, None) for name in ("rank", "host", "ranks")}
    report("error", kind=type(error).__name__, text=str(error), **found)
    raise
