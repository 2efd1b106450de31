"""The training that all frameworks have in common, by TensorFlow 2."""

from __future__ import annotations

import tensorflow as tf

import ringcomm.tensorflow as hvd
from tests.adapters import digits


def check_tensorflow_has_the_loss_curve_of_one_process() -> None:
    weights = [
        tf.Variable(array, name=f"digits{place}") for place, array in enumerate(digits.weights(hvd.rank()))
    ]
    hvd.broadcast_variables(weights, root_rank=0)
    momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        first, bias, second, bias_2 = weights
        with tf.GradientTape() as tape:
            scores = tf.nn.relu(images @ first + bias) @ second + bias_2
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, momentum, gradient in zip(weights, momenta, gradients):
            momentum.assign(digits.MOMENTUM * momentum - digits.LEARNING_RATE * gradient)
            weight.assign_add(momentum)
        return hvd.allreduce(loss)

    losses = []
    for number in range(digits.STEPS):
        images, labels = digits.samples(number, hvd.rank(), hvd.size())
        losses.append(float(step(tf.constant(images), tf.constant(labels))))
    digits.same_curve(losses)
