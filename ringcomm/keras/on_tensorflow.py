"""Reduces Keras gradients on the TensorFlow backend."""

from __future__ import annotations

from typing import Any, List, Sequence

from .._tensorflow.gradients import GradientReducer
from .reduction_options import How


def reduce(how: How, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (TensorFlow tensors or ``tf.IndexedSlices``) over all ranks."""
    reducer = GradientReducer(how.compression, how.sparse_as_dense, groups=how.groups)
    reducer.how = how.reduction
    return reducer.reduce(gradients, variables, "keras")
