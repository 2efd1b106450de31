"""Compressed reductions on arrays, between ranks that are threads: what is sent how, and what is fed back."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter import compressed
from ringcomm._adapter.choice import STEPS, AutoCompression
from ringcomm._adapter.compressed import (
    CompressionState,
    drop_residuals,
    load_residual_state_dict,
    residual_state_dict,
    state_of,
)
from ringcomm._adapter.compression import Compression, NoneCompressor
from ringcomm._adapter.graph_callbacks import Operation
from ringcomm._adapter.reduction import Reduction
from ringcomm.balance.step_weight import StepWeight
from ringcomm.calls.process_set import global_process_set
from ringcomm.errors import ConfigError
from ringcomm.ops import ReduceOp

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


class TestWhatIsSentHow:
    def test_a_single_reduction_is_divided(self):
        def executed(compression, op):
            return how(op, compression=compression).prepared([])[0].compression

        assert executed("int8", ReduceOp.SUM) is Compression.int8
        assert executed(Compression.int8, ReduceOp.MIN) is NoneCompressor
        assert executed("bf16", ReduceOp.SUM) is executed(None, ReduceOp.SUM) is NoneCompressor
        with pytest.raises(ConfigError, match="'int7'"):
            executed("int7", ReduceOp.SUM)
        given = np.array([1.0, -2.5], np.float32)
        _, (sent,), restore = how(compression="fp16").prepared([given])
        (received,) = restore([sent])
        assert (sent.dtype, received.dtype) == (np.float16, np.float32) and (received == given).all()


class TestAllreduce:
    def test_gradients_of_a_model(self, alike):
        """The matrix is coarse, the vector is sent as bfloat16."""
        matrix, vector = alike(lambda context: reduce(context, Compression.int8, state=CompressionState()))
        assert 1e-4 < np.abs(matrix - mean(MATRIX)).max() < 0.1
        assert np.abs(vector - mean(VECTOR)).max() < 0.02
        assert matrix.shape == MATRIX and vector.shape == VECTOR

    def test_single_arrays_are_sent_with_the_codec_itself(self, alike):
        (coarse,) = alike(lambda context: reduce(context, Compression.int4, [VECTOR]))
        (finer,) = alike(lambda context: reduce(context, Compression.int8, [VECTOR]))
        errors = [np.abs(found - mean(VECTOR)).max() for found in (coarse, finer)]
        assert errors[0] > 4 * errors[1] > 0

    def test_what_does_not_add_is_not_compressed(self, alike):
        lowest = how(ReduceOp.MIN)
        (least,) = alike(lambda context: reduce(context, Compression.int8, [MATRIX], None, lowest))
        expected = np.min([numbers(rank, MATRIX) for rank in range(SIZE)], axis=0)
        assert least.tobytes() == expected.tobytes()

    def test_the_last_array_may_be_the_weight(self, alike):
        def run(context):
            operation = allreduce(Compression.int8, 2, has_weight=True)
            return operation.start([numbers(context.rank, VECTOR), np.float64(context.rank)]).wait()

        (found,) = alike(run)
        expected = (numbers(1, VECTOR) + 2.0 * numbers(2, VECTOR)) / 3.0
        assert np.abs(found - expected).max() < 0.1

    def test_a_step_has_a_weight(self, alike):
        class Weight(StepWeight):
            def __init__(self, number):
                self.number = number

            def now(self):
                return self.number

        def run(context):
            weighted = how(weight=Weight(float(context.rank == 1)))
            return reduce(context, Compression.int8, [VECTOR], None, weighted)

        (found,) = alike(run)
        assert np.abs(found - numbers(1, VECTOR)).max() < 0.1

    def test_a_thread_may_sleep_until_all_has_ended(self, alike):
        def run(context):
            operation = allreduce(Compression.int8, 1)
            if context.rank:
                context.barrier()
            pending = operation.start([numbers(context.rank, MATRIX)])
            if not context.rank:
                assert not pending.handles[0].block(0.0), "the others have not come yet"
                context.barrier()
            pending.attend()
            return pending.wait()

        alike(run)


class TestErrorFeedback:
    def test_what_was_delivered_and_the_residuals_are_all_gradients(self, alike):
        kept = []

        def run(context):
            state = CompressionState()
            kept.append(state.residuals)
            operation = allreduce(Compression.int4, 1, state)
            return [
                operation.start([numbers(context.rank, MATRIX, step)]).wait()[0].copy() for step in range(4)
            ]

        delivered = alike(run)
        left = np.sum([item.of("g/0", 80 * 70) for item in kept], axis=0, dtype=np.float64).reshape(MATRIX)
        assert np.abs(left).max() > 0.1
        true = sum(SIZE * mean(MATRIX, step) for step in range(4))
        assert np.abs(SIZE * np.sum(delivered, axis=0, dtype=np.float64) + left - true).max() < 1e-3

    def test_a_state_belongs_to_an_object_as_long_as_that_exists(self):
        variable = Variable()
        key = id(variable)
        state = state_of(variable)
        assert state_of(variable) is state and key in compressed._states
        del variable
        gc.collect()
        assert key not in compressed._states

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

    def test_dropping(self, caplog):
        model = [Variable(), Variable()]
        state_of(model[0]).residuals.of("g/0", 2)[:] = 3
        with caplog.at_level("INFO"):
            drop_residuals(model, "a state was loaded")
        assert [record.getMessage() for record in caplog.records] == [
            "error feedback of 1 parameters is dropped: a state was loaded"
        ]
        assert not state_of(model[0]).residuals.of("g/0", 2).any()


class TestAutomaticChoice:
    def test_the_first_one_of_a_model_stays(self):
        state = CompressionState()
        assert state.auto(Compression.int8) is None
        first, second = AutoCompression(global_process_set), AutoCompression(global_process_set)
        assert state.auto(first) is first and state.auto(second) is first
        assert state.auto(Compression.int8) is None

    def test_it_is_told_of_every_step(self, alike):
        def run(context):
            state, chooses = CompressionState(), AutoCompression(global_process_set)
            for _ in range(3):
                found = reduce(context, chooses, state=state)
            assert len(chooses._steps) == 2, "the first step is not timed"
            ((_, nbytes),) = chooses._steps[-1].arrivals
            assert nbytes == 4 * (80 * 70 + 50)
            return found

        matrix, _ = alike(run)
        assert np.abs(matrix - mean(MATRIX)).max() < 1e-6, "nothing is compressed before the choice"

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


class TestReducescatter:
    def test_every_rank_gets_its_rows(self, ranks_of):
        def run(context):
            operation = Operation("reducescatter", how(compression=Compression.int8), "g", 2)
            return operation.start([numbers(context.rank, MATRIX), numbers(context.rank, VECTOR)]).wait()

        results = ranks_of(SIZE, run)
        for place, shape in enumerate((MATRIX, VECTOR)):
            parts = [result[place] for result in results]
            rows = [len(part) for part in parts]
            assert sum(rows) == shape[0] and max(rows) - min(rows) <= 1 and rows[0] == max(rows)
            assert np.abs(np.concatenate(parts) - mean(shape)).max() < 0.1


def test_an_operation_that_fails_is_raised_when_all_have_ended(ranks_of):
    def run(context):
        shape = MATRIX if context.rank else (81, 70)
        pending = allreduce(Compression.int8, 2, CompressionState()).start(
            [numbers(context.rank, shape), numbers(context.rank, VECTOR)]
        )
        with pytest.raises(rc.MismatchError):
            pending.wait()
        return all(handle.block(0.0) for handle in pending.handles)

    assert ranks_of(SIZE, run) == [True] * SIZE
