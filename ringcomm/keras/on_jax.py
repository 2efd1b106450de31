"""Reduces Keras gradients on the JAX backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax
import numpy as np
from jax.experimental import io_callback

from .._adapter import graph_callbacks
from .._adapter.names import group_name
from .reduction_options import How


def reduce(how: How, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (JAX arrays) over all ranks in one ordered host callback.

    JAX runs ordered callbacks one after another in program order, which is the same on all ranks.
    """
    pairs = [how.compression.compress(gradient) for gradient in gradients]
    compressed = [tensor for tensor, _ in pairs]
    name = group_name(variables, "keras")
    batch = graph_callbacks.Batch([graph_callbacks.Allreduce(how.reduction, name, len(compressed))])
    shapes = [jax.ShapeDtypeStruct(item.shape, item.dtype) for item in compressed]
    results = io_callback(
        lambda *arrays: batch.run([np.asarray(array) for array in arrays]), shapes, *compressed, ordered=True
    )
    return [how.compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def wait_for_reductions() -> None:
    """Wait for the callbacks of all steps so far: they count steps and weigh gradients."""
    jax.effects_barrier()
