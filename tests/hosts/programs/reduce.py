"""Allreduces of some size, again and again; then every rank prints a digest of the last result."""

import argparse
import hashlib
import os

import numpy as np

import ringcomm as rc

parser = argparse.ArgumentParser()
parser.add_argument("--repeat", type=int, default=10)
parser.add_argument("--items", type=int, default=1_000_000)
parser.add_argument("--marker", default="", help="only there to be seen in process lists")
arguments = parser.parse_args()

rc.init()
print(f"pid {os.getpid()} is rank {rc.rank()} of {rc.size()}", flush=True)
result = np.arange(arguments.items, dtype=np.float32)
for step in range(arguments.repeat):
    result = rc.allreduce(np.arange(arguments.items, dtype=np.float32) * (rc.rank() + step + 1))
    if step == 2:
        print(f"rank {rc.rank()} is running", flush=True)
print(f"rank {rc.rank()} digest {hashlib.sha256(result.tobytes()).hexdigest()[:16]}", flush=True)
