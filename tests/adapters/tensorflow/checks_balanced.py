"""What every rank checks about balanced data in TensorFlow: training equals that of one process."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm.balance.plan import SampleDivision
from tests.adapters.jobs import same_everywhere

COUNT, GLOBAL_BATCH, EPOCHS = 70, 16, 2
SHARES = {1: [1], 2: [3, 1], 3: [3, 0, 1], 4: [5, 0, 1, 1]}


def start() -> List[Any]:
    draw = np.random.default_rng(3)
    return [tf.Variable(draw.normal(size=shape) * 0.3) for shape in ((6, 8), (8, 1))]


def gradients(tape_class: Any, weights: Any, x: Any, y: Any, **options: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]) - y))
    return tape_class(tape, **options).gradient(loss, weights)


def check_tapes_eagerly_and_in_functions() -> None:
    inputs = np.random.default_rng(2).normal(size=(COUNT, 6))
    targets = np.sin(inputs).sum(1, keepdims=True)
    division = SampleDivision(COUNT, GLOBAL_BATCH, 4)
    for compiled, kind in ((True, hvd.DistributedGradientTape), (False, hvd.PartialDistributedGradientTape)):
        for make in (lambda: tf.keras.optimizers.SGD(0.05, 0.9), lambda: tf.keras.optimizers.Adam(0.01)):
            alone, weights = (start(), make()), (start(), make())
            for epoch in range(EPOCHS):
                for step in range(division.steps):
                    rows = division.batch(epoch, step)
                    found = gradients(lambda tape: tape, alone[0], inputs[rows], targets[rows])
                    alone[1].apply_gradients(zip(found, alone[0]))
            data = hvd.BalancedDataset(inputs, targets, global_batch=GLOBAL_BATCH, seed=4,
                                       speeds=SHARES[hvd.size()])  # fmt: skip
            computed: Any = lambda x, y: gradients(kind, weights[0], x, y, batches=data)  # noqa: B023, E731
            computed = tf.function(computed) if compiled else computed
            for _ in range(EPOCHS):
                for x, y in data:
                    weights[1].apply_gradients(zip(computed(x, y), weights[0]))
            for found, expected in zip(weights[0], alone[0]):
                np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12, atol=1e-13)
                same_everywhere(found.numpy())
            assert data.state_dict()["epoch"] == EPOCHS
