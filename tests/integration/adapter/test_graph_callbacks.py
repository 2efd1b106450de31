"""Collectives on arrays as frameworks run them, in batches, in order, compressed; ranks are threads."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter import graph_callbacks
from ringcomm._adapter.callbacks import averaged
from ringcomm._adapter.compression import STEPS, AutoCompression, Compression, NoneCompressor
from ringcomm._adapter.graph_callbacks import (
    Batch,
    CompressionState,
    Operation,
    is_in_order,
    load_residual_state_dict,
    residual_state_dict,
    state_of,
)
from ringcomm._adapter.graph_callbacks import overwrite_in_order as overwrite
from ringcomm._adapter.graph_callbacks import run_in_order as run
from ringcomm._adapter.reduction import Reduction
from ringcomm._adapter.submit import cause_of
from ringcomm.calls.process_set import global_process_set
from ringcomm.collective.observe import this_site
from ringcomm.config import Settings
from ringcomm.engine.bucket_runner import FusionBuffer
from ringcomm.errors import ConfigError, MismatchError
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


# ---- compressed reductions -----------------------------------------------------------------------


SIZE = 3
MATRIX, VECTOR = (80, 70), (50,)


def numbers(rank, shape, seed=0):
    return np.random.default_rng((rank, seed, *shape)).standard_normal(shape).astype(np.float32)


def mean(shape, seed=0):
    return np.mean([numbers(rank, shape, seed) for rank in range(SIZE)], axis=0, dtype=np.float64)


def how(op=ReduceOp.AVERAGE, prescale=1.0, postscale=1.0, weight=None, compression=NoneCompressor):
    return Reduction(op, prescale, postscale, global_process_set, weight, compression)


def allreduce(compression, inputs=1, state=None, reduction=None, name="g", **options):
    chosen = (reduction or how())._replace(compression=compression)
    return Operation("allreduce", chosen, name, inputs, state=state, **options)


@pytest.fixture
def alike(ranks_of):
    """Runs a function of the context on every rank: the same results, in all bits, which are returned."""

    def run(function):
        results = ranks_of(SIZE, function)
        for other in results[1:]:
            assert [array.tobytes() for array in other] == [array.tobytes() for array in results[0]]
        return results[0]

    return run


class Variable:
    """Something that a state can belong to."""


def reduce(context, compression, shapes=(MATRIX, VECTOR), state=None, reduction=None, **options):
    operation = allreduce(compression, len(shapes), state, reduction, **options)
    return operation.start([numbers(context.rank, shape) for shape in shapes]).wait()


class TestAllreduce:
    def test_gradients_of_a_model(self, alike):
        """The matrix is coarse, the vector is sent as bfloat16."""
        matrix, vector = alike(lambda context: reduce(context, Compression.int8, state=CompressionState()))
        assert 1e-4 < np.abs(matrix - mean(MATRIX)).max() < 0.1
        assert np.abs(vector - mean(VECTOR)).max() < 0.02
        assert matrix.shape == MATRIX and vector.shape == VECTOR


class TestErrorFeedback:
    def test_saving_and_loading(self):
        model, again = [Variable() for _ in range(3)], [Variable() for _ in range(3)]
        assert residual_state_dict(model) == {}
        state_of(model[0]).residuals.of("g/0", 2)[:] = 3
        state_of(model[2]).residuals.of("h/0", 1)[:] = 4
        saved = residual_state_dict(model)
        assert {name: array.tolist() for name, array in saved.items()} == {"0/g/0": [3, 3], "2/h/0": [4]}
        state_of(again[1]).residuals.of("x", 1)[:] = 9
        load_residual_state_dict(again, saved)
        found = {name: array.tolist() for name, array in residual_state_dict(again).items()}
        assert found == {"0/g/0": [3, 3], "1/x": [0], "2/h/0": [4]}
        with pytest.raises(ConfigError, match="with 3 or more trainable variables, and this one has 2"):
            load_residual_state_dict(again[:2], saved)
        load_residual_state_dict([Variable()], {})


class TestAutomaticChoice:
    def test_ranks_choose_alike_although_their_reductions_differ(self, alike):
        """A rank may lack gradients, or all of a step's; it may have divided a bucket."""

        def run(context):
            chooses = AutoCompression(global_process_set)
            for step in range(STEPS + 1):
                for _ in range(0 if step == 2 and context.rank == 1 else 1 + context.rank):
                    chooses.submitting(1000.0)
                chooses.finished(2000 + context.rank, time.perf_counter())
            return [np.array([*chooses.choice.steps_s.values()])]

        assert alike(run)


# ---- averages of metrics -------------------------------------------------------------------------


@pytest.fixture
def on_three(ranks_of):
    """Runs a function on three ranks, with ``api`` as in a process of its own; the results in rank order."""
    # Threads that other tests have left might still call something, so that only a stall is certain.
    settings = Settings(late_after_s=5.0, spin_us=0.0)
    return lambda function: ranks_of(3, lambda context: function(context.rank), settings=settings)


def test_numbers_are_averaged_and_the_rest_is_left_out(on_three):
    def metrics(rank):
        numbers = {"loss": np.float32(rank), "acc": rank == 0, "lr": 0.5}
        return {**numbers, "name": "a", "all": np.zeros(2), "no": None}

    found = on_three(lambda rank: averaged(metrics(rank)))
    assert found == [{"acc": pytest.approx(1 / 3), "loss": 1.0, "lr": 0.5}] * 3


def test_what_was_trained_is_weighted_by_samples(on_three):
    """Those of validation are not: every rank validates on the same."""
    samples = [1, 2, 5]
    both = ("loss", "val_loss")
    found = on_three(lambda rank: averaged(dict.fromkeys(both, float(rank)), samples=samples[rank]))
    assert found == [{"loss": pytest.approx(12 / 8), "val_loss": 1.0}] * 3
    assert list(on_three(lambda rank: averaged({"loss": 1.0}, samples=rank))[0]) == ["loss"]


def test_ranks_with_different_metrics_get_an_error(on_three):
    def work(rank):
        with pytest.raises(MismatchError, match="metrics"):
            averaged({"loss": 1.0} if rank else {"loss": 1.0, "acc": 0.5})
        return "refused"

    assert on_three(work) == ["refused"] * 3


def test_one_rank_has_nothing_to_average():
    assert averaged({}) == {}
