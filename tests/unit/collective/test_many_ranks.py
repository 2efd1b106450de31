"""Collectives of many ranks: what one process does before and during a call grows with the ranks only."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.execute import Execution, SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.ops import Sum
from ringcomm.transport.memory import memory_fabrics
from tests.unit.calls import calls_in
from tests.unit.collective.building import HEADER
from tests.unit.schedule.building import make, names

FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("collective", ["allreduce", "reducescatter", "allgather", "broadcast"])
def test_building_and_compiling_a_schedule_grows_with_the_ranks_only(collective):
    needed = {}
    for size in (64, 256):
        fabric = memory_fabrics(size, 1000)[1]
        name = "ring" if "ring" in names(collective) else names(collective)[0]

        def compiled(size=size, fabric=fabric, name=name):
            schedule = make(collective, name, 1, size, 10 * size)
            Execution(schedule, fabric, HEADER, FLOAT32, SegmentPool(16), Kernel(Sum, FLOAT32, size))

        needed[size] = calls_in(compiled)
    assert needed[256] <= 4.6 * needed[64]
