"""Reduces all the time, or idles and then goes on; whatever becomes of it is written to a file per rank.

It reduces by direct calls or, as ``group``, in PyTorch's process group.

The files are seen by all hosts, also where the launcher is not reached any more.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import ringcomm as rc

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("way", choices=["transfer", "group", "idle"])
parser.add_argument("--seconds", type=float, help="how long, or how long to idle")
arguments = parser.parse_args()


def report(name: str, **facts: object) -> None:
    path = arguments.directory / f"{name}{rc.rank()}"
    path.with_suffix(".part").write_text(json.dumps({"at_s": time.time(), **facts}))
    path.with_suffix(".part").rename(path)


def reduce(array: np.ndarray) -> np.ndarray:
    if arguments.way != "group":
        return rc.allreduce(array, rc.Sum)
    tensor = torch.from_numpy(array.copy())
    dist.all_reduce(tensor)
    return tensor.numpy()


rc.init()
if arguments.way == "group":
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed

    dist.init_process_group("ringcomm")
ones = np.ones(250_000, np.float32)
try:
    reduce(ones)
    report("running")
    until_s = time.time() + arguments.seconds
    if arguments.way == "idle":
        time.sleep(arguments.seconds)
        total = reduce(ones)
    going = arguments.way != "idle"
    while going:
        total = reduce(ones)
        # Rank 0 says whether.
        going = bool(reduce(np.array([rc.rank() == 0 and time.time() < until_s], np.float32))[0])
    if not (total == rc.size()).all():
        sys.exit("wrong numbers")
except rc.RingcommError as error:
    report(
        "error",
        kind=type(error).__name__,
        text=str(error),
        rank=getattr(error, "rank", None),
        host=getattr(error, "host", None),
        ranks=getattr(error, "ranks", None),
    )
    raise
report("finished")
