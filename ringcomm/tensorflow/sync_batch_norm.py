"""Batch normalization with the statistics of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._adapter.reduction import Reduction
from .._tensorflow import bridge
from ..calls.process_set import ProcessSet, global_process_set, size_of
from ..docstrings import documented
from ..ops import ReduceOp
from . import flow

_KERAS_2 = tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


@documented
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalization layer that computes mean and variance over the batches of all ranks.

    For Keras 3 on TensorFlow and for ``tf_keras``. Inputs have the shapes and dtypes of
    ``keras.layers.BatchNormalization``; batch sizes may differ between ranks. A forward pass in training
    performs two allreduces.

    Args:
        fused: must be False; accepted because Horovod's class has it.
        {process_set}
        kwargs: arguments of ``keras.layers.BatchNormalization``, such as ``axis`` and ``momentum``.

    Raises:
        ValueError: ``fused`` is True or None.
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
        """Return the mean and variance that Keras normalizes with during training.

        ``details`` are in Keras 3 the mask; in Keras 2 the axes, whether to keep them, and the mask.
        """
        if size_of(self._process_set) == 1:
            return super()._moments(inputs, *details, **named)
        if not _KERAS_2:
            return self._common_moments(inputs, self._reduction_axes, *details, **named)
        axes, keep_dims, mask = _keras_2_arguments(*details, **named)
        moments = self._common_moments(inputs, axes, mask)
        return [tf.reshape(moment, _lengths(inputs, axes)) for moment in moments] if keep_dims else moments

    def _common_moments(self, inputs: Any, axes: Any, mask: Any) -> Any:
        how = Reduction(ReduceOp.SUM, process_set=self._process_set)
        weights = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)[..., None]
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        count, total = flow.reduce(
            how,
            bridge.name_of(None, "sync_batch_norm.mean", [inputs]),
            [tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)],
        )
        count = tf.stop_gradient(count)
        mean = tf.math.divide_no_nan(total, count)
        # Deviations from the common mean, in a second allreduce: a difference of large sums loses precision.
        deviations = tf.square(inputs - tf.reshape(mean, _lengths(inputs, axes))) * weights
        (squares,) = flow.reduce(
            how,
            bridge.name_of(None, "sync_batch_norm.variance", [inputs]),
            [tf.reduce_sum(deviations, axes)],
        )
        return mean, tf.math.divide_no_nan(squares, count)


def _keras_2_arguments(reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
    return reduction_axes, keep_dims, mask


def _lengths(inputs: Any, reduced: Any) -> Any:
    """Return the shape in which moments broadcast against the inputs."""
    return [1 if axis in reduced else inputs.shape[axis] for axis in range(inputs.shape.rank)]
