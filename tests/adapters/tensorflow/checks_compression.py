"""What every rank checks about compressed gradients: same bits, and error feedback in every mode."""

from __future__ import annotations

from typing import Any, List
from unittest import mock

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm._adapter import choice
from tests.adapters.jobs import same_everywhere

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
    for compression, coarse in (("int8", 0.03), (hvd.Compression.int4, 0.8), (hvd.PowerSGD(4), 3.0)):
        for graph in (False, True):
            for op in (hvd.Average, hvd.Sum):
                error = np.abs(delivered_by(compression, op, graph) - true).max()
                # What remains is one step's loss, not the sum of all steps'.
                assert error < 3 * coarse * np.abs(single).max(), (compression, graph, op, error)
                assert hvd.size() == 1 or error > 1e-5, compression


def check_an_optimizer_trains() -> None:
    for compression in ("int8", hvd.PowerSGD(2)):
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
