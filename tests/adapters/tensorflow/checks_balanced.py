"""What every rank checks about balanced data in TensorFlow: training equals that of one process."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm.balance.division import SampleDivision
from tests.adapters.jobs import same_everywhere

COUNT, GLOBAL_BATCH, EPOCHS = 70, 16, 2
SHARES = {1: [1], 2: [3, 1], 3: [3, 0, 1], 4: [5, 0, 1, 1]}


def data() -> Any:
    draw = np.random.default_rng(2)
    inputs = draw.normal(size=(COUNT, 6))
    return inputs, np.sin(inputs).sum(1, keepdims=True)


def start() -> List[Any]:
    draw = np.random.default_rng(3)
    return [tf.Variable(draw.normal(size=shape) * 0.3) for shape in ((6, 8), (8, 1))]


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]) - y))


def alone(optimizer: Any) -> List[Any]:
    weights, division, (inputs, targets) = start(), SampleDivision(COUNT, GLOBAL_BATCH, 4), data()
    for epoch in range(EPOCHS):
        for step in range(division.steps):
            rows = division.batch(epoch, step)
            with tf.GradientTape() as tape:
                loss = loss_of(weights, inputs[rows], targets[rows])
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return [item.numpy() for item in weights]


def sgd() -> Any:
    return tf.keras.optimizers.SGD(0.05)


def momentum() -> Any:
    return tf.keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return tf.keras.optimizers.Adam(0.01)


def check_tapes_eagerly_and_in_functions() -> None:
    for compiled, distributed in (
        (False, hvd.DistributedGradientTape), (True, hvd.DistributedGradientTape),
        (False, hvd.PartialDistributedGradientTape),
    ):  # fmt: skip
        for make in (sgd, momentum, adam):
            weights, optimizer = start(), make()
            batches = hvd.BalancedDataset(*data(), global_batch=GLOBAL_BATCH, seed=4,
                                          speeds=SHARES[hvd.size()])  # fmt: skip

            def gradients(
                x: Any, y: Any, weights: Any = weights, batches: Any = batches, distributed: Any = distributed
            ) -> Any:
                with tf.GradientTape() as tape:
                    loss = loss_of(weights, x, y)
                return distributed(tape, batches=batches).gradient(loss, weights)

            computed = tf.function(gradients) if compiled else gradients
            for _ in range(EPOCHS):
                for x, y in batches:
                    optimizer.apply_gradients(zip(computed(x, y), weights))
            for found, expected in zip(weights, alone(make())):
                np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-13)
                same_everywhere(found.numpy())
            assert batches.state_dict()["epoch"] == EPOCHS
