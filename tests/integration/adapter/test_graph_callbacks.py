"""Batches of collectives on arrays, as graphs of frameworks run them, between ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter.compression import Compression
from ringcomm._adapter.graph_callbacks import Batch, Operation
from ringcomm._adapter.reduction import Reduction
from ringcomm.balance.plan import StepWeight
from ringcomm.calls.process_set import global_process_set
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
        batch = Batch(
            [
                Operation("allreduce", SUM, "a", inputs=2),
                Operation("broadcast", ALL, "b", root_rank=1),
            ]
        )
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


class Weight(StepWeight):
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
        assert lists(Batch([Operation("allreduce", SUM, "c")]).run([np.ones(1)])) == [[2.0]], (
            "the job goes on"
        )
        return "a" in str(caught.value)

    assert ranks(work) == [True, True]
