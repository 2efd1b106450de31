"""All-reduces of several NumPy arrays as one operation: all of them are reduced, or none.

As in :mod:`.async_calls`, functions without a trailing underscore copy their input, and functions
with one work in the caller's own arrays.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from .. import api
from ..arrays.operands import mirrors, submitted
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle
from ..ops import ReduceOp, op_of
from .process_set import ProcessSet, number_of


@documented
def grouped_allreduce_async(
    arrays: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
    compression: Any = None,
    weight: Optional[float] = None,
) -> Handle:
    """Start an allreduce of copies of several arrays as one operation: all are reduced, or none.

    Args:
        {arrays_in}
        {matched_reduction}
        {codec}
        {weight}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays.

    Raises:
        {start_errors}
    """
    operands = [submitted(api.context().staging, array) for array in arrays]
    factors = prescale_factor, postscale_factor
    return _start(operands, op, name, factors, process_set, compression, weight)


@documented
def grouped_allreduce_async_(
    arrays: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
    compression: Any = None,
    weight: Optional[float] = None,
) -> Handle:
    """Start an allreduce of several arrays in place as one operation: all are reduced, or none.

    Args:
        {arrays_pending}
        {matched_reduction}
        {codec}
        {weight}

    Returns:
        a handle; its ``wait()`` returns a list of the arrays themselves.

    Raises:
        Misuse: it is not a NumPy array, or it is read-only.
        {start_errors}
    """
    operands = [submitted(api.context().staging, array, "grouped_allreduce_async_") for array in arrays]
    factors = prescale_factor, postscale_factor
    return _start(operands, op, name, factors, process_set, compression, weight)


def _start(
    operands: Sequence[Any], op: ReduceOp, name: Optional[str], factors: Tuple[float, float],
    process_set: Optional[ProcessSet], compression: Any, weight: Optional[float],
) -> Handle:  # fmt: skip
    return api.context().engine.allreduce(
        [operand.flat for operand in operands], op_of(op), name, [operand.shape for operand in operands],
        *factors, number_of(process_set), convert=lambda _: [operand.finish() for operand in operands],
        compression=compression, weight=weight, mirrors=mirrors(operands),
    )  # fmt: skip


@documented
def grouped_allreduce(arrays: Sequence[Any], **options: Any) -> List[Array]:
    """Reduce several arrays over all ranks as one operation: all are reduced, or none.

    Example: ``weights, bias = rc.grouped_allreduce([weights, bias], op=rc.Sum)``.

    Args:
        {arrays_in}
        {grouped_options}

    Returns:
        a list of new arrays.

    Raises:
        {call_errors}
    """
    result: List[Array] = grouped_allreduce_async(arrays, **options).wait()
    return result


@documented
def grouped_allreduce_(arrays: Sequence[Array], **options: Any) -> List[Array]:
    """Reduce several arrays over all ranks in place as one operation: all are reduced, or none.

    Example: ``rc.grouped_allreduce_([weights, bias], op=rc.Sum, name="layer1")``.

    Args:
        {arrays_pending}
        {grouped_options}

    Returns:
        a list of the arrays themselves.

    Raises:
        Misuse: it is not a NumPy array, or it is read-only.
        {call_errors}
    """
    result: List[Array] = grouped_allreduce_async_(arrays, **options).wait()
    return result
