"""Collectives of several NumPy arrays as one operation: all of them are run, or none.

As in :mod:`.async_calls`, functions without a trailing underscore copy their input, and functions
with one work in the caller's own arrays.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from ..collective.options import Options, takes
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle
from .async_calls import start_allgather, start_allreduce, start_reducescatter
from .process_set import ProcessSet


@takes("allreduce", texts="core")
def grouped_allreduce_async(arrays: Sequence[Any], options: Options) -> Handle:
    """Start an allreduce of copies of several arrays as one operation: all are reduced, or none.

    Args:
        {arrays_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays.

    Raises:
        {start_errors}
    """
    return start_allreduce(arrays, options, grouped=True)


@takes("allreduce", texts="core")
def grouped_allreduce_async_(arrays: Sequence[Array], options: Options) -> Handle:
    """Start an allreduce of several arrays in place as one operation: all are reduced, or none.

    Args:
        {arrays_pending}
        {options}

    Returns:
        a handle; its ``wait()`` returns a list of the arrays themselves.

    Raises:
        Misuse: it is not a NumPy array, or it is read-only.
        {start_errors}
    """
    return start_allreduce(arrays, options, "grouped_allreduce_async_", True)


@takes("allreduce", texts="core")
def grouped_allreduce(arrays: Sequence[Any], options: Options) -> List[Array]:
    """Reduce several arrays over all ranks as one operation: all are reduced, or none.

    Example: ``weights, bias = rc.grouped_allreduce([weights, bias], op=rc.Sum)``.

    Args:
        {arrays_in}
        {options}

    Returns:
        a list of new arrays.

    Raises:
        {call_errors}
    """
    result: List[Array] = start_allreduce(arrays, options, grouped=True).wait()
    return result


@takes("allreduce", texts="core")
def grouped_allreduce_(arrays: Sequence[Array], options: Options) -> List[Array]:
    """Reduce several arrays over all ranks in place as one operation: all are reduced, or none.

    Example: ``rc.grouped_allreduce_([weights, bias], op=rc.Sum, name="layer1")``.

    Args:
        {arrays_pending}
        {options}

    Returns:
        a list of the arrays themselves.

    Raises:
        Misuse: it is not a NumPy array, or it is read-only.
        {call_errors}
    """
    result: List[Array] = start_allreduce(arrays, options, "grouped_allreduce_", True).wait()
    return result


@takes("reducescatter", texts="core")
def grouped_reducescatter_async(arrays: Sequence[Any], options: Options) -> Handle:
    """Start a reducescatter of copies of several arrays as one operation.

    Args:
        {arrays_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays with this rank's rows of each.

    Raises:
        Misuse: an array has no first dimension.
        {start_errors}
    """
    return start_reducescatter(arrays, options, True)


@takes("reducescatter", texts="core")
def grouped_reducescatter(arrays: Sequence[Any], options: Options) -> List[Array]:
    """Reduce several arrays over all ranks as one operation; every rank gets only its rows of each.

    Args:
        {arrays_in}
        {options}

    Returns:
        a list of new arrays: of ``n`` rows every member of the set gets ``n // size``, the first
        ``n % size`` members one more.

    Raises:
        Misuse: an array has no first dimension.
        {call_errors}
    """
    result: List[Array] = start_reducescatter(arrays, options, True).wait()
    return result


@documented
def grouped_allgather_async(
    arrays: Sequence[Any], name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start an allgather of copies of several arrays as one operation.

    Args:
        {arrays_rows}
        {matching}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays with the rows of all ranks, in rank order.

    Raises:
        {start_errors}
    """
    return start_allgather(arrays, name, process_set, True)


@documented
def grouped_allgather(
    arrays: Sequence[Any], name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> List[Array]:
    """Concatenate every rank's arrays along the first dimension, several of them as one operation.

    Args:
        {arrays_rows}
        {matching}

    Returns:
        a list of new arrays with the rows of all ranks, in rank order. The number of rows may differ from
        rank to rank; a zero-dimensional array counts as one row.

    Raises:
        {call_errors}
    """
    result: List[Array] = grouped_allgather_async(arrays, name, process_set).wait()
    return result
