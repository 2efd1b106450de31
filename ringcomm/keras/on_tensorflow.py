"""Reduces Keras gradients on the TensorFlow backend."""

from __future__ import annotations

from typing import Any, List, Sequence

from .._adapter.reduction import Reduction
from .._tensorflow.gradients import GradientReducer


def reduce(how: Reduction, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (TensorFlow tensors or ``tf.IndexedSlices``) over all ranks."""
    return GradientReducer(how).reduce(gradients, variables, "keras")
