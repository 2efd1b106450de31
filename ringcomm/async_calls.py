"""Collectives on NumPy arrays that are matched by name and come back as handles.

Functions without a trailing underscore copy their input before they return, so the caller may change it at
once. Those with one work in the caller's own array, which must be left alone until the handle is done.
"""

from __future__ import annotations

from typing import Any, ContextManager, List, Optional, Sequence

from . import api
from .arrays.bridge import InPlace, flat_copy
from .arrays.rows import check_splits, row_items
from .dtypes import Array
from .engine.request import Handle
from .ops import ReduceOp, op_of
from .process_set import ProcessSet, number_of


def allreduce_async(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start an allreduce of a copy of ``array``; ``handle.wait()`` gives a new array.

    Ranks may start their operations in any order: those of the same ``name`` belong together, and
    those without a name by their order.
    """
    flat, shape = flat_copy(array)
    return api.context().engine.allreduce(
        [flat], op_of(op), name, [shape], prescale_factor, postscale_factor, number_of(process_set),
        convert=lambda _: flat.reshape(shape),
    )  # fmt: skip


def allreduce_async_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Like :func:`allreduce_async`, overwriting ``array``, which must be left alone until then."""
    target = InPlace(array, "allreduce_async_")
    return api.context().engine.allreduce(
        [target.flat], op_of(op), name, [target.shape], prescale_factor, postscale_factor,
        number_of(process_set), convert=lambda _: target.finish(),
    )  # fmt: skip


def grouped_allreduce_async(
    arrays: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start an allreduce of copies of several arrays, all of them or none; the result is a list of arrays."""
    copies = [flat_copy(array) for array in arrays]
    return api.context().engine.allreduce(
        [flat for flat, _ in copies], op_of(op), name, [shape for _, shape in copies],
        prescale_factor, postscale_factor, number_of(process_set),
        convert=lambda _: [flat.reshape(shape) for flat, shape in copies],
    )  # fmt: skip


def grouped_allreduce_async_(
    arrays: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Like :func:`grouped_allreduce_async`, overwriting the arrays, which must be left alone until then."""
    targets = [InPlace(array, "grouped_allreduce_async_") for array in arrays]
    return api.context().engine.allreduce(
        [target.flat for target in targets], op_of(op), name, [target.shape for target in targets],
        prescale_factor, postscale_factor, number_of(process_set),
        convert=lambda _: [target.finish() for target in targets],
    )  # fmt: skip


def grouped_allreduce(arrays: Sequence[Any], **options: Any) -> List[Array]:
    """:func:`grouped_allreduce_async`, and wait."""
    result: List[Array] = grouped_allreduce_async(arrays, **options).wait()
    return result


def grouped_allreduce_(arrays: Sequence[Array], **options: Any) -> List[Array]:
    """:func:`grouped_allreduce_async_`, and wait: several arrays are overwritten, all of them or none.

    Args:
        arrays: writable NumPy arrays of any layout; equal in number, shapes and types on all ranks.
        options: as for :func:`grouped_allreduce_async_`.

    Returns:
        the arrays themselves.

    Raises:
        Misuse: one of them is no array, or is read-only.
        MismatchError: ranks disagree; no array has been changed.
        PeerLostError: a rank is gone; the arrays hold intermediate sums.

    Example:
        ``rc.grouped_allreduce_([weights, bias], op=rc.Sum, name="layer1")``
    """
    result: List[Array] = grouped_allreduce_async_(arrays, **options).wait()
    return result


def reducescatter_async(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start a reducescatter of a copy; the result is this rank's rows (one more on the first if uneven)."""
    flat, shape = flat_copy(array)
    return api.context().engine.reducescatter(
        [flat], [shape], op_of(op), name, prescale_factor, postscale_factor, number_of(process_set),
        convert=_only,
    )  # fmt: skip


def allgather_async(
    array: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start an allgather of a copy of ``array``; the result is every rank's rows, in rank order."""
    flat, shape = flat_copy(array)
    return api.context().engine.allgather(
        [flat], [shape or (1,)], name, number_of(process_set), convert=_only
    )


def broadcast_async(
    array: Any, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start a broadcast of a copy; the result is a new array. ``root_rank`` is a rank of the job."""
    flat, shape = flat_copy(array)
    return api.context().engine.broadcast(
        [flat], root_rank, name, [shape], number_of(process_set),
        convert=lambda _: flat.reshape(shape),
    )  # fmt: skip


def broadcast_async_(
    array: Array, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Like :func:`broadcast_async`, overwriting ``array``, which must be left alone until then."""
    target = InPlace(array, "broadcast_async_")
    return api.context().engine.broadcast(
        [target.flat], root_rank, name, [target.shape], number_of(process_set),
        convert=lambda _: target.finish(),
    )  # fmt: skip


def alltoall_async(
    array: Any,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start an alltoall of a copy; the result is a pair: the rows, and how many came from each member."""
    flat, shape = flat_copy(array)
    engine = api.context().engine
    number = number_of(process_set)
    size = len(engine.sets.check_member(number))
    row_items(shape, "alltoall")
    counts = check_splits(shape[0], splits, size)
    return engine.alltoall(flat, shape, counts, name, number)


def join() -> int:
    """Say that this rank has run out of data, and wait until all have.

    Until then its contributions to the others' allreduces are zeros (or whatever leaves theirs as they
    are); an average is still over all ranks.

    Returns:
        the rank that joined last, whose state is the newest.
    """
    last: int = api.context().engine.join().wait()
    return last


def pause(reason: str) -> ContextManager[None]:
    """``with rc.pause("saving checkpoint"):`` announces that this rank will be away for long.

    As long as it is, nobody warns or gives up because it does not come to what others wait for.
    """
    return api.context().engine.pause(reason)


def poll(handle: Handle) -> bool:
    """Whether an operation is done, so that :func:`synchronize` would not wait."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and take its result, or raise its error."""
    return handle.wait()


def _only(results: Sequence[Any]) -> Any:
    return results[0]
