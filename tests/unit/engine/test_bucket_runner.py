"""Arrays that follow each other in memory, and what is said of a bucket while it runs."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.codec.codecs import BLOCK_ITEMS
from ringcomm.configuration.settings import ALONE_BYTES
from ringcomm.engine.bucket_runner import (
    FusionBuffer,
    as_one,
    groups_by_index,
    neutral,
    side_by_side,
)
from ringcomm.ops import ReduceOp


def test_neighbours_in_memory_are_one_array():
    whole = np.arange(24, dtype=np.float32)
    parts = [whole[start : start + 6] for start in range(0, 24, 6)]
    for count in range(2, 5):
        one = as_one(parts[:count])
        assert one is not None and np.shares_memory(one, whole)
        assert one.tolist() == list(range(6 * count))


def test_small_arrays_of_a_type_travel_together_and_large_ones_alone():
    small, large = np.zeros(3, np.float32), np.zeros(ALONE_BYTES // 4, np.float32)
    other = np.zeros(2, np.int64)
    assert groups_by_index([small, large, other, small]) == [[0, 3], [1], [2]]


def test_each_array_begins_with_a_block_of_its_own():
    first, second = np.full(3, 1.0, np.float32), np.full(BLOCK_ITEMS + 1, 2.0, np.float32)
    packed, unpack = side_by_side([first, second], FusionBuffer(), block_items=BLOCK_ITEMS)
    assert packed.size == 3 * BLOCK_ITEMS
    assert packed[:3].tolist() == [1.0] * 3 and not packed[3:BLOCK_ITEMS].any()
    assert not packed[2 * BLOCK_ITEMS + 1 :].any()
    packed += 1
    unpack()
    assert set(first.tolist()) == {2.0} and set(second.tolist()) == {3.0}
    alone, unpack = side_by_side([first], FusionBuffer(), block_items=BLOCK_ITEMS)
    unpack()
    assert alone is first


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (ReduceOp.SUM, "float32", 0.0),
        (ReduceOp.PRODUCT, "int32", 1),
        (ReduceOp.MIN, "float64", np.inf),
        (ReduceOp.MAX, "float16", -np.inf),
        (ReduceOp.MIN, "int8", 127),
        (ReduceOp.MAX, "uint8", 0),
        (ReduceOp.MIN, "bool", True),
        (ReduceOp.MAX, "bool", False),
    ],
)
def test_what_a_rank_that_has_joined_contributes_changes_nothing(op, dtype, expected):
    contribution = neutral(2, np.dtype(dtype), op)
    assert contribution.dtype == dtype and contribution.tolist() == [expected] * 2


def test_small_arrays_travel_side_by_side_and_get_their_results_back():
    group, noted = [np.arange(3.0), np.arange(2.0), np.zeros(0)], []
    packed, unpack = side_by_side(group, FusionBuffer(), noted.append)
    assert packed.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    packed *= 2
    unpack()
    assert [array.tolist() for array in group] == [[0.0, 2.0, 4.0], [0.0, 2.0], []]
    assert noted == ["MEMCPY_IN_FUSION_BUFFER", "", "MEMCPY_OUT_FUSION_BUFFER", ""]
