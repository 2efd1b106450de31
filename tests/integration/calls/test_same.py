"""Do all ranks hold the same numbers? Eight bytes show it; if not, all learn which differ, and where."""

from __future__ import annotations

import numpy as np

from ringcomm.calls.direct import compare
from ringcomm.errors import DesyncError, Recoverable

SHAPES = {"weight": (3, 4), "bias": (4,), "scale": (), "empty": (0, 2)}


def arrays(seed=1):
    random = np.random.default_rng(seed)
    return [(name, random.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()]


def caught(context, named, process_set=0):
    """The facts of the error, or None."""
    try:
        compare(context, named, process_set)
    except DesyncError as error:
        assert not isinstance(error, Recoverable)
        return error.tensor, error.ranks, str(error)
    return None


def test_the_same(on_ranks):
    assert on_ranks(3, lambda context: caught(context, arrays())) == [None] * 3


def test_one_bit(on_ranks):
    def check(context):
        named = arrays()
        if context.rank == 1:
            named[1][1].view(np.uint32)[2] ^= 1
        return caught(context, named), caught(context, arrays())

    results = on_ranks(3, check)
    assert len(set(results)) == 1, "all ranks raise the same"
    (tensor, ranks, text), afterwards = results[0]
    assert (tensor, ranks) == ("bias", (1,))
    assert "'bias', rank 1 (" in text and "differs from the others" in text
    assert afterwards is None, "and the next check works"


def test_negative_zero_and_nan_are_compared_by_their_bits(on_ranks):
    def check(context):
        same = caught(context, [("x", np.array([np.nan, 0.0]))])
        return same, caught(context, [("x", np.array([-0.0 if context.rank else 0.0]))])

    for same, different in on_ranks(2, check):
        assert same is None and different is not None


def test_those_that_have_run_out_of_data_do_not_count(on_ranks):
    def check(context):
        if context.rank == 2:
            context.engine.join().wait()
            return "joined"
        same = caught(context, arrays())
        different = caught(context, [("x", np.array([context.rank]))])
        context.engine.join().wait()
        return same, different[1], different[2].count("rank ")

    assert on_ranks(3, check)[:2] == [(None, None, 2)] * 2
