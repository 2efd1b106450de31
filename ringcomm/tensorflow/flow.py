"""Differentiable collectives on lists of dense tensors."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from .. import api
from .._adapter.graph_callbacks import Operation
from .._adapter.reduction import Reduction
from .._tensorflow import bridge
from ..calls.process_set import ProcessSet, rank_in
from ..ops import ReduceOp

Tensors = List[tf.Tensor]


def dense(tensors: Sequence[Any], what: str) -> List[tf.Tensor]:
    """Return the arguments as dense tensors; NotImplementedError for ``tf.IndexedSlices``."""
    for item in tensors:
        if isinstance(item, tf.IndexedSlices):
            raise NotImplementedError(f"{what} works on dense tensors: use tf.convert_to_tensor() first.")
    return [tf.convert_to_tensor(item) for item in tensors]


def reduce(
    how: Reduction, name: Optional[str], tensors: Sequence[tf.Tensor], weight: Optional[tf.Tensor] = None
) -> Tensors:
    """Reduce tensors in one operation. Its gradient is the same reduction of the gradients.

    With a weight (float64) it is a weighted average. Its gradient is the sum of the gradients, times this
    rank's share of all weights.
    """

    def backward(*gradients: tf.Tensor) -> Any:
        if weight is None:
            return reduce(how, _of(name), gradients)
        plain = Reduction(ReduceOp.SUM, process_set=how.process_set)
        *sums, total = reduce(plain, _of(name), [*gradients, weight])
        return _scaled(sums, how.factor * weight / total)

    return _run(Operation("allreduce", how, name), tensors, _shapes(tensors), backward, weight)


def scatter(
    how: Reduction, name: Optional[str], tensors: Sequence[tf.Tensor], weight: Optional[tf.Tensor] = None
) -> Tensors:
    """Reduce tensors and keep this rank's rows (reducescatter); with a weight of a weighted average.

    The gradient is an allgather of the ranks' gradients, with a weight relative to the mean of the weights.
    """

    def backward(*gradients: tf.Tensor) -> Any:
        factor: Any = how.gathered_factor
        if weight is not None:
            label = None if name is None else bridge.unique_name(f"{name}.weight")
            (mean,) = reduce(Reduction(process_set=how.process_set), label, [weight])
            factor = factor * weight / mean
        return _scaled(gather(how.process_set, _of(name), gradients), factor)

    return _run(Operation("reducescatter", how, name), tensors, _rows_unknown(tensors), backward, weight)


def gather(process_set: ProcessSet, name: Optional[str], tensors: Sequence[tf.Tensor]) -> Tensors:
    """Concatenate all ranks' rows (allgather). The gradient is this rank's rows of the averaged gradients."""
    how = Reduction(process_set=process_set)

    def backward(*gradients: tf.Tensor) -> Any:
        averaged = reduce(how, _of(name), gradients)
        rows = tf.stack([tf.shape(item, tf.int64)[0] for item in tensors])
        label = None if name is None else bridge.unique_name(f"{name}.rows")
        (all_rows,) = gather(process_set, label, [rows[tf.newaxis]])
        before = tf.reduce_sum(all_rows[: rank_in(process_set)], axis=0)
        return [part[before[index] : before[index] + rows[index]] for index, part in enumerate(averaged)]

    return _run(Operation("allgather", how, name), tensors, _rows_unknown(tensors), backward)


def spread(
    root_rank: int, process_set: ProcessSet, name: Optional[str], tensors: Sequence[tf.Tensor]
) -> Tensors:
    """Send the root's tensors to all ranks (broadcast). Its gradient is the average on the root, else 0."""
    how = Reduction(process_set=process_set)

    def backward(*gradients: tf.Tensor) -> Any:
        averaged = reduce(how, _of(name), gradients)
        if api.rank() == root_rank:
            return averaged
        with tf.control_dependencies(averaged):  # or a graph would leave out the reduction, on this rank only
            return [tf.zeros_like(item) for item in averaged]

    operation = Operation("broadcast", how, name, root_rank=root_rank)
    return _run(operation, tensors, _shapes(tensors), backward)


def exchange(
    process_set: ProcessSet, name: Optional[str], tensor: tf.Tensor, splits: tf.Tensor
) -> Tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank (alltoall); return the received rows and their number by source rank.

    The gradient is the alltoall in the opposite direction.
    """

    def forward(rows: tf.Tensor, counts: tf.Tensor) -> Any:
        outputs = bridge.run(
            [Operation("alltoall", Reduction(process_set=process_set), name, 2)], [rows, counts],
            [rows.dtype, tf.int32], [*_rows_unknown([rows]), [None]],
        )  # fmt: skip
        received = outputs[1]

        def backward(gradient: tf.Tensor, _: tf.Tensor) -> Any:
            returned, _ = exchange(process_set, _of(name), gradient, received)
            return returned, None

        return outputs, backward

    results = bridge.differentiable(forward, [tensor, splits])
    return results[0], results[1]


def _run(
    operation: Operation, tensors: Sequence[tf.Tensor], shapes: List[Any], backward: Callable[..., Any],
    weight: Optional[tf.Tensor] = None,
) -> Tensors:  # fmt: skip
    """Run an operation on tensors, and on a weight if there is one; ``backward`` is its gradient."""
    weights = [] if weight is None else [weight]
    whole = operation._replace(inputs=len(tensors) + len(weights), has_weight=bool(weights))

    def forward(*inputs: tf.Tensor) -> Any:
        return bridge.run([whole], [*inputs, *weights], _dtypes(inputs), shapes), backward

    outputs = bridge.differentiable(forward, tensors)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _scaled(tensors: Sequence[tf.Tensor], factor: Any) -> Tensors:
    return [tensor * tf.cast(factor, tensor.dtype) for tensor in tensors]


def _of(name: Optional[str]) -> Optional[str]:
    """Return the name of the gradient's operation; unique, since a gradient may be computed repeatedly."""
    return None if name is None else bridge.unique_name(f"{name}.gradient")


def _dtypes(tensors: Sequence[tf.Tensor]) -> List[Any]:
    return [tensor.dtype for tensor in tensors]


def _shapes(tensors: Sequence[tf.Tensor]) -> List[Any]:
    return [tensor.shape for tensor in tensors]


def _rows_unknown(tensors: Sequence[tf.Tensor]) -> List[Any]:
    return [
        tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else tensor.shape
        for tensor in tensors
    ]


NO_SPLITS = np.zeros(0, np.int32)  # ``splits`` that means: every rank gets the same number of rows
