"""What every rank checks about weighted averages of TensorFlow tensors: values, gradients, weight 0."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
import ringcomm.tensorflow.keras as hvd_keras
from tests.adapters.jobs import close, numbers, same_everywhere


def weights() -> List[float]:
    return [3.0 + rank for rank in range(hvd.size() - 1)] + [0.0 if hvd.size() > 1 else 3.0]


def own() -> np.ndarray:
    array = numbers(hvd.rank(), (4, 5), np.float64, 3)
    return array if weights()[hvd.rank()] else np.full_like(array, np.nan)


def average() -> np.ndarray:
    parts = [weight * numbers(rank, (4, 5), np.float64, 3) for rank, weight in enumerate(weights())]
    return sum(parts) / sum(weights())


def check_eagerly_and_in_functions() -> None:
    weight = weights()[hvd.rank()]
    close(hvd.allreduce(own(), weight=weight), average())
    close(hvd_keras.allreduce(own(), weight=weight), average())
    for item in hvd.grouped_allreduce([own(), own()], weight=weight):
        close(item, average())

    @tf.function
    def reduced(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(tensor, weight=weight, name="in a function")

    for factor in (1.0, 5.0):  # the weight is a tensor, not part of the function
        result = reduced(tf.constant(own()), tf.constant(factor * weight))
        close(result, average())
        same_everywhere(result.numpy())


def check_gradients_flow_through_it() -> None:
    weight = weights()[hvd.rank()]
    given = tf.Variable(numbers(hvd.rank(), (4, 5), np.float64, 3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allreduce(given, weight=weight, name="loss") * (1.0 + hvd.rank()))
    share = weight / sum(weights()) * sum(1.0 + rank for rank in range(hvd.size()))
    close(tape.gradient(loss, given), np.full((4, 5), share))


def check_uneven_rows() -> None:
    """The last rank gets all rows but one of each other rank; gradients come back weighted."""
    size, rank, weight = hvd.size(), hvd.rank(), weights()[hvd.rank()]
    splits = [1] * (size - 1) + [5 - size]
    first = rank if rank < size - 1 else size - 1

    def scattered(given: tf.Tensor, weight: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            rows = hvd.reducescatter(given, splits=splits, weight=weight, name="uneven")
            loss = tf.reduce_sum(rows * (1.0 + rank))
        return rows, tape.gradient(loss, given)

    given = tf.constant(numbers(rank, (4, 5), np.float64, 3))
    for function in (scattered, tf.function(scattered)):
        rows, gradient = function(given, tf.constant(weight, tf.float64))
        close(rows, average()[first : first + splits[rank]])
        factors = np.repeat(np.arange(1.0, size + 1), splits)[:, np.newaxis] * np.ones((4, 5))
        close(gradient, weight * size / sum(weights()) * factors)
