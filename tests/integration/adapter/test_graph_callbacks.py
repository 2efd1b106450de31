"""Collectives on arrays as frameworks run them, in batches and in order, between ranks that are threads."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter import graph_callbacks
from ringcomm._adapter.compression import Compression
from ringcomm._adapter.graph_callbacks import Batch, Operation, is_in_order
from ringcomm._adapter.graph_callbacks import overwrite_in_order as overwrite
from ringcomm._adapter.graph_callbacks import run_in_order as run
from ringcomm._adapter.reduction import Reduction
from ringcomm._adapter.submit import cause_of
from ringcomm.calls.process_set import global_process_set
from ringcomm.collective.observe import this_site
from ringcomm.engine.bucket_runner import FusionBuffer
from ringcomm.ops import ReduceOp

EVERY = global_process_set
ALL = Reduction(process_set=EVERY)
SUM = Reduction(ReduceOp.SUM, process_set=EVERY)


@pytest.fixture
def ranks(ranks_of):
    """Runs a function of the rank on every rank; the results in rank order."""
    return lambda function: ranks_of(2, lambda context: function(context.rank))


def lists(arrays):
    return [np.asarray(array).tolist() for array in arrays]


def test_arrays_are_overwritten(ranks):
    def work(rank):
        arrays = [np.array([[1.0, rank]]), np.array([3, 4]), np.array([rank])]
        operations = Operation("allreduce", SUM, "a", inputs=2), Operation("broadcast", ALL, "b", root_rank=1)
        batch = Batch(operations)
        for _ in range(2):
            batch.overwrite(arrays)
        return lists(arrays)

    assert ranks(work) == [[[[4.0, 2.0]], [12, 16], [1]]] * 2


def test_a_batch_may_run_again_before_its_last_run_has_been_waited_for(ranks):
    def work(rank):
        batch = Batch([Operation("allreduce", SUM, "a")])
        numbers = [batch.start([np.array([step + rank])]) for step in range(3)]
        assert len(set(numbers)) == 3
        return [lists(batch.finish(number)) for number in reversed(numbers)]

    assert ranks(work) == [[[[5]], [[3]], [[1]]]] * 2


class Weight:
    """A rank's weight, and what it was told of the steps."""

    def __init__(self, number):
        self.number, self.log = number, []

    def now(self):
        return self.number

    def reduced(self):
        self.log.append("reduced")


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
def test_the_weight_of_a_step(ranks, compression):
    """Its steps are counted, also where the reduction executes a compression."""

    def work(rank):
        weight = Weight(3.0 if rank else 1.0)
        how = ALL._replace(weight=weight, compression=compression)
        batch = Batch([Operation("barrier", ALL, "a", inputs=0), Operation("allreduce", how, "b")])
        return lists(batch.run([np.array([1.0 + 4.0 * rank])])), weight.log

    assert ranks(work) == [([[4.0]], ["reduced"])] * 2


def test_a_failed_operation_is_raised_when_the_others_have_ended(ranks):
    def work(rank):
        batch = Batch([Operation("allreduce", SUM, "a"), Operation("allreduce", SUM, "b")])
        with pytest.raises(rc.MismatchError) as caught:
            batch.run([np.zeros(2 + rank), np.ones(2)])
        assert all(handle.block(0.0) for handle in batch._latest)
        assert lists(Batch([Operation("allreduce", SUM, "c")]).run([np.ones(1)])) == [[2.0]], "it goes on"
        return "a" in str(caught.value)

    assert ranks(work) == [True, True]


# ---- calls in order ----------------------------------------------------------------------------------------


class BufferPerThread(threading.local):
    """Memory of a rank's own: one process is one rank, and these ranks are threads."""

    def __init__(self):
        self.items = FusionBuffer().items


@pytest.fixture
def in_order(ranks_of, monkeypatch):
    """Runs a function of the context on two ranks; the results in rank order."""
    monkeypatch.setattr(graph_callbacks, "_packed", BufferPerThread())
    return partial(ranks_of, 2)


def test_all_kinds_of_operations(in_order):
    def work(context):
        rank, site = context.rank, this_site()
        given = [np.array([rank, 1.0]), np.array([3 + rank]), np.array([[2.0 * rank]])]
        scaled, alltoall = Reduction(ReduceOp.SUM, 0.5, 4.0, EVERY), Operation("alltoall", ALL, inputs=2)
        found = {
            "reduced": run(Operation("allreduce", scaled, inputs=3), given, site),
            "copied": run(Operation("broadcast", ALL, inputs=2, root_rank=1), given[:2], site),
            "scattered": run(Operation("reducescatter", SUM), [np.arange(4.0)], site),
            "gathered": run(Operation("allgather", ALL), [np.full(rank + 1, rank)], site),
            "both gathered": run(Operation("allgather", ALL, inputs=2), [given[0], given[2]], site),
            "exchanged": run(alltoall, [np.array([rank, rank + 10]), np.zeros(0, np.int32)], site),
            "split": run(alltoall, [np.arange(3) + 10 * rank, np.array([rank + 1, 2 - rank])], site),
            "barrier": run(Operation("barrier", ALL, inputs=0), [], site),
        }
        assert lists(given) == [[rank, 1.0], [3 + rank], [[2.0 * rank]]], "inputs are not changed"
        assert found["split"][1].dtype == np.int32
        return {name: lists(arrays) for name, arrays in found.items()}

    for rank, found in enumerate(in_order(work)):
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


def test_adasum_is_of_each_array_by_itself(in_order):
    """Of equal gradients it is the average, of orthogonal ones the sum; of both in one it is neither."""

    def work(context):
        arrays = [np.array([3.0, 4.0]), np.array([2.0, 0.0] if context.rank else [0.0, 2.0])]
        how = Reduction(ReduceOp.ADASUM, process_set=EVERY)
        overwrite(Operation("allreduce", how, inputs=2), arrays, this_site())
        return lists(arrays)

    for equal, orthogonal in in_order(work):
        np.testing.assert_allclose(equal, [3.0, 4.0])
        np.testing.assert_allclose(orthogonal, [2.0, 2.0])


def test_groups_that_differ_are_errors_of_all_ranks_and_of_every_later_call(in_order):
    def work(context):
        sizes = [6, 4] if context.rank else [5, 5]
        arrays = [np.ones(size) for size in sizes]
        with pytest.raises(rc.MismatchError, match=r"2 arrays: \(\d,\), \(\d,\)") as caught:
            overwrite(Operation("allreduce", SUM, inputs=2), arrays, this_site())
        quoted = RuntimeError(f"the program has failed: {caught.value}")
        assert cause_of(quoted) is caught.value
        with pytest.raises(rc.MismatchError) as later:
            run(Operation("barrier", ALL, inputs=0), [], this_site())
        assert later.value is not caught.value and not is_in_order()
        return str(later.value) == str(caught.value)

    assert in_order(work) == [True, True]
