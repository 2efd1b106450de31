"""The collectives of :mod:`ringcomm.keras`, with TensorFlow tensors as results in eager mode."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from ...calls.process_set import ProcessSet, global_process_set
from ...docstrings import documented
from ...keras import collectives
from ...ops import ReduceOp


@documented
def allreduce(
    value: Any,
    name: Optional[str] = None,
    average: Optional[bool] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Optional[ReduceOp] = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Any:
    """Reduce a value over all ranks; every rank gets the result.

    Args:
        value: a number, an array or a tensor, of the same shape and dtype on all ranks.
        {name}
        {tf_average}
        {prescale_factor}
        {postscale_factor}
        {op}
        {compression}
        {process_set}
        {weight}

    Returns:
        in eager mode a tensor, otherwise a NumPy array, of the value's shape and dtype, bit-identical on all
        ranks.

    Raises:
        ConfigError: both ``op`` and ``average`` are given.
        UnsupportedDtypeError: the op does not support the dtype.
        MismatchError: shapes, dtypes, ops or factors differ between ranks.
        PeerLostError: a rank was lost.
    """
    return _as_tensor(
        collectives.allreduce(
            value, name, average, prescale_factor, postscale_factor, op, compression, process_set, weight
        )
    )


@documented
def allgather(value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the values of all ranks along the first dimension, in rank order.

    Args:
        value: an array or a tensor with at least one dimension. The first dimension may differ between ranks;
            all other dimensions and the dtype may not.
        {name}
        {process_set}

    Returns:
        in eager mode a tensor, otherwise a NumPy array; the same on all ranks.

    Raises:
        ShapeError: the value has no dimensions.
        MismatchError: dtypes or other dimensions than the first differ between ranks.
        PeerLostError: a rank was lost.
    """
    return _as_tensor(collectives.allgather(value, name, process_set))


@documented
def broadcast(
    value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the root's value to all ranks.

    Args:
        value: a number, an array or a tensor, of the same shape and dtype on all ranks; only the root's
            content is used.
        {root_rank}
        {name}
        {process_set}

    Returns:
        in eager mode a tensor, otherwise a NumPy array, with the root's content.

    Raises:
        MismatchError: shapes, dtypes or roots differ between ranks.
        PeerLostError: a rank was lost.
    """
    return _as_tensor(collectives.broadcast(value, root_rank, name, process_set))


@documented
def reducescatter(
    value: Any,
    name: Optional[str] = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a value over all ranks; every rank gets its part of the rows of the result.

    Rows are divided evenly; where that leaves a remainder of r rows, the first r ranks get one row more.

    Args:
        value: an array or a tensor with at least one dimension, of the same shape and dtype on all ranks.
        {name}
        op: Average (the default), Sum, Min, Max or Product.
        {process_set}
        {scale}

    Returns:
        in eager mode a tensor, otherwise a NumPy array, of the value's dtype with this rank's rows.

    Raises:
        ShapeError: the value has no dimensions.
        UnsupportedDtypeError: the op is Adasum, or the dtype cannot be reduced.
        MismatchError: shapes, dtypes or ops differ between ranks.
        PeerLostError: a rank was lost.
    """
    result = collectives.reducescatter(value, name, op, process_set, prescale_factor, postscale_factor)
    return _as_tensor(result)


def _as_tensor(result: Any) -> Any:
    return tf.convert_to_tensor(result) if tf.executing_eagerly() else result
