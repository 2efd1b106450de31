"""Allreduces of some size, again and again; then every rank prints a digest of the last result."""

import argparse
import hashlib
import os
import time

import numpy as np

import ringcomm as rc

parser = argparse.ArgumentParser()
parser.add_argument("--repeat", type=int, default=10)
parser.add_argument("--items", type=int, default=1_000_000)
parser.add_argument("--seconds", type=float, default=0.0, help="end at about this time, with all ranks")
parser.add_argument("--marker", default="", help="only there to be seen in process lists")
arguments = parser.parse_args()

rc.init()
print(f"pid {os.getpid()} is rank {rc.rank()} of {rc.size()}", flush=True)
result, began_s = np.arange(arguments.items, dtype=np.float32), time.monotonic()
for step in range(arguments.repeat):
    result = rc.allreduce(np.arange(arguments.items, dtype=np.float32) * (rc.rank() + step + 1))
    if step == 2:
        print(f"rank {rc.rank()} is running", flush=True)
    late = [float(0.0 < arguments.seconds < time.monotonic() - began_s)]
    if arguments.seconds and rc.allreduce(np.array(late, np.float32), op=rc.Max)[0]:
        break
print(f"rank {rc.rank()} digest {hashlib.sha256(result.tobytes()).hexdigest()[:16]}", flush=True)
