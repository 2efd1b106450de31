"""The collectives that move NDArrays to other ranks. A call returns when its result is there."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import mxnet as mx
import numpy as np

from .. import api
from .._adapter.submit import start_allgather, start_alltoall, start_broadcast
from ..calls.process_set import ProcessSet, global_process_set, number_of
from ..collective.options import whole_numbers
from ..collective.rows import row_counts
from ..docstrings import documented
from ..errors import ConfigError, ShapeError
from .arrays import NDArrayOperand, copy_of, dense

__all__ = ["allgather", "alltoall", "broadcast", "broadcast_", "grouped_allgather"]


@documented
def allgather(
    tensor: mx.nd.NDArray,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:
    """Concatenate every rank's NDArray along the first dimension, in rank order.

    Args:
        {tensor_rows}
        {mx_matching}

    Returns:
        a new NDArray with the rows of all ranks; their number may differ from rank to rank.

    Raises:
        ConfigError: it is not a dense NDArray.
        ShapeError: the NDArray has no first dimension.
        {call_errors}
    """
    (result,) = grouped_allgather([tensor], name, priority, process_set)
    return result


@documented
def grouped_allgather(
    tensors: Sequence[mx.nd.NDArray],
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> List[mx.nd.NDArray]:
    """Concatenate every rank's NDArrays along the first dimension, several NDArrays as one operation.

    Args:
        {tensors_rows}
        {mx_matching}

    Returns:
        a list of new NDArrays, one for each of ``tensors``, with the rows of all ranks in rank order. An
        empty list (on all ranks) needs no other rank.

    Raises:
        ConfigError: one is not a dense NDArray.
        ShapeError: an NDArray has no first dimension.
        {call_errors}
    """
    if not tensors:
        return []
    operands = [NDArrayOperand(dense(tensor, "allgather"), rows=True) for tensor in tensors]
    gathered: List[mx.nd.NDArray] = start_allgather(operands, name, process_set, True, True).wait()
    return gathered


@documented
def broadcast(
    tensor: mx.nd.NDArray,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:
    """Copy the root's NDArray to every rank, as a new NDArray.

    Args:
        {tensor_in}
        {root_rank}
        {mx_matching}

    Returns:
        a new NDArray with the root's elements, in the context of ``tensor``.

    Raises:
        ConfigError: it is not a dense NDArray, or ``root_rank`` is not in the process set.
        {call_errors}
    """
    operand = copy_of(dense(tensor, "broadcast"))
    return start_broadcast([operand], root_rank, name, process_set, True).wait()


@documented
def broadcast_(
    tensor: mx.nd.NDArray,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:
    """Overwrite an NDArray on every rank with the root's, on the CPU without any copy.

    Args:
        {tensor_inplace}
        {root_rank}
        {mx_matching}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense NDArray, or ``root_rank`` is not in the process set.
        {call_errors}
    """
    operand = NDArrayOperand(dense(tensor, "broadcast_"))
    return start_broadcast([operand], root_rank, name, process_set, True).wait()


@documented
def alltoall(
    tensor: mx.nd.NDArray,
    splits: Any = None,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the rows to every rank, and receive a part of the rows of every rank.

    Args:
        {tensor_rows}
        splits: an NDArray, an array or a list of integers: the number of rows for each rank, in rank order.
            Without it every rank gets equally many rows, and the number of rows must be a multiple of the
            number of ranks.
        {mx_matching}

    Returns:
        the received rows in rank order; with ``splits``, a pair: the received rows, and an NDArray with the
        number of rows from each rank (int32).

    Raises:
        ConfigError: it is not a dense NDArray, or the splits are not integers.
        ShapeError: the splits do not fit the NDArray, or it has no first dimension.
        {call_errors}
    """
    operand = NDArrayOperand(dense(tensor, "alltoall"), rows=True)
    members = len(api.context().engine.sets.check_member(number_of(process_set)))
    given = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits
    listed = None if given is None else whole_numbers("alltoall", given)
    try:
        counts = row_counts(operand.shape[0], listed, members) if operand.shape else [0] * members
    except ConfigError as problem:
        # Horovod's adapter for MXNet raises a RuntimeError; in its other adapters this is a ValueError.
        raise ShapeError(str(problem)) from None
    rows, received = start_alltoall(
        operand, counts, name, process_set, True,
        lambda numbers: operand.deliver(np.asarray(numbers, np.int32)),
    ).wait()  # fmt: skip
    return rows if splits is None else (rows, received)
