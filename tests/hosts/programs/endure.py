"""Reduces all the time, or idles and then goes on; whatever becomes of it is written to a file per rank.

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
parser.add_argument("way", choices=["transfer", "idle"])
parser.add_argument("--seconds", type=float, help="how long, or how long to idle")
arguments = parser.parse_args()


def tell(name: str, **facts: object) -> None:
    path = arguments.directory / f"{name}{rc.rank()}"
    path.with_suffix(".part").write_text(json.dumps({"at_s": time.time(), **facts}))
    path.with_suffix(".part").rename(path)


rc.init()
ones = np.ones(250_000, np.float32)
try:
    rc.allreduce(ones)
    tell("running")
    until_s = time.time() + arguments.seconds
    if arguments.way == "idle":
        time.sleep(arguments.seconds)
        total = rc.allreduce(ones, rc.Sum)
    going = arguments.way == "transfer"
    while going:
        total = rc.allreduce(ones, rc.Sum)
        going = bool(rc.broadcast(np.array([time.time() < until_s]), 0)[0])
    if not (total == rc.size()).all():
        sys.exit("wrong numbers")
except rc.RingcommError as error:
    tell(
        "error",
        kind=type(error).__name__,
        text=str(error),
        rank=getattr(error, "rank", None),
        host=getattr(error, "host", None),
        ranks=getattr(error, "ranks", None),
    )
    raise
tell("finished")
