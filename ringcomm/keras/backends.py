"""The reducers of Keras gradients, by backend."""

from __future__ import annotations

from importlib import import_module
from typing import Type

import keras

from .._adapter.reduction import VariableReducer


def reducer_class() -> Type[VariableReducer]:
    """Return the backend's reducer, which submits all gradients before it waits for any.

    NotImplementedError: there is no adapter for the backend.
    """
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "torch", "jax"):
        raise NotImplementedError(
            f"The backend of Keras is {backend}; gradients can be reduced on tensorflow, torch and jax."
        )
    found: Type[VariableReducer] = import_module(f".on_{backend}", __package__).Reducer
    return found


def wait_for_reductions() -> None:
    """Wait until all steps so far have been reduced. Only JAX runs ahead of its computations."""
    if keras.backend.backend() == "jax":
        from .on_jax import wait_for_reductions as wait

        wait()
