"""The last rank loads data until it is killed; the others wait for it in an allreduce."""

import time

import numpy as np

import ringcomm as rc


def load() -> None:
    """Takes its time."""
    print(f"rank {rc.rank()} loads", flush=True)
    time.sleep(1000)


rc.init()
rc.allreduce(np.ones(10), name="conv1")
if rc.rank() == rc.size() - 1:
    load()
rc.allreduce(np.ones(10), name="conv2")
