"""Differentiable collectives on lists of dense tensors."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from .. import api
from .._adapter.graph_callbacks import Operation
from .._adapter.reduction import Reduction
from .._tensorflow import bridge
from ..calls.process_set import ProcessSet, rank_in, size_of
from ..ops import ReduceOp

Tensors = List[tf.Tensor]


def dense(tensors: Sequence[Any], what: str) -> List[tf.Tensor]:
    """The arguments as dense tensors.

    Raises:
        NotImplementedError: one of them is ``tf.IndexedSlices``.
    """
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
    if weight is not None:
        return _reduce_weighted(how, name, tensors, weight)

    def forward(*inputs: tf.Tensor) -> Any:
        operation = Operation("allreduce", how, name, len(inputs))
        outputs = bridge.run([operation], inputs, _dtypes(inputs), _shapes(inputs))
        return outputs, lambda *gradients: reduce(how, _of(name), gradients)

    return _list(bridge.differentiable(forward, tensors))


def _reduce_weighted(
    how: Reduction, name: Optional[str], tensors: Sequence[tf.Tensor], weight: tf.Tensor
) -> Tensors:
    def forward(*inputs: tf.Tensor) -> Any:
        operation = Operation("allreduce", how, name, len(inputs) + 1, has_weight=True)
        outputs = bridge.run([operation], [*inputs, weight], _dtypes(inputs), _shapes(inputs))

        def backward(*gradients: tf.Tensor) -> Any:
            plain = Reduction(ReduceOp.SUM, process_set=how.process_set)
            *sums, total = reduce(plain, _of(name), [*gradients, weight])
            share = how.factor * weight / total
            return [item * tf.cast(share, item.dtype) for item in sums]

        return outputs, backward

    return _list(bridge.differentiable(forward, tensors))


def scatter(
    how: Reduction, name: Optional[str], tensors: Sequence[tf.Tensor], weights: Sequence[tf.Tensor] = ()
) -> Tensors:
    """Reduce tensors and keep this rank's rows (reducescatter); ``weights`` has this rank's weight, if any.

    The gradient is an allgather of the ranks' gradients. For Sum it is multiplied by the number of ranks,
    because losses are averaged over ranks.
    """

    def forward(*inputs: tf.Tensor) -> Any:
        count = len(inputs) + len(weights)
        operation = Operation("reducescatter", how, name, count, has_weight=bool(weights))
        outputs = bridge.run([operation], [*inputs, *weights], _dtypes(inputs), _rows_unknown(inputs))

        def backward(*gradients: tf.Tensor) -> Any:
            factor = how.factor
            if how.op == ReduceOp.SUM:
                factor *= size_of(how.process_set)
            if weights:  # this rank's, relative to the mean of the weights
                label = None if name is None else bridge.unique_name(f"{name}.weight")
                (mean,) = reduce(Reduction(process_set=how.process_set), label, weights)
                factor = factor * weights[0] / mean
            gathered = gather(how.process_set, _of(name), gradients)
            return [gradient * tf.cast(factor, gradient.dtype) for gradient in gathered]

        return outputs, backward

    return _list(bridge.differentiable(forward, tensors))


def gather(process_set: ProcessSet, name: Optional[str], tensors: Sequence[tf.Tensor]) -> Tensors:
    """Concatenate all ranks' rows (allgather). The gradient is this rank's rows of the averaged gradients."""

    def forward(*inputs: tf.Tensor) -> Any:
        operation = Operation("allgather", Reduction(process_set=process_set), name, len(inputs))
        outputs = bridge.run([operation], inputs, _dtypes(inputs), _rows_unknown(inputs))

        def backward(*gradients: tf.Tensor) -> Any:
            averaged = reduce(Reduction(process_set=process_set), _of(name), gradients)
            rows = tf.stack([tf.shape(item, tf.int64)[0] for item in inputs])
            label = None if name is None else bridge.unique_name(f"{name}.rows")
            (all_rows,) = gather(process_set, label, [rows[tf.newaxis]])
            before = tf.reduce_sum(all_rows[: rank_in(process_set)], axis=0)
            return [part[before[index] : before[index] + rows[index]] for index, part in enumerate(averaged)]

        return outputs, backward

    return _list(bridge.differentiable(forward, tensors))


def spread(
    root_rank: int, process_set: ProcessSet, name: Optional[str], tensors: Sequence[tf.Tensor]
) -> Tensors:
    """Send the root's tensors to all ranks (broadcast). Its gradient is the average on the root, else 0."""

    def forward(*inputs: tf.Tensor) -> Any:
        how = Reduction(process_set=process_set)
        operation = Operation("broadcast", how, name, len(inputs), root_rank)
        outputs = bridge.run([operation], inputs, _dtypes(inputs), _shapes(inputs))

        def backward(*gradients: tf.Tensor) -> Any:
            averaged = reduce(Reduction(process_set=process_set), _of(name), gradients)
            return averaged if api.rank() == root_rank else [item * 0 for item in averaged]

        return outputs, backward

    return _list(bridge.differentiable(forward, tensors))


def exchange(
    process_set: ProcessSet, name: Optional[str], tensor: tf.Tensor, splits: tf.Tensor
) -> Tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank (alltoall); returns the received rows and their number by source rank.

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


def _list(outputs: Any) -> Tensors:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _of(name: Optional[str]) -> Optional[str]:
    """The name of the gradient's operation; unique, because a gradient may be computed more than once."""
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


NO_SPLITS = np.zeros(0, np.int32)
"""The value of ``splits`` that means: every rank gets the same number of rows."""
