"""Checks and conversions of the arguments of the adapters' functions."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter.arguments import (
    SequenceName,
    checked_passes,
    predivided,
    scattered_reduction,
    wire_name,
)
from ringcomm._adapter.basics import init
from ringcomm._adapter.compression import Compression, is_elementwise, wire_dtype
from ringcomm._adapter.trees import put_together, take_apart
from ringcomm.elastic.sampler import plan_share


def test_a_reducescatter_is_not_adasum():
    with pytest.raises(NotImplementedError):
        scattered_reduction(rc.Adasum)
    assert scattered_reduction(1) is rc.Sum


def test_the_passes_of_a_step():
    assert checked_passes(1) == 1 and checked_passes(4) == 4
    for bad in (0, -1):
        with pytest.raises(ValueError, match="backward_passes_per_step must be > 0, not"):
            checked_passes(bad)


def test_wire_name():
    assert wire_name("allreduce", "x") == "allreduce.x"
    assert wire_name("allreduce", None) == wire_name("allreduce", "") == ""


def test_a_sequence_has_one_name_for_all_kinds():
    name = SequenceName("steps")
    assert wire_name("allreduce", name) == wire_name("barrier", name) == "steps"


def test_predivided():
    assert predivided(rc.Sum, 1.0) == (1.0, 1.0)
    assert predivided(rc.Average, 4) == (0.25, 4.0)
    with pytest.raises(ValueError):
        predivided(rc.Sum, 2.0)


def test_only_wide_floats_are_compressed():
    assert wire_dtype("fp16", "float32") == wire_dtype("fp16", "float64") == "float16"
    assert wire_dtype("bf16", "float32") == "bfloat16"
    for kind, dtype in (("none", "float32"), ("fp16", "bfloat16"), ("bf16", "float16"), ("fp16", "int64")):
        assert wire_dtype(kind, dtype) is None


def test_a_dtype_may_be_a_class_as_in_mxnet():
    class Numbers(np.ndarray):
        dtype = np.float32

    numbers = np.array([0.5], np.float32).view(Numbers)
    small, context = Compression.fp16.compress(numbers)
    assert np.asarray(small).dtype == np.float16 and context is np.float32
    assert Compression.fp16.compress(np.array([1], np.int32))[1] is None


def test_decompression_restores_the_dtype():
    numbers = np.array([0.5, 1.25], np.float64)
    small, context = Compression.fp16.compress(numbers)
    assert small.dtype == np.float16
    whole = Compression.fp16.decompress(small, context)
    assert whole.dtype == np.float64 and whole.tolist() == [0.5, 1.25]
    counts = np.array([1, 2])
    for compression in (Compression.none, Compression.fp16, Compression.bf16):
        assert is_elementwise(compression)
        assert compression.compress(counts) == (counts, None)
        assert compression.decompress(counts, None) is counts
    assert not is_elementwise(type("Own", (Compression.fp16,), {}))


def test_trees():
    tree = {"a": [1, 2.5, {"b": (3, "x")}], "c": 4}
    skeleton, leaves = take_apart(tree, lambda item: isinstance(item, int))
    assert leaves == [1, 3, 4]
    assert put_together(skeleton, [10, 30, 40]) == {"a": [10, 2.5, {"b": (30, "x")}], "c": 40}
    assert put_together(skeleton, leaves) == tree


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("processed", [0, 5, 9, 10, 12])
def test_every_rank_gets_the_same_number_of_samples_and_none_is_left_out(size, processed):
    shares = [plan_share(10, rank, size, 1, 2, True, processed) for rank in range(size)]
    assert len({len(share.indices) for share in shares}) == 1
    left = set(shares[0].remaining)
    assert {index for share in shares for index in share.indices} == left
    assert len(left) == max(0, 10 - processed)
    assert all(share.remaining == shares[0].remaining for share in shares)


def test_the_order_is_that_of_the_epoch():
    assert plan_share(4, 1, 2, shuffle=False).indices == [1, 3]
    assert plan_share(50, 0, 1, epoch=1).remaining != plan_share(50, 0, 1, epoch=2).remaining


def test_init_refuses_what_it_cannot_do():
    for options in (
        {"comm": object()},
        {"comm": [0, 1]},
        {"process_sets": [[0], [0]]},
        {"process_sets": "x"},
    ):
        with pytest.raises(ValueError):
            init(**options)
        rc.shutdown()
    init(comm=[0], process_sets="dynamic")
    assert rc.size() == 1
    rc.shutdown()
