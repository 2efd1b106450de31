"""The synchronous collectives of the default context, among all ranks or among those of a process set.

Among all ranks they are the methods of :class:`~ringcomm.calls.collectives.Collectives`, matched by their
order. Among the ranks of a set they are the asynchronous collectives, waited for at once: matched by name, or
by their order in the set.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .. import api
from ..arrays.operands import flat_view, operand_of
from ..collective.options import DIRECT_ORDER, Options, takes
from ..collective.rows import check_rows, scatter_layout
from ..docstrings import documented
from ..dtypes import Array
from ..engine.process_sets import GLOBAL_SET
from ..errors import BrokenInvariantError, DesyncError
from ..job.context import Context
from ..ops import ReduceOp
from .async_calls import (
    all_submitted,
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
    return start_allreduce(all_submitted([array]), options).wait()


@takes("allreduce", DIRECT_ORDER, "direct")
def allreduce_(array: Array, options: Options) -> Array:
    """Reduce an array over all ranks in place: the result overwrites ``array`` on every rank.

    {allreduce_}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced(array, "allreduce_", options)
    return start_allreduce(all_submitted([array], "allreduce_"), options).wait()


@takes("reducescatter", texts="direct")
def reducescatter(array: Any, options: Options) -> Array:
    """Reduce an array over all ranks; every rank gets only its rows of the result.

    Example: ``rows = rc.reducescatter(np.ones((4, 2)), op=rc.Sum)`` gives 2 rows to each of 2 ranks.

    {reducescatter}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced_rows(array, "", options)
    return start_reducescatter(all_submitted([array], rows=True), options).wait()


@takes("reducescatter", texts="direct")
def reducescatter_(array: Array, options: Options) -> Array:
    """Reduce an array over all ranks, using it as working space; every rank gets only its rows.

    {reducescatter_}
        {direct_errors}
    """
    if options.process_set is None or not number_of(options.process_set):
        return api.context().reduced_rows(array, "reducescatter_", options)
    _, (first, last) = _own_rows(array, options, "reducescatter_")
    part = operand_of(api.context().staging, array[first:last], "reducescatter_")
    return part.fill(start_reducescatter(all_submitted([array], rows=True), options).wait())


@documented
def allgather(array: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> Array:
    """Concatenate every rank's array along the first dimension, in rank order.

    Example: ``losses = rc.allgather(np.array([loss]))`` has one element per rank.

    {allgather_in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().allgather(array, name)
    return allgather_async(array, name, process_set).wait()


@documented
def allgather_(array: Array, name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> Array:
    """Complete an array of which every rank has only its rows: the inverse of ``reducescatter_``.

    Each rank contributes the rows that ``reducescatter`` would give it. The other rows are overwritten.

    {allgather__in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().allgather_(array, name)
    edges, (first, last) = _own_rows(array, Options(process_set=process_set), "allgather_")
    whole = operand_of(api.context().staging, array, "allgather_")
    own = all_submitted([array[first:last]], rows=True)
    return whole.fill(start_allgather(own, name, process_set, bounds=edges).wait())


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
    return broadcast_async(array, root_rank, name, process_set).wait()


@documented
def broadcast_(
    array: Array, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Array:
    """Overwrite ``array`` on every rank with the root's array.

    {broadcast__in_set}
        {direct_errors}
    """
    if process_set is None or not number_of(process_set):
        return api.context().broadcast_(array, root_rank, name)
    return broadcast_async_(array, root_rank, name, process_set).wait()


@documented
def alltoall(
    array: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Any:  # fmt: skip
    """Send rows to every rank, and receive rows from every rank.

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
    (rows,) = all_submitted([array], rows=True)
    return whole.fill(start_alltoall(rows, None, name, process_set, in_place=True).wait()[0])


@documented
def barrier(name: Optional[str] = None, process_set: Optional[ProcessSet] = None) -> None:
    """Wait until every rank has called this.

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


# ---- whether all ranks hold the same arrays ----------------------------------------------------------------

# Each rank hashes its arrays. One allreduce (Max) of 8 bytes compares the hashes: of the hash, folded to 32
# bits, and of its complement. The largest complement belongs to the smallest hash, so the two results are
# complements of each other only if all hashes are equal. If not, the ranks exchange the hash of every array
# (64 bits), and every rank finds the same differing ranks.

Arrays = Union[Mapping[str, Any], Iterable[Any]]


def check_same(arrays: Arrays, process_set: Optional[ProcessSet] = None) -> None:
    """Check that the arrays of all ranks are equal, bit for bit. All ranks must call this.

    Example: ``rc.check_same({name: item.numpy() for name, item in model.state_dict().items()})``.

    Args:
        arrays: NumPy arrays, as a mapping by name (in the same order on all ranks) or as a sequence. Names,
            shapes and dtypes are compared, too.
        process_set: the ranks that are compared; by default all ranks of the job.

    Raises:
        DesyncError: (on every rank) some arrays differ. It names the first such array, and the ranks that
            differ.
        MismatchError: ranks pass different numbers of arrays.
        PeerLostError: a rank ended, or is silent for too long.
    """
    if isinstance(arrays, np.ndarray):
        arrays = [arrays]
    named = arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays)
    compare(api.context(), [(str(name), array) for name, array in named], number_of(process_set))


def compare(context: Context, named: Sequence[Tuple[str, Any]], process_set: int = GLOBAL_SET) -> None:
    """Raise DesyncError if members of a process set hold different arrays; same order on all ranks."""
    members = context.engine.sets.members(process_set)
    if len(members) == 1:
        return
    hashes = np.array([hash_of(name, array) for name, array in named], np.uint64)
    whole = int.from_bytes(hashlib.blake2b(hashes.tobytes(), digest_size=8).digest(), "little")
    folded = (whole ^ whole >> 32) & 0xFFFFFFFF
    vote = np.array([folded, ~folded & 0xFFFFFFFF], np.uint32)
    context.engine.allreduce(
        [vote], ReduceOp.MAX, "ringcomm.check_same", process_set=process_set, urgent=True
    ).wait()
    if int(vote[0]) == ~int(vote[1]) & 0xFFFFFFFF:
        return
    table = np.zeros((len(members), hashes.size), np.uint64)
    table[members.index(context.rank)] = hashes
    context.engine.allreduce(
        [table.reshape(-1)], ReduceOp.SUM, "ringcomm.check_same: ranks, arrays", [table.shape],
        process_set=process_set, urgent=True,
    ).wait()  # fmt: skip
    # A row of zeros is of a rank that has joined.
    rows = {rank: row.tolist() for rank, row in zip(members, table) if row.any()}
    raise difference([name for name, _ in named], rows, {peer.rank: peer.host for peer in context.peers})


def hash_of(name: str, array: Any) -> int:
    """Return a 64-bit hash of an array's name, shape, dtype and bytes."""
    flat, shape = flat_view(array)
    found = hashlib.blake2b(f"{name} {flat.dtype} {shape}".encode(), digest_size=8)
    found.update((flat.view(np.uint8) if flat.size else flat).data)
    return int.from_bytes(found.digest(), "little")


def difference(
    names: Sequence[str], hashes: Mapping[int, Sequence[int]], hosts: Mapping[int, str]
) -> DesyncError:
    """Return the error for the first array whose hashes, by rank, are not all equal."""
    places = [index for index in range(len(names)) if len({row[index] for row in hashes.values()}) > 1]
    if not places:
        raise BrokenInvariantError("check_same() found a difference between equal arrays")
    first = places[0]
    groups: Dict[int, List[int]] = {}
    for rank in sorted(hashes):
        groups.setdefault(hashes[rank][first], []).append(rank)
    by_size = sorted(groups.values(), key=len, reverse=True)
    minority = sorted(rank for group in by_size[1:] for rank in group)
    tied = len(by_size[0]) == len(by_size[1])
    which = " and ".join(_ranks(group, hosts) for group in by_size[:4]) + " differ from each other"
    if not tied:
        which = f"{_ranks(minority, hosts)} {'differs' if len(minority) == 1 else 'differ'} from the others"
    more = f", and {len(places) - 1} more of {len(names)}" if len(places) > 1 else ""
    return DesyncError(
        f"The ranks no longer hold the same numbers: in {names[first]!r}{more}, {which}. Broadcast "
        "parameters and the optimizer's state when training starts, use the same seed on all ranks for what "
        "must be equal, and change parameters only by what was reduced over all ranks.",
        tensor=names[first],
        ranks=None if tied else tuple(minority),
    )


def _ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({hosts[ranks[0]]})"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', …' if len(ranks) > 8 else ''}"
