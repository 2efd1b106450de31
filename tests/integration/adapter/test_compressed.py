"""Compressed reductions on arrays, between ranks that are threads: what is sent how, and what is fed back."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ringcomm._adapter.compression import STEPS, AutoCompression, Compression, NoneCompressor
from ringcomm._adapter.graph_callbacks import (
    CompressionState,
    Operation,
    load_residual_state_dict,
    residual_state_dict,
    state_of,
)
from ringcomm._adapter.reduction import Reduction
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
