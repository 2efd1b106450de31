"""Ranks whose arrays or rows differ: right where they may, and an error on all where they may not."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.configuration.settings import ALONE_BYTES
from ringcomm.errors import ConfigError, MismatchError

FORMS = {
    "direct": rc.reducescatter,
    "in place": rc.reducescatter_,
    "by name": lambda array, **options: rc.reducescatter_async(array, **options).wait(),
    "grouped": lambda array, **options: rc.grouped_reducescatter([array, 2 * array], **options)[0],
}


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([1, 1], r"reducescatter: splits \[1, 1\] have sum 2, the tensor 3 rows"),
        ([4, 0], "reducescatter: the sum of the splits"),
        ([4, -1], "or one of them is negative"),
        ([1, 1, 1], r"number of entries in splits \(3\) does not equal the number of workers \(2\)"),
        ([1.5, 1.5], "reducescatter: splits=.* is not a list of whole numbers"),
        (3, "reducescatter: splits=3 is not a list"),
    ],
)
def test_wrong_lists_are_named_before_anything_is_sent(ranks_of, splits, words):
    def work(context):
        for form in FORMS.values():
            with pytest.raises(ConfigError, match=words):
                form(np.ones((3, 2)), splits=splits)
        return float(rc.allreduce(1.0, op="sum"))

    assert ranks_of(2, work) == [2.0, 2.0]


def disagree(ranks_of, form, **options):
    def work(context):
        with pytest.raises(MismatchError) as caught:
            FORMS[form](np.ones((3, 2)), splits=[[3, 0], [1, 2]][context.rank], **options)
        return str(caught.value)

    return ranks_of(2, work)


def test_ranks_that_disagree_by_name(ranks_of):
    for text in disagree(ranks_of, "by name", name="rows"):
        assert "lists of sizes" in text and "[3, 0] rows by rank" in text and "[1, 2] rows by rank" in text


@pytest.mark.parametrize("weight", [None, 1.0])
def test_ranks_that_disagree_with_a_codec(ranks_of, weight):
    for text in disagree(ranks_of, "direct", compression="int8", weight=weight):
        assert "makes another call: they disagree about the shape, the scale factors or the list" in text


# ---- ranks whose arrays differ -------------------------------------------------------------------


def fails(call, *words):
    """Return whether a call raises a MismatchError with these words."""
    with pytest.raises(MismatchError) as caught:
        call()
    return all(word in str(caught.value) for word in words)


def test_rows_of_one_array_that_are_many_on_one_rank_only(ranks_of):
    """What travels together is decided by what all ranks see, not by this rank's own rows."""

    def work(context):
        many = ALONE_BYTES // 4 + 1 if context.rank else 1
        parts = [np.full(many, context.rank, np.float32), np.full(2, context.rank, np.float32)]
        found = rc.grouped_allgather(parts, name="rows")
        return [(len(rows), rows[0], rows[-1]) for rows in found]

    expected = [(ALONE_BYTES // 4 + 2, 0.0, 1.0), (4, 0.0, 1.0)]
    assert ranks_of(2, work) == [expected, expected]


def laid_out(array, rank):
    """The same numbers: contiguous, in Fortran's order and backwards, or not aligned."""
    if rank == 0:
        return array.copy()
    if rank == 1:
        return np.asfortranarray(array[::-1])[::-1]
    bytes_ = np.empty(array.nbytes + 1, np.uint8)
    unaligned = bytes_[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    return unaligned


@pytest.mark.parametrize("rows", [3, ALONE_BYTES // 16])
@pytest.mark.parametrize("codec", [None, "bf16"])
def test_what_only_one_rank_knows_decides_nothing(ranks_of, rows, codec):
    """Layouts, numbers of rows, absent parts, whether a rank waits at once, and in which order it submits."""

    def work(context):
        rank, engine = context.rank, context.engine
        numbers = np.full((rows, 4), rank + 1.0, np.float32)
        own = np.full((rows if rank == 1 else rank, 4), rank, np.float32)
        starts = {
            "mean": lambda: rc.allreduce_async(laid_out(numbers, rank), compression=codec, name="mean"),
            "sums": lambda: rc.grouped_allreduce_async([laid_out(numbers, rank)] * 2, op=rc.Sum, name="sums"),
            "part": lambda: rc.reducescatter_async(laid_out(numbers, rank), compression=codec, name="part"),
            "rows": lambda: rc.allgather_async(laid_out(own, rank), name="rows"),
            "few": lambda: rc.grouped_allgather_async([own[:1], laid_out(own, rank)], name="few"),
            "absent": lambda: engine.allreduce([np.ones(4)], rc.Sum, "a", absent=2 * rank, urgent=rank == 1),
        }  # fmt: skip
        order = list(starts)[rank:] + list(starts)[:rank]
        handles = {name: starts[name]() for name in order}
        if rank == 2:
            handles["absent"].wait()
        found = {name: handles[name].wait() for name in reversed(order)}
        assert handles["absent"].absent == 0
        assert (found["mean"] == 2.0).all() and all((item == 6.0).all() for item in found["sums"])
        assert (found["part"] == 2.0).all() and len(found["part"]) == rows // 3 + (rank < rows % 3)
        lengths = [len(found["rows"]), *map(len, found["few"])]
        return lengths, rc.allgather(laid_out(own, rank)).sum(), rc.allreduce(laid_out(numbers, rank)).mean()

    assert ranks_of(3, work) == [([rows + 2, 2, rows + 2], 4.0 * (rows + 4), 2.0)] * 3


@pytest.mark.parametrize("every_rank", [True, False])
def test_completing_arrays_of_different_lengths(ranks_of, every_rank):
    def work(context):
        some = None if every_rank else rc.add_process_set([0, 1])
        if not every_rank and context.rank == 2:
            return True
        words = () if every_rank else ("[2, 2] rows by rank", "[3, 2] rows by rank")
        array = np.arange(4.0 + context.rank)
        return fails(lambda: rc.allgather_(array, process_set=some), "allgather", *words)

    assert all(ranks_of(2 if every_rank else 3, work))


@pytest.mark.parametrize("every_rank", [True, False])
def test_exchanging_different_numbers_of_rows_in_place(ranks_of, every_rank):
    """With 1, 2 and 3 rows for each rank the middle one would receive as many as it has sent."""

    def work(context):
        some = None if every_rank else rc.add_process_set([0, 1, 2])
        if context.rank == 3:
            return True
        array = np.arange(3.0 * (context.rank + 1))
        words = ["have 3, 6, 9 rows"]
        if not every_rank:
            words = ["[1, 1, 1] rows", "[2, 2, 2] rows", "[3, 3, 3] rows"]
        return fails(lambda: rc.alltoall_(array, process_set=some), "alltoall", *words)

    assert all(ranks_of(3 if every_rank else 4, work))


@pytest.mark.parametrize("codec", [None, "bf16"])
def test_a_weighted_average_that_fits_into_float16(ranks_of, codec):
    """The product of a number and its weight relative to the mean does not fit."""

    def work(context):
        array = np.full((3, 200), 40000, np.float16)
        options = {"weight": [1.0, 0.0, 0.0][context.rank], "compression": codec}
        results = [
            rc.allreduce(array, **options), rc.grouped_allreduce([array[0, :9]], **options)[0],
            rc.allreduce_async(array, name="a", **options).wait(), rc.reducescatter(array, **options),
            rc.reducescatter_async(array, name="a", **options).wait(),
        ]  # fmt: skip
        assert all(found.dtype == np.float16 for found in results)
        return [bool((abs(found.astype(float) - 40000) < 200).all()) for found in results]

    assert ranks_of(3, work) == [[True] * 5] * 3
