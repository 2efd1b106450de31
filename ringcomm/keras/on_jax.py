"""Reduces Keras gradients on the JAX backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax

from .._adapter.compressed import state_of
from .._adapter.names import group_name
from .._adapter.reduction import Reduction
from ..jax.gradients import GradientReducer


def reduce(how: Reduction, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (JAX arrays) over all ranks; JAX runs collectives in program order."""
    name = group_name(variables, "keras")
    reducer = GradientReducer(how, state_of(variables[0]), name)
    results: List[Any] = reducer(list(gradients))
    return results


def wait_for_reductions() -> None:
    """Wait for the callbacks of all steps so far: they count steps and weigh gradients."""
    jax.effects_barrier()
