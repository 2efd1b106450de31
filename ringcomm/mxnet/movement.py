"""The collectives that move NDArrays to other ranks. A call returns when its result is there."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import mxnet as mx
import numpy as np

from .. import api
from .._adapter.arguments import wire_name
from ..calls.process_set import ProcessSet, global_process_set, number_of
from ..collective.rows import row_counts
from ..docstrings import documented
from ..errors import ConfigError, ShapeError
from .arrays import InPlace, copy_of, dense, flat_array, ndarray_of, shapes_of

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
        {name}
        {mx_priority}
        {process_set}

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
        {name}
        {mx_priority}
        {process_set}

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
    given = [dense(tensor, "allgather") for tensor in tensors]
    wholes = api.context().engine.allgather(
        [flat_array(tensor) for tensor in given], shapes_of(given), wire_name("allgather", name),
        number_of(process_set), True,
    ).wait()  # fmt: skip
    return [ndarray_of(whole, tensor) for whole, tensor in zip(wholes, given)]


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
        {name}
        {mx_priority}
        {process_set}

    Returns:
        a new NDArray with the root's elements, in the context of ``tensor``.

    Raises:
        ConfigError: it is not a dense NDArray, or ``root_rank`` is not in the process set.
        {call_errors}
    """
    return _spread(copy_of(dense(tensor, "broadcast")), root_rank, name, process_set)


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
        {name}
        {mx_priority}
        {process_set}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense NDArray, or ``root_rank`` is not in the process set.
        {call_errors}
    """
    return _spread(InPlace(dense(tensor, "broadcast_")), root_rank, name, process_set)


def _spread(
    target: InPlace, root_rank: int, name: Optional[str], process_set: ProcessSet
) -> mx.nd.NDArray:
    api.context().engine.broadcast(
        [target.flat], root_rank, wire_name("broadcast", name), [target.shape], number_of(process_set), True
    ).wait()
    return target.finish()


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
        {name}
        {mx_priority}
        {process_set}

    Returns:
        the received rows in rank order; with ``splits``, a pair: the received rows, and an NDArray with the
        number of rows from each rank (int32).

    Raises:
        ConfigError: it is not a dense NDArray, or the splits are not integers.
        ShapeError: the splits do not fit the NDArray, or it has no first dimension.
        {call_errors}
    """
    given = dense(tensor, "alltoall")
    engine = api.context().engine
    number = number_of(process_set)
    members = len(engine.sets.check_member(number))
    shape = tuple(given.shape)
    listed = _listed(splits)
    try:
        counts = row_counts(shape[0], listed, members) if shape else [0] * members
    except ConfigError as problem:
        # Horovod's adapter for MXNet raises a RuntimeError; in its other adapters this is a ValueError.
        raise ShapeError(str(problem)) from None
    rows, received = engine.alltoall(
        flat_array(given), shape, counts, wire_name("alltoall", name), number, True
    ).wait()
    result = ndarray_of(rows, given)
    return result if splits is None else (result, ndarray_of(np.asarray(received, np.int32), given))


def _listed(splits: Any) -> Optional[List[int]]:
    if splits is None:
        return None
    numbers = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else np.asarray(splits)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ConfigError(
            f"alltoall expects splits to contain 32-bit integer elements in one dimension, not {splits!r}."
        )
    listed: List[int] = numbers.tolist()
    return listed
