"""Collectives of several sizes between ranks of one host. ``one_host.py [read]``: with emulated_reading."""

from __future__ import annotations

import platform
import sys

import numpy as np

import ringcomm as rc

if "read" in sys.argv:
    import emulated_reading  # noqa: F401

rc.init()
rank, size = rc.rank(), rc.size()
for count in (1, 1000, 70_001, 3_000_000):  # the last are lent, where memory is read
    own = np.arange(count, dtype=np.float32) % 1000 + rank
    total = (np.arange(count) % 1000 * size + sum(range(size))).astype(np.float32)
    for _ in range(3):
        assert np.array_equal(rc.allreduce(own, op=rc.Sum), total), count
    assert np.array_equal(rc.broadcast(own, root_rank=1), own - rank + 1), count
    assert np.array_equal(rc.allgather(own)[rank * count :][:count], own), count
    assert np.array_equal(rc.synchronize(rc.allreduce_async(own, name=f"a{count}", op=rc.Sum)), total), count
rc.barrier()
print("done on", platform.machine(), flush=True)
rc.shutdown()
