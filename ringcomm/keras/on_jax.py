"""Reduces Keras gradients on the JAX backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax
import numpy as np
from jax.experimental import io_callback

from .._adapter import graph_callbacks
from .._adapter.compressed import is_coded
from .._adapter.names import group_name
from .reduction_options import How, compressed


def reduce(how: How, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (JAX arrays) over all ranks in one ordered host callback.

    JAX runs ordered callbacks one after another in program order, which is the same on all ranks.
    """
    name = group_name(variables, "keras")
    if is_coded(how.compression):
        return _callback(compressed(how, name, len(gradients), variables), gradients)
    pairs = [how.compression.compress(gradient) for gradient in gradients]
    sent = [tensor for tensor, _ in pairs]
    results = _callback(graph_callbacks.Allreduce(how.reduction, name, len(sent)), sent)
    return [how.compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def _callback(operation: graph_callbacks.Operation, tensors: Sequence[Any]) -> List[Any]:
    batch = graph_callbacks.Batch([operation])
    shapes = [jax.ShapeDtypeStruct(item.shape, item.dtype) for item in tensors]
    results: List[Any] = io_callback(
        lambda *arrays: batch.run([np.asarray(array) for array in arrays]), shapes, *tensors, ordered=True
    )
    return results


def wait_for_reductions() -> None:
    """Wait for the callbacks of all steps so far: they count steps and weigh gradients."""
    jax.effects_barrier()
