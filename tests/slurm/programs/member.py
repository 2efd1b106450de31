"""One rank: prints what it is, where it runs and what a sum over all ranks gives.

With `until FILE` it first waits for that file, with `sleep` for ever.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import ringcomm as rc

PREFIXES = ("SLURM_STEP", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "PMI", "OMPI_COMM")

rc.init()
print("started", flush=True)
if sys.argv[1:2] == ["until"]:
    while not Path(sys.argv[2]).exists():
        time.sleep(0.05)
while sys.argv[1:2] == ["sleep"]:
    time.sleep(0.1)
total = int(rc.allreduce(np.full(3, rc.rank() + 1.0), op=rc.Sum)[0])
foreign = sorted(name for name in os.environ if name.startswith(PREFIXES))
restart = os.environ.get("RINGCOMM_RESTART")
node = os.environ.get("NODE_RANK")
place = f"on {os.uname().nodename} local {rc.local_rank()} of {rc.local_size()}"
own = f"rank {rc.rank()} of {rc.size()} {place}"
print(f"{own}: total {total} node {node} restart {restart} foreign {foreign}", flush=True)
rc.shutdown()
