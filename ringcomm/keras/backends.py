"""Gradients of Keras on whatever backend it has."""

from __future__ import annotations

from typing import Any, List, Sequence

import keras

from .reduction_options import How


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
