"""The collectives on NDArrays. A call returns when its result is there."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import mxnet as mx
import numpy as np

from .._adapter.reduction import Reduction
from .._adapter.submit import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from ..calls.async_calls import Operands
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.observe import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..errors import ConfigError, ShapeError
from .arrays import NDArrayOperand, copy_of, dense

look_through(mx)

_ALLREDUCE = "average name priority prescale_factor postscale_factor process_set op weight"


@takes("allreduce", _ALLREDUCE, "mx")
def allreduce(tensor: mx.nd.NDArray, options: Options) -> mx.nd.NDArray:
    """Reduce an NDArray of the same shape and dtype over all ranks; every rank gets the result.

    Example: ``mean = hvd.allreduce(loss.mean(), name="loss")``.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new NDArray of the same shape, dtype and context, bit-identical on all ranks.

    Raises:
        ConfigError: it is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([copy_of(dense(tensor, "allreduce"))], options)[0]


@takes("allreduce", _ALLREDUCE, "mx")
def allreduce_(tensor: mx.nd.NDArray, options: Options) -> mx.nd.NDArray:
    """Reduce an NDArray over all ranks in place, on the CPU without any copy.

    Args:
        {tensor_inplace}
        {options}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([NDArrayOperand(dense(tensor, "allreduce_"))], options)[0]


@takes("allreduce", _ALLREDUCE, "mx")
def grouped_allreduce(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays over all ranks as one operation: all are reduced, or none.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new NDArrays, in order.

    Raises:
        ConfigError: one is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([copy_of(dense(tensor, "allreduce")) for tensor in tensors], options)


@takes("allreduce", _ALLREDUCE, "mx")
def grouped_allreduce_(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays in place as one operation: all are reduced, or none.

    Args:
        {tensors_inplace}
        {options}

    Returns:
        a list of the NDArrays themselves.

    Raises:
        ConfigError: one is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([NDArrayOperand(dense(tensor, "allreduce_")) for tensor in tensors], options)


def _reduce(operands: Operands, options: Options) -> List[mx.nd.NDArray]:
    if not operands:
        return []
    reduced: List[mx.nd.NDArray] = start_allreduce(operands, options, True, True).wait()
    return reduced


@takes("reducescatter", "op name priority process_set prescale_factor postscale_factor", "mx")
def reducescatter(tensor: mx.nd.NDArray, options: Options) -> mx.nd.NDArray:
    """Reduce an NDArray over all ranks; every rank gets only its rows of the result.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new NDArray with this rank's rows: of ``n`` rows every member of the set gets ``n // size``, the
        first ``n % size`` members one more.

    Raises:
        ConfigError: it is not a dense NDArray.
        NotOfferedError: op is Adasum.
        ShapeError: the NDArray has no first dimension.
        {call_errors}
    """
    return _scatter([tensor], options)[0]


@takes("reducescatter", "op name priority process_set prescale_factor postscale_factor", "mx")
def grouped_reducescatter(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays as one operation; every rank gets only its rows of each result.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new NDArrays with this rank's rows.

    Raises:
        ConfigError: one is not a dense NDArray.
        NotOfferedError: op is Adasum.
        ShapeError: an NDArray has no first dimension.
        {call_errors}
    """
    return _scatter(tensors, options)


def _scatter(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    how = Reduction.of_rows(options)
    if not tensors:
        return []
    operands = [copy_of(dense(tensor, "reducescatter")) for tensor in tensors]
    called = how.call(options.name, options.weight, how.compression)
    parts: List[mx.nd.NDArray] = start_reducescatter(operands, called, True, True).wait()
    return parts


@documented
def allgather(
    tensor: mx.nd.NDArray, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:  # fmt: skip
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
    tensors: Sequence[mx.nd.NDArray], name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> List[mx.nd.NDArray]:  # fmt: skip
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
    tensor: mx.nd.NDArray, root_rank: int, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:  # fmt: skip
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
    tensor: mx.nd.NDArray, root_rank: int, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:  # fmt: skip
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
    tensor: mx.nd.NDArray, splits: Any = None, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
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
        ConfigError: it is not a dense NDArray.
        ShapeError: the splits are not integers or do not fit the NDArray, or it has no first dimension.
        {call_errors}
    """
    operand = NDArrayOperand(dense(tensor, "alltoall"), rows=True)
    counts = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits
    try:
        handle = start_alltoall(
            operand, counts, name, process_set, True,
            lambda numbers: operand.deliver(np.asarray(numbers, np.int32)),
        )  # fmt: skip
    except ConfigError as problem:
        # Horovod's adapter for MXNet raises a RuntimeError, which a ShapeError is too.
        raise ShapeError(str(problem)) from None
    rows, received = handle.wait()
    return rows if splits is None else (rows, received)
