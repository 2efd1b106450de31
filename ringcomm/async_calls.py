"""Collectives on NumPy arrays that are matched by name and come back as handles."""

from __future__ import annotations

from typing import Any, ContextManager, List, Optional, Sequence

from . import api
from .arrays.bridge import InPlace, flat_copy, flat_view
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
    """Start an allreduce; ``handle.wait()`` gives a new array.

    Ranks may start their operations in any order: those of the same ``name`` belong together, and
    those without a name by their order.
    """
    flat, shape = flat_copy(array)
    return api.context().engine.allreduce(
        [flat], op_of(op), name or "", [shape], prescale_factor, postscale_factor, number_of(process_set),
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
        [target.flat], op_of(op), name or "", [target.shape], prescale_factor, postscale_factor,
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
    """Start an allreduce of several arrays, all of them or none; the result is a list of arrays."""
    copies = [flat_copy(array) for array in arrays]
    return api.context().engine.allreduce(
        [flat for flat, _ in copies], op_of(op), name or "", [shape for _, shape in copies],
        prescale_factor, postscale_factor, number_of(process_set),
        convert=lambda _: [flat.reshape(shape) for flat, shape in copies],
    )  # fmt: skip


def grouped_allreduce(arrays: Sequence[Any], **options: Any) -> List[Array]:
    """:func:`grouped_allreduce_async`, and wait."""
    result: List[Array] = grouped_allreduce_async(arrays, **options).wait()
    return result


def reducescatter_async(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start a reducescatter; the result is this rank's rows: the first ranks get one more if uneven."""
    flat, shape = flat_copy(array)
    return api.context().engine.reducescatter(
        [flat], [shape], op_of(op), name or "", prescale_factor, postscale_factor, number_of(process_set),
        convert=_only,
    )  # fmt: skip


def allgather_async(
    array: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start an allgather; the result is everybody's rows, in rank order."""
    flat, shape = flat_view(array)
    return api.context().engine.allgather(
        [flat], [shape or (1,)], name or "", number_of(process_set), convert=_only
    )


def broadcast_async(
    array: Any, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start a broadcast; the result is a new array. ``root_rank`` is a rank of the job."""
    flat, shape = flat_copy(array)
    return api.context().engine.broadcast(
        [flat], root_rank, name or "", [shape], number_of(process_set),
        convert=lambda _: flat.reshape(shape),
    )  # fmt: skip


def broadcast_async_(
    array: Array, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Like :func:`broadcast_async`, overwriting ``array``, which must be left alone until then."""
    target = InPlace(array, "broadcast_async_")
    return api.context().engine.broadcast(
        [target.flat], root_rank, name or "", [target.shape], number_of(process_set),
        convert=lambda _: target.finish(),
    )  # fmt: skip


def alltoall_async(
    array: Any,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start an alltoall; the result is a pair: the rows, and how many came from each member."""
    flat, shape = flat_view(array)
    engine = api.context().engine
    number = number_of(process_set)
    size = len(engine.sets.check_member(number))
    row_items(shape, "alltoall")
    counts = check_splits(shape[0], splits, size)
    return engine.alltoall(flat, shape, counts, name or "", number)


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
