"""Reduce Keras gradients on the JAX backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax

from .._adapter.gradients import group_name
from .._adapter.graph_callbacks import state_of
from .._adapter.reduction import VariableReducer
from ..jax import training


class GradientReducer(VariableReducer):
    """Reduce gradients that are JAX arrays; JAX runs collectives in program order."""

    def reduce_shared(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any],
        scope: str = "gradients", *args: Any,
    ) -> List[Any]:  # fmt: skip
        """Reduce gradients of variables that all ranks have."""
        name = group_name(variables, scope, absent)
        reducer = training.GradientReducer(self.how, state_of([*variables, *absent][0]), name)
        results: List[Any] = reducer(list(gradients))
        return results


def wait_for_reductions() -> None:
    """Wait for the callbacks of all steps so far: they count steps and weigh gradients."""
    jax.effects_barrier()
