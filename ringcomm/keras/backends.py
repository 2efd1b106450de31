"""Reduces Keras gradients on the present backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import keras

from .._adapter.reduction import Reduction


def reduce(how: Reduction, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients over all ranks; all are submitted before any is waited for.

    Args:
        the reduction.
        gradients: tensors of the backend; none may be None.
        variables: the Keras variables, in the same order; their names match gradients between ranks.

    Returns:
        the reduced gradients, in the same order.

    Raises:
        NotImplementedError: there is no adapter for the backend.
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
            f"The backend of Keras is {backend}; gradients can be reduced on tensorflow, torch and jax."
        )
    return run(how, gradients, variables)


def wait_for_reductions() -> None:
    """Wait until all steps so far have been reduced. Only JAX runs ahead of its computations."""
    if keras.backend.backend() == "jax":
        from .on_jax import wait_for_reductions as wait

        wait()
