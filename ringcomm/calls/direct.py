"""The synchronous collectives of the default context, among all ranks or among those of a process set.

Among all ranks they are the methods of :class:`~ringcomm.calls.collectives.Collectives`, matched by their
order. Among the ranks of a set they are the asynchronous collectives, waited for at once: matched by name, or
by their order in the set.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

from .. import api
from ..arrays.operands import operand_of
from ..collective.options import DIRECT_ORDER, Options, takes
from ..collective.rows import check_rows, scatter_layout
from ..docstrings import documented
from ..dtypes import Array
from .async_calls import (
    allgather_async,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_reducescatter,
)
from .process_set import ProcessSet, global_process_set, number_of, rank_in, size_of


@takes("allreduce", DIRECT_ORDER, "direct")
def allreduce(array: Any, options: Options) -> Array:
    """Reduce an array of the same shape and dtype over all ranks; every rank gets the result.

    Example: ``mean = rc.allreduce(gradient)``, ``total = rc.allreduce([1.0, 2.0], op=rc.Sum)``,
    ``mean = rc.allreduce(gradient, weight=len(batch))``.

    {allreduce}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced(array, "", options)
    result: Array = start_allreduce([array], options).wait()
    return result


@takes("allreduce", DIRECT_ORDER, "direct")
def allreduce_(array: Array, options: Options) -> Array:
    """Reduce an array over all ranks in place: the result overwrites ``array`` on every rank.

    {allreduce_}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced(array, "allreduce_", options)
    result: Array = start_allreduce([array], options, "allreduce_").wait()
    return result


@takes("reducescatter", texts="direct")
def reducescatter(array: Any, options: Options) -> Array:
    """Reduce an array over all ranks; every rank gets only its rows of the result.

    Example: ``rows = rc.reducescatter(np.ones((4, 2)), op=rc.Sum)`` gives 2 rows to each of 2 ranks.

    {reducescatter}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced_rows(array, "", options)
    result: Array = start_reducescatter([array], options).wait()
    return result


@takes("reducescatter", texts="direct")
def reducescatter_(array: Array, options: Options) -> Array:
    """Reduce an array over all ranks with ``array`` as working space; every rank gets only its rows.

    {reducescatter_}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced_rows(array, "reducescatter_", options)
    _, (first, last) = _own_rows(array, options, "reducescatter_")
    part = operand_of(api.context().staging, array[first:last], "reducescatter_")
    return part.fill(start_reducescatter([array], options).wait())


@documented
def allgather(array: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> Array:
    """Concatenate every rank's array along the first dimension, in rank order.

    Example: ``losses = rc.allgather(np.array([loss]))`` has one element per rank.

    {allgather_in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().allgather(array, name)
    result: Array = allgather_async(array, name, process_set).wait()
    return result


@documented
def allgather_(array: Array, name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> Array:
    """Complete an array of which every rank holds its rows: the inverse of ``reducescatter_``.

    Each rank contributes the rows that ``reducescatter`` would give it; the other rows are overwritten.

    {allgather__in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().allgather_(array, name)
    edges, (first, last) = _own_rows(array, Options(process_set=process_set), "allgather_")
    whole = operand_of(api.context().staging, array, "allgather_")
    return whole.fill(start_allgather([array[first:last]], name, process_set, bounds=edges).wait())


@documented
def broadcast(
    array: Any, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Array:
    """Copy the root's array to every rank.

    Example: ``weights = rc.broadcast(weights, root_rank=0)``.

    {broadcast_in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().broadcast(array, root_rank, name)
    result: Array = broadcast_async(array, root_rank, name, process_set).wait()
    return result


@documented
def broadcast_(
    array: Array, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Array:
    """Overwrite ``array`` on every rank with the root's.

    {broadcast__in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().broadcast_(array, root_rank, name)
    result: Array = broadcast_async_(array, root_rank, name, process_set).wait()
    return result


@documented
def alltoall(
    array: Any,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Any:
    """Send a part of the rows to every rank, and receive a part of the rows of every rank.

    Example: ``rows, counts = rc.alltoall(rows, splits=[3, 1])`` on 2 ranks.

    {alltoall_in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().alltoall(array, splits, name)
    rows, counts = alltoall_async(array, splits, name, process_set).wait()
    return rows if splits is None else (rows, counts)


@documented
def alltoall_(array: Array, name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> Array:
    """Exchange rows with every rank in place; every rank gets equally many rows.

    {alltoall__in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().alltoall_(array, name)
    whole = operand_of(api.context().staging, array, "alltoall_")
    return whole.fill(start_alltoall(array, None, name, process_set, True).wait()[0])


@documented
def barrier(name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> None:
    """Wait until every rank has called it.

    {barrier_in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        api.context().barrier(name)
    else:
        api.context().engine.barrier(name, number_of(process_set)).wait()


def _own_rows(array: Any, options: Options, function: str) -> Tuple[Sequence[int], Sequence[int]]:
    """Return the row boundaries of all members after ``reducescatter``, and those of this member."""
    shape = operand_of(api.context().staging, array, function).shape
    check_rows(function, (shape,))
    members = options.process_set or global_process_set
    place, edges = rank_in(members), scatter_layout((shape,), size_of(members), options).edges[0]
    return edges, edges[place : place + 2]
