"""Every collective of a job of two ranks; with ``die`` rank 1 is killed before."""

import os
import signal
import sys

import numpy as np

import ringcomm as rc

rc.init()
rank, size = rc.rank(), rc.size()
if "die" in sys.argv:
    rc.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
for count in (3, 300_000):
    own = np.arange(count, dtype=np.float32) + rank
    total = np.arange(count, dtype=np.float32) * size + sum(range(size))
    for _ in range(4):
        assert np.array_equal(rc.allreduce(own, op=rc.Sum), total)
    assert np.array_equal(rc.broadcast(own, root_rank=1), np.arange(count, dtype=np.float32) + 1)
    assert rc.allgather(own).shape == (count * size,)
    assert rc.alltoall(np.repeat(own, size)).shape == (count * size,)
    assert rc.reducescatter(np.repeat(own, size), op=rc.Sum).shape == (count,)
    assert np.array_equal(rc.synchronize(rc.allreduce_async(own, name=f"a{count}", op=rc.Sum)), total)
rc.barrier()
print("done", rank, flush=True)
rc.shutdown()
