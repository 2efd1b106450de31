"""Collectives of many ranks: what one process does before and during a call grows with the ranks only."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringcomm.collective.execute import Execution, SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.ops import Sum
from ringcomm.schedule.steps import DATA, SOURCE, Dependencies, Recv, Send
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


@pytest.mark.parametrize("seed", range(50))
def test_a_step_depends_on_all_earlier_ones_that_touch_its_elements(seed):
    rng = random.Random(seed)
    schedule = []
    for _ in range(rng.randrange(1, 30)):
        start = rng.randrange(10)
        stop = rng.randrange(start, 11)
        if rng.random() < 0.5:
            schedule.append(Send(1, start, stop, rng.choice([DATA, SOURCE])))
        else:
            schedule.append(Recv((1,), start, stop))
    dependencies = Dependencies(schedule)
    for index, step in enumerate(schedule):
        assert dependencies.of(index, step) == [
            number for number, earlier in enumerate(schedule[:index]) if depends(step, earlier)
        ]


def depends(step, earlier):
    """Whether they have an element in common, and one of them writes it."""
    writes = [isinstance(item, Recv) for item in (step, earlier)]
    buffers = {DATA if isinstance(item, Recv) else item.buffer for item in (step, earlier)}
    common = set(range(step.start, step.stop)) & set(range(earlier.start, earlier.stop))
    return any(writes) and len(buffers) == 1 and bool(common)
