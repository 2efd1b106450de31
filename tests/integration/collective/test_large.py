"""More elements than 32 bits can count."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from ringcomm.config import Settings
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks

NEEDED_BYTES = 12 << 30
COUNT = 2**31 + 4321


@pytest.mark.release
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED_BYTES,
    reason=f"needs {NEEDED_BYTES >> 30} GiB of free memory",
)
def test_more_than_2_to_the_31_elements():
    marks = {0: 1, 1: 2, COUNT // 2: 3, 2**31 - 1: 4, 2**31: 5, 2**31 + 1: 6, COUNT - 1: 7}

    def work(context):
        array = np.zeros(COUNT, np.int8)
        for index, value in marks.items():
            array[index] = value * (context.rank + 1)
        assert context.allreduce_(array, Sum) is array
        found = {index: int(array[index]) for index in marks}
        return found, sum(np.count_nonzero(block) for block in np.array_split(array, 64))

    results = run_ranks(2, work, transport="tcp", settings=Settings(timeout_s=60.0), timeout_s=280.0)
    assert results == [({index: 3 * value for index, value in marks.items()}, len(marks))] * 2
