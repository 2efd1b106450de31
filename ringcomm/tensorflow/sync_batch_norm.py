"""Batch normalization over the batches of all ranks, as if they were one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._adapter.gradients import Reduction
from .._tensorflow import bridge
from ..ops import ReduceOp
from ..process_set import ProcessSet, global_process_set
from . import flow

_KERAS_2 = tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Like ``keras.layers.BatchNormalization``, with the mean and variance of all ranks' batches together.

    For Keras on TensorFlow, and ``tf_keras``. Batches may differ in size.

    Args:
        fused: False; Horovod's scripts say so, and Keras 3 knows nothing else.
        process_set: the ranks whose batches belong together.
        kwargs: those of ``keras.layers.BatchNormalization``.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if _KERAS_2:
            kwargs["fused"] = False  # or images are normalized in one operation, without _moments()
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, *details: Any, **named: Any) -> Any:
        """What Keras normalizes with while it trains.

        Args:
            details, named: of Keras 3 the mask; of Keras 2 the axes, whether to keep them, and the mask.
        """
        if self._process_set.size() == 1:
            return super()._moments(inputs, *details, **named)
        if not _KERAS_2:
            return self._common_moments(inputs, self._reduction_axes, *details, **named)
        axes, keep_dims, mask = _asked_by_keras_2(*details, **named)
        moments = self._common_moments(inputs, axes, mask)
        return [tf.reshape(moment, _lengths(inputs, axes)) for moment in moments] if keep_dims else moments

    def _common_moments(self, inputs: Any, axes: Any, mask: Any) -> Any:
        how = Reduction(ReduceOp.SUM, 1.0, 1.0, self._process_set)
        weights = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)[..., None]
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        count, total = flow.reduce(
            how,
            bridge.name_of(None, "sync_batch_norm.mean", [inputs]),
            [tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)],
        )
        count = tf.stop_gradient(count)
        mean = tf.math.divide_no_nan(total, count)
        # From the common mean, in a second exchange: a difference of two large sums would lose digits.
        deviations = tf.square(inputs - tf.reshape(mean, _lengths(inputs, axes))) * weights
        (squares,) = flow.reduce(
            how,
            bridge.name_of(None, "sync_batch_norm.variance", [inputs]),
            [tf.reduce_sum(deviations, axes)],
        )
        return mean, tf.math.divide_no_nan(squares, count)


def _asked_by_keras_2(reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
    return reduction_axes, keep_dims, mask


def _lengths(inputs: Any, reduced: Any) -> Any:
    """The shape of moments that is broadcast against the inputs."""
    return [1 if axis in reduced else inputs.shape[axis] for axis in range(inputs.shape.rank)]
