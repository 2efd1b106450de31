"""Reduce Keras gradients on the TensorFlow backend."""

from __future__ import annotations

from typing import Any, List, Sequence

from .._tensorflow.gradients import GradientReducer


class Reducer(GradientReducer):
    """Reduce gradients that are TensorFlow tensors or ``tf.IndexedSlices``."""

    def reduce_shared(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        absent: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> List[Any]:
        """Reduce gradients of variables that all ranks have."""
        return super().reduce_shared(gradients, variables, absent, "keras")
