"""The reductions of NDArrays: all-reduces and reduce-scatters. A call returns when its result is there."""

from __future__ import annotations

from typing import List, Sequence

import mxnet as mx

from .._adapter.reduction import Reduction
from .._adapter.submit import Operands, start_allreduce, start_reducescatter
from ..collective.call_sites import look_through
from ..collective.options import Options, takes
from .arrays import NDArrayOperand, copy_of, dense

__all__ = [
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter",
    "reducescatter",
]  # fmt: skip

look_through(mx)


@takes("allreduce", "average name priority prescale_factor postscale_factor process_set op weight", "mx")
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


@takes("allreduce", "average name priority prescale_factor postscale_factor process_set op weight", "mx")
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


@takes("allreduce", "average name priority prescale_factor postscale_factor process_set op weight", "mx")
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


@takes("allreduce", "average name priority prescale_factor postscale_factor process_set op weight", "mx")
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
