"""What every rank checks about compressed gradients: same bits, and error feedback in every mode."""

from __future__ import annotations

from typing import Any, List
from unittest import mock

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm._adapter import choice
from tests.adapters.jobs import same_everywhere
from tests.support.errors import raises

SHAPE = (80, 70)
STEPS = 8


def gradient(step: int, rank: int) -> Any:
    return np.random.default_rng((step, rank)).standard_normal(SHAPE).astype(np.float32)


def delivered_by(compression: Any, op: Any, graph: bool) -> Any:
    """The sum of what a tape has delivered for given gradients, with a new tape for every step."""
    variable, bias = tf.Variable(tf.zeros(SHAPE)), tf.Variable(tf.zeros(9))

    def compute(given: tf.Tensor) -> List[Any]:
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(variable * given) + tf.reduce_sum(bias) * (hvd.rank() + 1.0)
        tape = hvd.DistributedGradientTape(plain, compression=compression, op=op)
        found: List[Any] = tape.gradient(loss, [variable, bias])
        return found

    step_of = tf.function(compute) if graph else compute
    total = np.zeros(SHAPE)
    for step in range(STEPS):
        weight, small = step_of(tf.constant(gradient(step, hvd.rank())))
        same_everywhere(weight.numpy())
        expected = sum(range(1, hvd.size() + 1)) / (hvd.size() if op == hvd.Average else 1)
        assert np.allclose(small, expected, rtol=0.02)
        total += weight.numpy() * (hvd.size() if op == hvd.Average else 1)
    return total


def check_gradients_are_fed_back_in_every_mode() -> None:
    true = np.sum(
        [[gradient(step, rank) for step in range(STEPS)] for rank in range(hvd.size())], axis=(0, 1)
    )
    single = np.sum([gradient(0, rank) for rank in range(hvd.size())], axis=0)
    for compression, coarse in (("int8", 0.03), (hvd.Compression.int4, 0.8)):
        for graph in (False, True):
            for op in (hvd.Average, hvd.Sum):
                error = np.abs(delivered_by(compression, op, graph) - true).max()
                # What remains is one step's loss, not the sum of all steps'.
                assert error < 3 * coarse * np.abs(single).max(), (compression, graph, op, error)
                assert hvd.size() == 1 or error > 1e-5, compression


def check_single_tensors_with_every_codec() -> None:
    """In eager mode and in graphs: results, gradients, rows, and slices, which are gathered as they are."""
    own = [gradient(0, rank) for rank in range(hvd.size())]
    total, mine = np.sum(own, axis=0), tf.constant(own[hvd.rank()])
    rows = np.array_split(total, hvd.size())[hvd.rank()]
    for compression, close in (("bf16", 0.05), (hvd.Compression.int8, 0.15), ("int4", 2.5),
                               (None, 1e-5)):  # fmt: skip

        def reduced(given: Any, compression: Any = compression) -> List[Any]:
            with tf.GradientTape() as tape:
                tape.watch(given)
                found = hvd.allreduce(given, op=hvd.Sum, compression=compression)
                loss = tf.reduce_sum(found)
            part = hvd.reducescatter(given, op=hvd.Sum, compression=compression)
            return [found, tape.gradient(loss, given), part]

        for run in (reduced, tf.function(reduced)):
            found, slope, part = (item.numpy() for item in run(mine))
            same_everywhere(found)
            assert np.abs(found - total).max() < close, compression
            assert np.allclose(slope, hvd.size(), rtol=0.02)
            assert part.shape == rows.shape and np.abs(part - rows).max() < close
            assert hvd.size() == 1 or compression is None or (found != total).any(), compression
        slices = tf.IndexedSlices(mine, tf.range(SHAPE[0]), SHAPE)
        gathered = hvd.allreduce(slices, op=hvd.Sum, compression=compression).values.numpy()
        assert gathered.shape[0] == SHAPE[0] * hvd.size()
    weighted = hvd.allreduce(mine, compression="int8", weight=hvd.rank() + 1.0).numpy()
    exact = np.average(own, axis=0, weights=[rank + 1.0 for rank in range(hvd.size())])
    assert np.abs(weighted - exact).max() < 0.15


def check_residuals_are_saved_and_loaded() -> None:
    """A run that goes on with saved residuals has the same bits as one that was not interrupted."""
    if hvd.size() == 1:
        return

    def steps(variables: Any, first: int, last: int) -> Any:
        for step in range(first, last):
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(variables[0] * gradient(step, hvd.rank())) + tf.reduce_sum(variables[1])
            tape = hvd.DistributedGradientTape(plain, compression="int4")
            slopes = tape.gradient(loss, variables)
        return slopes[0].numpy()

    def made() -> Any:
        return [tf.Variable(tf.zeros(SHAPE), name="w"), tf.Variable(tf.zeros(9), name="b")]

    first = made()
    assert hvd.residual_state_dict(first) == {}
    steps(first, 0, 3)
    saved = hvd.residual_state_dict(first)
    assert len(saved) == 1 and max(np.abs(item).max() for item in saved.values()) > 1e-3
    whole, second, third = steps(first, 3, 5), made(), made()
    hvd.load_residual_state_dict(second, saved)
    assert steps(second, 3, 5).tobytes() == whole.tobytes() != steps(third, 3, 5).tobytes()
    hvd.load_residual_state_dict(second, {})
    assert not any(item.any() for item in hvd.residual_state_dict(second).values())
    words = "of a model with 2 or more trainable variables, and this one has 1"
    raises(ValueError, lambda: hvd.load_residual_state_dict(first[:1], {"1/w": np.ones(3)}), words)


def check_an_optimizer_trains() -> None:
    for compression in ("int8", "int4"):
        tf.random.set_seed(1)
        variable = tf.Variable(tf.ones((64, 64)))
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.5), compression=compression)
        for _ in range(8):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(variable - float(hvd.rank()))) * 1000
            optimizer.apply([tape.gradient(loss, variable)], [variable])
        same_everywhere(variable.numpy())
        target = (hvd.size() - 1) / 2
        assert np.abs(variable.numpy() - target).max() < 0.3 + abs(1 - target) / 2, compression


def check_the_choice_is_made_for_all_ranks() -> None:
    """With a new tape for every step; links that are slow in the prediction alone."""
    variable = tf.Variable(tf.zeros(SHAPE))
    slow = choice.Links(hvd.size(), 1, 1e-3, 1e-3)
    with mock.patch.object(choice, "links_of", lambda *ignored: slow):
        for step in range(choice.STEPS + 4):
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(variable * gradient(step, hvd.rank()))
            tape = hvd.DistributedGradientTape(plain, compression="auto")
            (found,) = tape.gradient(loss, [variable])
            same_everywhere(found.numpy())
    if hvd.size() > 1:
        exact = np.mean([gradient(step, rank) for rank in range(hvd.size())], axis=0)
        assert 1e-5 < np.abs(found.numpy() - exact).max() < 0.1, "int8 was not chosen"
