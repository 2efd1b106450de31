"""Collectives on TensorFlow tensors: the public functions, and below them differentiable ones on lists."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from .. import api
from .._adapter.graph_callbacks import Operation
from .._adapter.reduction import Reduction
from ..calls.process_set import ProcessSet, global_process_set, rank_in, size_of
from ..collective.observe import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..ops import ReduceOp
from . import bridge

__all__ = [
    "allgather", "allreduce", "alltoall", "broadcast", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "reducescatter",
]  # fmt: skip

look_through(tf)

Tensors = List[tf.Tensor]
Tensor = Union[tf.Tensor, tf.IndexedSlices]
NO_SPLITS = np.zeros(0, np.int32)  # ``splits`` that means: every rank gets the same number of rows


@takes(
    "allreduce",
    "average device_dense device_sparse compression op prescale_factor postscale_factor name process_set "
    "ignore_name_scope",
    "tf",
)
def allreduce(tensor: Any, options: Options) -> Tensor:
    """Reduce a tensor over all ranks; every rank gets the result.

    For ``tf.IndexedSlices`` the result contains the slices of all ranks (divided by the number of ranks for
    Average). They are gathered, not added up.

    Args:
        tensor: a tensor, a variable or an array, of the same shape and dtype on all ranks; or
            ``tf.IndexedSlices``, whose numbers of slices may differ.
        {options}

    Returns:
        a new tensor of the input's shape and dtype, bit-identical on all ranks. It is differentiable: the
        gradient is the same reduction of the ranks' gradients.

    Raises:
        NotImplementedError: ``tf.IndexedSlices`` with an op other than Average and Sum, or with factors.
        ConfigError: both ``op`` and ``average`` are given.
        UnsupportedDtypeError: the op does not support the dtype.
        {rank_errors}
    """
    if isinstance(tensor, tf.IndexedSlices):
        return _reduce_slices(tensor, options)
    return _reduce([tensor], options)[0]


@takes(
    "allreduce",
    "average device_dense device_sparse compression op prescale_factor postscale_factor process_set "
    "ignore_name_scope name",
    "tf",
)
def grouped_allreduce(tensors: Sequence[Any], options: Options) -> List[Tensor]:
    """Reduce several tensors over all ranks in one operation, which succeeds or fails as a whole.

    Args:
        tensors: tensors, variables, arrays or ``tf.IndexedSlices``; all ranks pass the same number of them,
            with the same shapes and dtypes, in the same order.
        {options}

    Returns:
        new tensors in the order of the inputs, with their shapes and dtypes, bit-identical on all ranks and
        differentiable.

    Raises:
        NotImplementedError: ``tf.IndexedSlices`` with an op other than Average and Sum, or with factors.
        ConfigError: both ``op`` and ``average`` are given.
        UnsupportedDtypeError: the op does not support the dtype.
        {rank_errors}
    """
    results: List[Any] = list(tensors)
    dense = [index for index, item in enumerate(results) if not isinstance(item, tf.IndexedSlices)]
    for index, item in enumerate(results):
        if isinstance(item, tf.IndexedSlices):
            label = None if options.name is None else f"{options.name}.{index}"
            results[index] = _reduce_slices(item, options._replace(name=label))
    reduced = _reduce([results[index] for index in dense], options)
    for index, item in zip(dense, reduced):
        results[index] = item
    return results


@takes(
    "reducescatter",
    "device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
    "tf",
)
def reducescatter(tensor: Any, options: Options) -> tf.Tensor:
    """Reduce a tensor over all ranks; every rank gets its part of the rows of the result.

    Rows are divided evenly. If r rows remain, the first r ranks get one row more.

    Args:
        tensor: a dense tensor with at least one dimension, of the same shape and dtype on all ranks.
        {options}

    Returns:
        a new tensor of the input's dtype with this rank's rows. All dimensions but the first are the same as
        in the input. It is differentiable.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        NotOfferedError: the op is Adasum.
        UnsupportedDtypeError: the dtype cannot be reduced.
        ShapeError: the tensor has no dimensions.
        {rank_errors}
    """
    return _scatter([tensor], options)[0]


@takes("reducescatter", "device_dense compression op process_set prescale_factor postscale_factor name", "tf")
def grouped_reducescatter(tensors: Sequence[Any], options: Options) -> List[tf.Tensor]:
    """Reduce several tensors in one operation; every rank gets its part of the rows of each result.

    Rows are divided evenly. If r rows remain, the first r ranks get one row more.

    Args:
        tensors: dense tensors with at least one dimension; all ranks pass the same number of them, with the
            same shapes and dtypes, in the same order.
        {options}

    Returns:
        new tensors in the order of the inputs with this rank's rows of each. They are differentiable.

    Raises:
        NotImplementedError: one of them is ``tf.IndexedSlices``.
        NotOfferedError: the op is Adasum.
        UnsupportedDtypeError: the dtype cannot be reduced.
        ShapeError: one of them has no dimensions.
        {rank_errors}
    """
    return _scatter(tensors, options)


@documented
def allgather(
    tensor: Any, name: Optional[str] = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:  # fmt: skip
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: a dense tensor with at least one dimension. The first dimension may differ between ranks. All
            other dimensions and the dtype must be equal.
        {tf_matching}

    Returns:
        a new tensor, the same on all ranks. It is differentiable: the gradient consists of this rank's rows
        of the averaged gradients.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        ShapeError: the tensor has no dimensions.
        {rank_errors}
    """
    (result,) = grouped_allgather([tensor], name, ignore_name_scope, process_set)
    return result


