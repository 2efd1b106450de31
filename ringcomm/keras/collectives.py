"""The collectives on numbers, NumPy arrays and tensors of the Keras backend, for eager mode."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Iterable, List, Optional, Sequence

import keras
import numpy as np

from .. import api
from .._adapter.graph_callbacks import Batch, Operation, TreeCollectives
from .._adapter.reduction import Reduction
from ..calls.process_set import ProcessSet, global_process_set, size_of
from ..collective.options import Options, takes
from ..docstrings import documented

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "broadcast_variables", "reducescatter"]


@takes("allreduce", "name average prescale_factor postscale_factor op compression process_set")
def allreduce(value: Any, options: Options) -> np.ndarray[Any, Any]:
    """Reduce a value over all ranks; every rank gets the result.

    Args:
        value: a number, an array or a tensor, of the same shape and dtype on all ranks.
        {options}

    Returns:
        a new NumPy array of the value's shape and dtype, bit-identical on all ranks.

    Raises:
        ConfigError: both ``op`` and ``average`` are given.
        UnsupportedDtypeError: the op does not support the dtype.
        {rank_errors}
    """
    return _values.allreduce(value, options)


@takes("reducescatter", "name op process_set prescale_factor postscale_factor")
def reducescatter(value: Any, options: Options) -> np.ndarray[Any, Any]:
    """Reduce a value over all ranks; every rank gets its part of the rows of the result.

    Rows are divided evenly. If r rows remain, the first r ranks get one row more.

    Args:
        value: an array or a tensor with at least one dimension, of the same shape and dtype on all ranks.
        {options}

    Returns:
        a new NumPy array of the value's dtype with this rank's rows.

    Raises:
        NotOfferedError: the op is Adasum.
        ShapeError: the value has no dimensions.
        UnsupportedDtypeError: the dtype cannot be reduced.
        {rank_errors}
    """
    return _values.reducescatter(value, options)


@documented
def allgather(
    value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Concatenate the values of all ranks along the first dimension, in rank order.

    Args:
        value: an array or a tensor with at least one dimension. The first dimension may differ between ranks.
            All other dimensions and the dtype must be equal.
        {matching}

    Returns:
        a new NumPy array, the same on all ranks.

    Raises:
        ShapeError: the value has no dimensions.
        {rank_errors}
    """
    return _values.allgather(value, name, process_set)


@documented
def broadcast(
    value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Send the root's value to all ranks.

    Args:
        value: a number, an array or a tensor, of the same shape and dtype on all ranks; only the root's
            content is used.
        {root_rank}
        {matching}

    Returns:
        a new NumPy array with the root's content.

    Raises:
        {rank_errors}
    """
    return _values.broadcast(value, root_rank, name, process_set)


@documented
def alltoall(
    value: Any, splits: Any = None, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of a value to every rank and receive rows from every rank.

    Args:
        value: an array or a tensor with at least one dimension. The first dimension may differ between ranks.
            All other dimensions and the dtype must be equal.
        splits: the number of rows for each rank, in rank order; None: the same number for every rank.
        {matching}

    Returns:
        a new NumPy array of the received rows in rank order. With ``splits``, a pair: that array, and the
        number of rows from each rank (int32).

    Raises:
        ConfigError: ``splits`` does not match the value or the number of ranks. Or it is missing, and rows
            cannot be divided evenly.
        {rank_errors}
    """
    counts = None if splits is None else as_array(splits)
    return _values.alltoall(value, counts, name, process_set)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Convert a number, array, variable or tensor of the Keras backend to a NumPy array."""
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        value = keras.ops.convert_to_numpy(value)
    return np.asarray(value)


def _run(operation: Operation, values: Sequence[Any]) -> List[np.ndarray[Any, Any]]:
    return Batch([operation]).run([as_array(value) for value in values])


_values = TreeCollectives(lambda value: ([as_array(value)], itemgetter(0)), _run)


@documented
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Assign the root's values to Keras variables on all ranks, in one operation.

    Args:
        variables: Keras variables, of the same shapes and dtypes in the same order on all ranks, for example
            ``model.weights``.
        {root_rank}
        {process_set}

    Raises:
        {rank_errors}
    """
    listed = list(variables)
    if not listed or size_of(process_set) == 1:
        return
    how = Reduction(process_set=process_set)
    results = _run(Operation("broadcast", how, None, len(listed), root_rank), listed)
    if api.rank() != root_rank:
        for variable, result in zip(listed, results):
            variable.assign(result)
