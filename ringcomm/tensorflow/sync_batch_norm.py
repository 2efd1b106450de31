"""Batch normalization over the batches of all ranks, as if they were one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._adapter.gradients import Reduction
from .._tensorflow import bridge
from ..ops import ReduceOp
from ..process_set import ProcessSet, global_process_set
from . import flow


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Like ``keras.layers.BatchNormalization``, with the mean and variance of all ranks' batches together.

    For Keras on TensorFlow. Batches may differ in size.

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
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> Any:
        """What Keras normalizes with while it trains."""
        if self._process_set.size() == 1:
            return super()._moments(inputs, mask)
        how = Reduction(ReduceOp.SUM, 1.0, 1.0, self._process_set)
        weights = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)[..., None]
        axes = self._reduction_axes
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        count, total = flow.reduce(
            how,
            bridge.name_of(None, "sync_batch_norm.mean", [inputs]),
            [tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)],
        )
        count = tf.stop_gradient(count)
        mean = tf.math.divide_no_nan(total, count)
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        # From the common mean, in a second exchange: a difference of two large sums would lose digits.
        deviations = tf.square(inputs - tf.reshape(mean, shape)) * weights
        (squares,) = flow.reduce(
            how,
            bridge.name_of(None, "sync_batch_norm.variance", [inputs]),
            [tf.reduce_sum(deviations, axes)],
        )
        return mean, tf.math.divide_no_nan(squares, count)
