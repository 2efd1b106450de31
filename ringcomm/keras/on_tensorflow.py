"""Gradients of Keras on TensorFlow."""

from __future__ import annotations

from typing import Any, List, Sequence

from .._tensorflow.gradients import GradientReducer
from .reduction_options import How


def reduce(how: How, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """See :func:`.backends.reduce`."""
    reducer = GradientReducer(how.compression, how.sparse_as_dense, groups=how.groups)
    reducer.how = how.reduction
    return reducer.reduce(gradients, variables, "keras")
