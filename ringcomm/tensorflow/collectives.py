"""The public reductions of TensorFlow tensors; the other collectives are in :mod:`.movement`."""

from __future__ import annotations

from typing import Any, List, Sequence, Union

import tensorflow as tf

from .._adapter.reduction import Reduction
from .._tensorflow import bridge
from ..calls.process_set import size_of
from ..collective.call_sites import look_through
from ..collective.options import Options, takes
from ..ops import ReduceOp
from . import flow

look_through(tf)

Tensor = Union[tf.Tensor, tf.IndexedSlices]


@takes(
    "allreduce",
    "average device_dense device_sparse compression op prescale_factor postscale_factor name process_set "
    "ignore_name_scope",
    "tf",
)
def allreduce(tensor: Any, options: Options) -> Tensor:
    """Reduce a tensor over all ranks; every rank gets the result.

    For ``tf.IndexedSlices`` the result has the slices of all ranks (divided by the number of ranks for
    Average), which are gathered and not added up.

    Args:
        tensor: a tensor, a variable or an array, of the same shape and dtype on all ranks; or
            ``tf.IndexedSlices``, whose numbers of slices may differ.
        {options}

    Returns:
        a new tensor of the input's shape and dtype, bit-identical on all ranks. It is differentiable; the
        gradient is the same reduction of the ranks' gradients.

    Raises:
        NotImplementedError: ``tf.IndexedSlices`` with an op other than Average and Sum, or with factors.
        ConfigError: both ``op`` and ``average`` are given.
        UnsupportedDtypeError: the op does not support the dtype.
        MismatchError: shapes, dtypes, ops or factors differ between ranks.
        PeerLostError: a rank was lost.
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
        MismatchError: shapes, dtypes, ops or factors differ between ranks.
        PeerLostError: a rank was lost.
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


def _reduce(tensors: Sequence[Any], options: Options) -> List[tf.Tensor]:
    if not tensors:
        return []
    given = [tf.convert_to_tensor(item) for item in tensors]
    how, sent, restore = Reduction.of(options).prepared(given)
    weight = None if options.weight is None else tf.cast(options.weight, tf.float64)
    return restore(flow.reduce(how, bridge.name_of(options.name, "allreduce", given), sent, weight))


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
    values, indices = flow.gather(how.process_set, label, [values, slices.indices])
    (values,) = restore([values])
    if how.op == ReduceOp.AVERAGE:
        values = values / tf.cast(size_of(how.process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@takes(
    "reducescatter",
    "device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
    "tf",
)
def reducescatter(tensor: Any, options: Options) -> tf.Tensor:
    """Reduce a tensor over all ranks; every rank gets its part of the rows of the result.

    Rows are divided evenly; where that leaves a remainder of r rows, the first r ranks get one row more.

    Args:
        tensor: a dense tensor with at least one dimension, of the same shape and dtype on all ranks.
        {options}

    Returns:
        a new tensor of the input's dtype with this rank's rows; all dimensions but the first are the input's.
        It is differentiable.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        NotOfferedError: the op is Adasum.
        UnsupportedDtypeError: the dtype cannot be reduced.
        ShapeError: the tensor has no dimensions.
        MismatchError: shapes, dtypes, ops or factors differ between ranks.
        PeerLostError: a rank was lost.
    """
    return _scatter([tensor], options)[0]


@takes(
    "reducescatter", "device_dense compression op process_set prescale_factor postscale_factor name", "tf"
)
def grouped_reducescatter(tensors: Sequence[Any], options: Options) -> List[tf.Tensor]:
    """Reduce several tensors in one operation; every rank gets its part of the rows of each result.

    Rows are divided evenly; where that leaves a remainder of r rows, the first r ranks get one row more.

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
        MismatchError: shapes, dtypes, ops or factors differ between ranks.
        PeerLostError: a rank was lost.
    """
    return _scatter(tensors, options)


def _scatter(tensors: Sequence[Any], options: Options) -> List[tf.Tensor]:
    given = flow.dense(tensors, "reducescatter")
    how, sent, restore = Reduction.of_rows(options).prepared(given)
    weight = None if options.weight is None else tf.cast(options.weight, tf.float64)
    return restore(flow.scatter(how, bridge.name_of(options.name, "reducescatter", given), sent, weight))