@documented
def grouped_allgather(
    tensors: Sequence[Any], name: Optional[str] = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> List[tf.Tensor]:  # fmt: skip
    """Concatenate several tensors of all ranks, each along its first dimension, in one operation.

    Args:
        tensors: dense tensors with at least one dimension; all ranks pass the same number of them. The first
            dimensions may differ between ranks. All other dimensions and the dtypes must be equal.
        {tf_matching}

    Returns:
        new tensors in the order of the inputs, the same on all ranks. They are differentiable.

    Raises:
        NotImplementedError: one of them is ``tf.IndexedSlices``.
        ShapeError: one of them has no dimensions.
        {rank_errors}
    """
    given = dense(tensors, "allgather")
    return gather(process_set, bridge.name_of(name, "allgather", given), given)


@documented
def broadcast(
    tensor: Any, root_rank: int, name: Optional[str] = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:  # fmt: skip
    """Send the root's tensor to all ranks.

    Args:
        tensor: a dense tensor, of the same shape and dtype on all ranks; only the root's values are used.
        {root_rank}
        {tf_matching}

    Returns:
        a new tensor with the root's values. It is differentiable: the root gets the averaged gradients, all
        other ranks get zeros.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        {rank_errors}
    """
    given = dense([tensor], "broadcast")
    (result,) = spread(root_rank, process_set, bridge.name_of(name, "broadcast", given), given)
    return result


@documented
def alltoall(
    tensor: Any, splits: Any = None, name: Optional[str] = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send rows of a tensor to every rank and receive rows from every rank.

    Args:
        tensor: a dense tensor with at least one dimension. The first dimension may differ between ranks. All
            other dimensions and the dtype must be equal.
        splits: an int32 tensor or a list with the number of rows for each rank, in rank order. Its sum is the
            number of rows. None: every rank gets the same number.
        {tf_matching}

    Returns:
        the received rows in rank order. With ``splits``, a pair: these rows, and an int32 tensor with the
        number of rows from each rank. The rows are differentiable.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        ConfigError: ``splits`` does not match the tensor or the number of ranks. Or it is missing, and rows
            cannot be divided evenly.
        {rank_errors}
    """
    given = dense([tensor], "alltoall")
    counts = tf.convert_to_tensor(NO_SPLITS if splits is None else splits)
    label = bridge.name_of(name, "alltoall", given)
    rows, received = exchange(process_set, label, given[0], counts)
    return rows if splits is None else (rows, received)


# ---- on lists of dense tensors ----------------------------------------------------------------


def _reduce(tensors: Sequence[Any], options: Options) -> List[tf.Tensor]:
    if not tensors:
        return []
    given = [tf.convert_to_tensor(item) for item in tensors]
    how, sent, restore = Reduction.of(options).prepared(given)
    weight = None if options.weight is None else tf.cast(options.weight, tf.float64)
    return restore(reduce(how, bridge.name_of(options.name, "allreduce", given), sent, weight))


def _reduce_slices(slices: tf.IndexedSlices, options: Options) -> tf.IndexedSlices:
    how = Reduction.of(options)
    if not how.adds:
        raise NotImplementedError(
            f"tf.IndexedSlices can be averaged and summed, not reduced by {how.op.name.capitalize()}: use "
            "sparse_as_dense=True or tf.convert_to_tensor()."
        )
    if options.weight is not None:
        raise NotImplementedError("tf.IndexedSlices have no weights: use tf.convert_to_tensor() first.")
    if (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError("tf.IndexedSlices are not scaled: use tf.convert_to_tensor() first.")
    _, (values,), restore = how.prepared([slices.values])
    label = bridge.name_of(options.name, "allreduce", [values])
    values, indices = gather(how.process_set, label, [values, slices.indices])
    (values,) = restore([values])
    if how.op == ReduceOp.AVERAGE:
        values = values / tf.cast(size_of(how.process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _scatter(tensors: Sequence[Any], options: Options) -> List[tf.Tensor]:
    given = dense(tensors, "reducescatter")
    how, sent, restore = Reduction.of_rows(options).prepared(given)
    weight = None if options.weight is None else tf.cast(options.weight, tf.float64)
    return restore(scatter(how, bridge.name_of(options.name, "reducescatter", given), sent, weight))


def dense(tensors: Sequence[Any], what: str) -> List[tf.Tensor]:
    """Return the arguments as dense tensors; NotImplementedError for ``tf.IndexedSlices``."""
    for item in tensors:
        if isinstance(item, tf.IndexedSlices):
            raise NotImplementedError(f"{what} works on dense tensors: use tf.convert_to_tensor() first.")
    return [tf.convert_to_tensor(item) for item in tensors]


def reduce(
    how: Reduction, name: Optional[str], tensors: Sequence[tf.Tensor], weight: Optional[tf.Tensor] = None
) -> Tensors:
    """Reduce tensors in one operation. Its gradient is the same reduction of the gradients; that of a
    weighted average is the sum of the gradients, times this rank's share of all weights.
    """

    def backward(*gradients: tf.Tensor) -> Any:
        if weight is None:
            return reduce(how, _of(name), gradients)
        plain = Reduction(ReduceOp.SUM, process_set=how.process_set)
        *sums, total = reduce(plain, _of(name), [*gradients, weight])
        return _scaled(sums, how.factor * weight / total)

    return _run(Operation("allreduce", how, name), tensors, backward, weight)


def scatter(
    how: Reduction, name: Optional[str], tensors: Sequence[tf.Tensor], weight: Optional[tf.Tensor] = None
) -> Tensors:
    """Reduce tensors and keep this rank's rows (reducescatter). The gradient is an allgather of the ranks'
    gradients, with a weight relative to the mean of the weights.
    """

    def backward(*gradients: tf.Tensor) -> Any:
        factor: Any = how.gathered_factor
        if weight is not None:
            label = None if name is None else bridge.unique_name(f"{name}.weight")
            (mean,) = reduce(Reduction(process_set=how.process_set), label, [weight])
            factor = factor * weight / mean
        return _scaled(gather(how.process_set, _of(name), gradients), factor)

    return _run(Operation("reducescatter", how, name), tensors, backward, weight)


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

    return _run(Operation("allgather", how, name), tensors, backward)


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
    return _run(operation, tensors, backward)


def exchange(
    process_set: ProcessSet, name: Optional[str], tensor: tf.Tensor, splits: tf.Tensor
) -> Tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank (alltoall); return the received rows and their number by source rank."""

    def forward(rows: tf.Tensor, counts: tf.Tensor) -> Any:
        outputs = bridge.run(
            [Operation("alltoall", Reduction(process_set=process_set), name, 2)], [rows, counts],
            [rows.dtype, tf.int32], [_any_rows(rows), [None]],
        )  # fmt: skip
        received = outputs[1]

        def backward(gradient: tf.Tensor, _: tf.Tensor) -> Any:
            returned, _ = exchange(process_set, _of(name), gradient, received)
            return returned, None

        return outputs, backward

    results = bridge.differentiable(forward, [tensor, splits])
    return results[0], results[1]


def _run(
    operation: Operation, tensors: Sequence[tf.Tensor], backward: Callable[..., Any],
    weight: Optional[tf.Tensor] = None,
) -> Tensors:  # fmt: skip
    """Run an operation on tensors, and on a weight if there is one; ``backward`` is its gradient."""
    weights = [] if weight is None else [weight]
    whole = operation._replace(inputs=len(tensors) + len(weights), has_weight=bool(weights))
    shapes = [item.shape if whole.keeps_shapes else _any_rows(item) for item in tensors]

    def forward(*inputs: tf.Tensor) -> Any:
        return bridge.run([whole], [*inputs, *weights], [item.dtype for item in inputs], shapes), backward

    outputs = bridge.differentiable(forward, tensors)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _scaled(tensors: Sequence[tf.Tensor], factor: Any) -> Tensors:
    return [tensor * tf.cast(factor, tensor.dtype) for tensor in tensors]


def _of(name: Optional[str]) -> Optional[str]:
    """Return the name of the gradient's operation; unique, since a gradient may be computed repeatedly."""
    return None if name is None else bridge.unique_name(f"{name}.gradient")


def _any_rows(tensor: tf.Tensor) -> Any:
    """Return the shape of a tensor with another number of rows."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else tensor.shape
