"""Operations for a long time leak neither memory nor descriptors nor threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
import psutil
import pytest

from ringcomm.ops import Max
from ringcomm.testing.cluster import run_ranks

pytestmark = pytest.mark.release
LIMIT_S = 60.0


def opened():
    process = psutil.Process()
    return process.num_fds(), threading.active_count()


@pytest.mark.timeout(300)
def test_a_hundred_thousand_small_operations_leak_nothing():
    steady = {}

    def work(context):
        array = np.ones(2)
        for n in range(50_000):
            context.engine.allreduce([array], Max, "same" if n % 2 else "").wait(LIMIT_S)
            if n == 5_000 and context.rank == 0:
                gc.collect()
                steady["before"] = (psutil.Process().memory_info().rss, *opened())
        if context.rank == 0:
            gc.collect()
            steady["after"] = (psutil.Process().memory_info().rss, *opened())
        context.barrier()

    run_ranks(2, work, "memory", timeout_s=280.0)
    before, after = steady["before"], steady["after"]
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 3_000_000
