"""Arrays that follow each other in memory, and what is said of a bucket while it runs."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.codec.base import BLOCK_ITEMS
from ringcomm.collective.reduce import kernel
from ringcomm.configuration.bucket_sizes import ALONE_BYTES
from ringcomm.engine.packing import (
    FusionBuffer,
    as_one,
    bucket_text,
    groups_by_index,
    in_blocks,
    neutral,
    side_by_side,
)
from ringcomm.engine.request import Handle, Request
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.signature import Key, Signature


def work(name: str, number: int = 0, joined: bool = False):
    """A member of a bucket, as the performer gets it."""
    signature = Signature(name, 0, Collective.ALLREDUCE, ReduceOp.SUM, NO_ROOT, ("float32",), ((3, 4),))
    request = Request(signature, [], Handle(name))
    request.key = Key(0, name, number)
    return signature, None if joined else request


CALL = "allreduce(shape (3, 4), float32, op=Sum)"


@pytest.mark.parametrize(
    ("bucket", "text"),
    [
        ([work("conv1")], f"{CALL} 'conv1'"),
        ([work("", 7)], f"{CALL} without a name (number 7)"),
        ([work("conv1", joined=True), work("conv2")], f"{CALL} 'conv1' and another"),
        ([work("conv1"), work("conv2"), work("fc")], f"{CALL} 'conv1' and 2 others"),
    ],
)
def test_a_bucket_is_called_what_the_program_calls_it(bucket, text):
    assert bucket_text(bucket) == text


def test_neighbours_in_memory_are_one_array():
    whole = np.arange(24, dtype=np.float32)
    parts = [whole[start : start + 6] for start in range(0, 24, 6)]
    for count in range(2, 5):
        one = as_one(parts[:count])
        assert one is not None and np.shares_memory(one, whole)
        assert one.tolist() == list(range(6 * count))


def test_what_is_not_next_to_each_other_stays_apart():
    whole, other = np.arange(24, dtype=np.float32), np.arange(6, dtype=np.float32)
    parts = [whole[start : start + 6] for start in range(0, 24, 6)]
    for arrays in (
        [parts[0], parts[2]],
        [parts[0], parts[1], parts[3]],
        [parts[1], parts[0]],
        [parts[0], parts[1], parts[1]],
        [parts[0], other[:]],
        [other, parts[0]],
    ):
        assert as_one(arrays) is None


def test_small_arrays_of_a_type_travel_together_and_large_ones_alone():
    small, large = np.zeros(3, np.float32), np.zeros(ALONE_BYTES // 4, np.float32)
    other = np.zeros(2, np.int64)
    assert groups_by_index([small, large, other, small]) == [[0, 3], [1], [2]]


def test_each_array_begins_with_a_block_of_its_own():
    first, second = np.full(3, 1.0, np.float32), np.full(BLOCK_ITEMS + 1, 2.0, np.float32)
    packed, unpack = in_blocks([first, second], FusionBuffer())
    assert packed.size == 3 * BLOCK_ITEMS
    assert packed[:3].tolist() == [1.0] * 3 and not packed[3:BLOCK_ITEMS].any()
    assert not packed[2 * BLOCK_ITEMS + 1 :].any()
    packed += 1
    unpack()
    assert set(first.tolist()) == {2.0} and set(second.tolist()) == {3.0}
    alone, unpack = in_blocks([first], FusionBuffer())
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


@pytest.mark.parametrize("dtype", ["float64", "int32"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("prescale", [-2.0, 0.0, 0.5])
def test_a_neutral_contribution_that_is_scaled_changes_nothing(op, dtype, prescale):
    given = np.array([-7, 0, 9]).astype(dtype)
    fold = kernel(op, given.dtype, 2, prescale)
    contributions = [given.copy(), neutral(3, given.dtype, op, prescale)]
    for contribution in contributions:
        fold.prepare(contribution)
    fold.fold(contributions[0], contributions, final=True)
    assert contributions[0].tolist() == (given * prescale).astype(dtype).tolist()


def test_small_arrays_travel_side_by_side_and_get_their_results_back():
    group, noted = [np.arange(3.0), np.arange(2.0), np.zeros(0)], []
    packed, unpack = side_by_side(group, FusionBuffer(), noted.append)
    assert packed.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    packed *= 2
    unpack()
    assert [array.tolist() for array in group] == [[0.0, 2.0, 4.0], [0.0, 2.0], []]
    assert noted == ["MEMCPY_IN_FUSION_BUFFER", "", "MEMCPY_OUT_FUSION_BUFFER", ""]
