"""The reductions of NDArrays: all-reduces and reduce-scatters. A call returns when its result is there."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import mxnet as mx

from .._adapter.arguments import reduction
from .._adapter.reduction import Reduction
from .._adapter.submit import Operands, start_allreduce, start_reducescatter
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.call_sites import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..ops import ReduceOp
from .arrays import NDArrayOperand, copy_of, dense

__all__ = [
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter",
    "reducescatter",
]  # fmt: skip

look_through(mx)


@documented
def allreduce(
    tensor: mx.nd.NDArray,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
    weight: Optional[float] = None,
    compression: Any = None,
) -> mx.nd.NDArray:
    """Reduce an NDArray of the same shape and dtype over all ranks; every rank gets the result.

    Example: ``mean = hvd.allreduce(loss.mean(), name="loss")``.

    Args:
        {tensor_in}
        {mx_options}

    Returns:
        a new NDArray of the same shape, dtype and context, bit-identical on all ranks.

    Raises:
        ConfigError: it is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    (result,) = grouped_allreduce(
        [tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op, weight,
        compression,
    )  # fmt: skip
    return result


@documented
def allreduce_(
    tensor: mx.nd.NDArray,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
    weight: Optional[float] = None,
    compression: Any = None,
) -> mx.nd.NDArray:
    """Reduce an NDArray over all ranks in place, on the CPU without any copy.

    Args:
        {tensor_inplace}
        {mx_options}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    (result,) = grouped_allreduce_(
        [tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op, weight,
        compression,
    )  # fmt: skip
    return result


@documented
def grouped_allreduce(
    tensors: Sequence[mx.nd.NDArray],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
    weight: Optional[float] = None,
    compression: Any = None,
) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays over all ranks as one operation: all are reduced, or none.

    Args:
        {tensors_in}
        {mx_options}

    Returns:
        a list of new NDArrays, in order.

    Raises:
        ConfigError: one is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    how = Reduction(reduction(op, average), prescale_factor, postscale_factor, process_set)
    operands = [copy_of(dense(tensor, "allreduce")) for tensor in tensors]
    return _reduce(operands, how, name, weight, compression)


@documented
def grouped_allreduce_(
    tensors: Sequence[mx.nd.NDArray],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
    weight: Optional[float] = None,
    compression: Any = None,
) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays in place as one operation: all are reduced, or none.

    Args:
        {tensors_inplace}
        {mx_options}

    Returns:
        a list of the NDArrays themselves.

    Raises:
        ConfigError: one is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    how = Reduction(reduction(op, average), prescale_factor, postscale_factor, process_set)
    operands = [NDArrayOperand(dense(tensor, "allreduce_")) for tensor in tensors]
    return _reduce(operands, how, name, weight, compression)


def _reduce(
    operands: Operands, how: Reduction, name: Optional[str], weight: Optional[float], compression: Any
) -> List[mx.nd.NDArray]:
    if not operands:
        return []
    handle = start_allreduce(operands, how, name, True, True, weight=weight, compression=compression)
    reduced: List[mx.nd.NDArray] = handle.wait()
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
    handle = start_reducescatter(operands, how, options.name, True, True, options.weight)
    parts: List[mx.nd.NDArray] = handle.wait()
    return parts
