"""Connect through a given store, and sum ones: prints the sum, or the error.

python meets.py RANK SIZE PORT [later]

later: say that the ranks have met, wait for a line on stdin, and do the same once more in a new group.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import ringcomm.torch.distributed  # noqa: F401
from ringcomm.errors import RingcommError

rank, size, port = map(int, sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
try:
    dist.init_process_group(
        "ringcomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    ones = torch.ones(1000, dtype=torch.float64)
    dist.all_reduce(ones)
    print("sum", float(ones[0]), flush=True)
    if sys.argv[4:] == ["later"]:
        sys.stdin.readline()
        ones = torch.ones(1000, dtype=torch.float64)
        dist.all_reduce(ones, group=dist.new_group(list(range(size))))
        print("sum", float(ones[0]), flush=True)
    dist.destroy_process_group()
except RingcommError as problem:
    print(type(problem).__name__, problem, flush=True)
