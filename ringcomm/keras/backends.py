"""What each backend of Keras needs: how gradients are reduced, and what numbers compile to."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence

import keras

from .._adapter.gradients import Groups, Reduction


class How(NamedTuple):
    """How gradients are reduced.

    Attributes:
        reduction: how they become one.
        compression: ``"none"``, ``"fp16"`` or ``"bf16"``, or on TensorFlow what its adapter takes.
        sparse_as_dense: make ``tf.IndexedSlices`` dense.
        groups: which ones travel together.
    """

    reduction: Reduction
    compression: Any
    sparse_as_dense: bool
    groups: Groups


def reduce(how: How, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """The gradients of all ranks as one, all submitted before any is waited for; none may be None.

    Raises:
        NotImplementedError: no adapter knows the backend.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from .on_tensorflow import reduce as run
    elif backend == "torch":
        from .on_torch import reduce as run
    elif backend == "jax":
        from .on_jax import reduce as run
    else:
        raise NotImplementedError(
            f"Keras runs on {backend} here; gradients can be reduced on tensorflow, torch and jax."
        )
    return run(how, gradients, variables)
