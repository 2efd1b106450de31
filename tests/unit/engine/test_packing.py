"""Arrays that follow each other in memory, and what is said of a bucket while it runs."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.engine.packing import as_one, bucket_text
from ringcomm.engine.request import Handle, Key, Request, Signature
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_ROOT


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
