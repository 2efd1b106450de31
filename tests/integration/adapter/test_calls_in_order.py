"""Collectives of programs that run in order, as calls in order, between ranks that are threads."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter import calls_in_order
from ringcomm._adapter.calls_in_order import is_inside, overwrite, run
from ringcomm._adapter.graph_callbacks import Operation
from ringcomm._adapter.reduction import Reduction
from ringcomm._adapter.submit import cause_of
from ringcomm.calls.process_set import global_process_set
from ringcomm.collective.observe import this_site
from ringcomm.engine.bucket_runner import FusionBuffer
from ringcomm.ops import ReduceOp

EVERY = global_process_set
ALL = Reduction(process_set=EVERY)
SUM = Reduction(ReduceOp.SUM, process_set=EVERY)


class BufferPerThread(threading.local):
    """Memory of a rank's own: one process is one rank, and these ranks are threads."""

    def __init__(self):
        self.items = FusionBuffer().items


@pytest.fixture
def ranks(ranks_of, monkeypatch):
    """Runs a function of the context on two ranks; the results in rank order."""
    monkeypatch.setattr(calls_in_order, "_packed", BufferPerThread())
    return partial(ranks_of, 2)


def lists(arrays):
    return [array.tolist() for array in arrays]


def test_all_kinds_of_operations(ranks):
    def work(context):
        rank, site = context.rank, this_site()
        given = [np.array([rank, 1.0]), np.array([3 + rank]), np.array([[2.0 * rank]])]
        scaled = Reduction(ReduceOp.SUM, 0.5, 4.0, EVERY)
        found = {
            "reduced": run(Operation("allreduce", scaled, inputs=3), given, site),
            "copied": run(Operation("broadcast", ALL, inputs=2, root_rank=1), given[:2], site),
            "scattered": run(Operation("reducescatter", SUM), [np.arange(4.0)], site),
            "gathered": run(Operation("allgather", ALL), [np.full(rank + 1, rank)], site),
            "both gathered": run(Operation("allgather", ALL, inputs=2), [given[0], given[2]], site),
            "exchanged": run(
                Operation("alltoall", ALL, inputs=2),
                [np.array([rank, rank + 10]), np.zeros(0, np.int32)],
                site,
            ),
            "split": run(
                Operation("alltoall", ALL, inputs=2),
                [np.arange(3) + 10 * rank, np.array([rank + 1, 2 - rank])],
                site,
            ),
            "barrier": run(Operation("barrier", ALL, inputs=0), [], site),
        }
        assert lists(given) == [[rank, 1.0], [3 + rank], [[2.0 * rank]]], "inputs are not changed"
        assert found["split"][1].dtype == np.int32
        return {name: lists(arrays) for name, arrays in found.items()}

    for rank, found in enumerate(ranks(work)):
        assert found == {
            "reduced": [[2.0, 4.0], [12], [[4.0]]],
            "copied": [[1.0, 1.0], [4]],
            "scattered": [[[0.0, 2.0], [4.0, 6.0]][rank]],
            "gathered": [[0, 1, 1]],
            "both gathered": [[0.0, 1.0, 1.0, 1.0], [[0.0], [2.0]]],
            "exchanged": [[[0, 1], [10, 11]][rank], [1, 1]],
            "split": [[[0, 10, 11], [1, 2, 12]][rank], [[1, 2], [2, 1]][rank]],
            "barrier": [],
        }


def test_adasum_is_of_each_array_by_itself(ranks):
    """Of equal gradients it is the average, of orthogonal ones the sum; of both in one it is neither."""

    def work(context):
        arrays = [np.array([3.0, 4.0]), np.array([2.0, 0.0] if context.rank else [0.0, 2.0])]
        overwrite(
            Operation("allreduce", Reduction(ReduceOp.ADASUM, process_set=EVERY), inputs=2),
            arrays,
            this_site(),
        )
        return lists(arrays)

    for equal, orthogonal in ranks(work):
        np.testing.assert_allclose(equal, [3.0, 4.0])
        np.testing.assert_allclose(orthogonal, [2.0, 2.0])


def test_groups_that_differ_are_errors_of_all_ranks_and_of_every_later_call(ranks):
    def work(context):
        sizes = [6, 4] if context.rank else [5, 5]
        arrays = [np.ones(size) for size in sizes]
        with pytest.raises(rc.MismatchError, match=r"2 arrays: \(\d,\), \(\d,\)") as caught:
            overwrite(Operation("allreduce", SUM, inputs=2), arrays, this_site())
        quoted = RuntimeError(f"the program has failed: {caught.value}")
        assert cause_of(quoted) is caught.value
        with pytest.raises(rc.MismatchError) as later:
            run(Operation("barrier", ALL, inputs=0), [], this_site())
        assert later.value is not caught.value and not is_inside()
        return str(later.value) == str(caught.value)

    assert ranks(work) == [True, True]
