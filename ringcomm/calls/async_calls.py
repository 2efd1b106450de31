"""Asynchronous collectives on NumPy arrays: matched by name among the ranks, with a handle as result.

Functions without a trailing underscore copy their input before they return, so the caller may change it at
once. Functions with one work in the caller's own array, which must not be used until the handle is done.
"""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Optional, Sequence

from .. import api
from ..arrays.operands import Operand, mirrors, submitted
from ..collective.options import Options, takes
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import Misuse
from .process_set import ProcessSet, number_of


@takes("allreduce", texts="core")
def allreduce_async(array: Any, options: Options) -> Handle:
    """Start an allreduce of a copy of an array.

    Example: ``handle = rc.allreduce_async(gradient, name="layer1"); mean = handle.wait()``.

    Args:
        {array_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a new array of the same shape and dtype.

    Raises:
        {start_errors}
    """
    return start_allreduce([array], options)


@takes("allreduce", texts="core")
def allreduce_async_(array: Array, options: Options) -> Handle:
    """Start an allreduce in place: the result overwrites ``array`` on every rank.

    Args:
        {array_pending}
        {options}

    Returns:
        a handle; its ``wait()`` returns ``array`` itself.

    Raises:
        Misuse: it is not a NumPy array, or it is read-only.
        {start_errors}
    """
    return start_allreduce([array], options, "allreduce_async_")


def start_allreduce(
    arrays: Sequence[Any], options: Options, in_place: str = "", grouped: bool = False
) -> Handle:
    """Start an allreduce; ``in_place`` is the function's name if the arrays are overwritten, else ""."""
    context = api.context()
    operands = [submitted(context.staging, array, in_place) for array in arrays]
    return context.engine.allreduce(
        [item.flat for item in operands], options, options.name, [item.shape for item in operands],
        number_of(options.process_set), convert=finisher(operands, grouped), mirrors=mirrors(operands),
    )  # fmt: skip


@takes("reducescatter", texts="core")
def reducescatter_async(array: Any, options: Options) -> Handle:
    """Start a reducescatter of a copy of an array: every rank gets only its rows of the result.

    Args:
        {array_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a new array with this rank's rows: of ``n`` rows every member of
        the set gets ``n // size``, the first ``n % size`` members one more.

    Raises:
        Misuse: the array has no first dimension.
        {start_errors}
    """
    return start_reducescatter([array], options)


def start_reducescatter(arrays: Sequence[Any], options: Options, grouped: bool = False) -> Handle:
    """Start a reducescatter of copies of arrays; a list as result if ``grouped``."""
    context = api.context()
    operands = [submitted(context.staging, array, rows=True) for array in arrays]
    return context.engine.reducescatter(
        [item.flat for item in operands], [item.shape for item in operands], options,
        number_of(options.process_set), convert=deliverer(operands, grouped), mirrors=mirrors(operands),
    )  # fmt: skip


@documented
def allgather_async(
    array: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start an allgather of a copy of an array.

    Args:
        {array_rows}
        {matching}

    Returns:
        a handle; its ``wait()`` returns a new array with the rows of all ranks, in rank order. The number of
        rows may differ from rank to rank.

    Raises:
        {start_errors}
    """
    return start_allgather([array], name, process_set)


def start_allgather(
    arrays: Sequence[Any],
    name: Optional[str],
    process_set: Optional[ProcessSet],
    grouped: bool = False,
    bounds: Sequence[int] = (),
) -> Handle:
    """Start an allgather of copies.

    ``bounds`` are the ranks' row boundaries if it completes arrays in place.
    """
    context = api.context()
    operands = [submitted(context.staging, array, rows=True) for array in arrays]
    return context.engine.allgather(
        [item.flat for item in operands], [item.shape or (1,) for item in operands], name,
        number_of(process_set), convert=deliverer(operands, grouped), mirrors=mirrors(operands),
        bounds=bounds,
    )  # fmt: skip


@documented
def broadcast_async(
    array: Any, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start copying the root's array to every rank, as a new array.

    Args:
        {array_in}
        {root_rank}
        {matching}

    Returns:
        a handle; its ``wait()`` returns a new array with the root's elements.

    Raises:
        {start_errors}
    """
    context = api.context()
    argument = submitted(context.staging, array, read=context.rank == root_rank)
    return context.engine.broadcast(
        [argument.flat], root_rank, name, [argument.shape], number_of(process_set),
        convert=finisher([argument], False), mirrors=mirrors([argument]),
    )  # fmt: skip


@documented
def broadcast_async_(
    array: Array, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start overwriting ``array`` on every rank with the root's.

    Args:
        {array_pending}
        {root_rank}
        {matching}

    Returns:
        a handle; its ``wait()`` returns ``array`` itself.

    Raises:
        Misuse: it is not a NumPy array, or it is read-only.
        {start_errors}
    """
    context = api.context()
    target = submitted(context.staging, array, "broadcast_async_", read=context.rank == root_rank)
    return context.engine.broadcast(
        [target.flat], root_rank, name, [target.shape], number_of(process_set),
        convert=finisher([target], False), mirrors=mirrors([target]),
    )  # fmt: skip


@documented
def alltoall_async(
    array: Any,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start sending a part of the rows to every rank, and receiving a part of the rows of every rank.

    Args:
        {array_rows}
        {splits}
        {matching}

    Returns:
        a handle; its ``wait()`` returns a pair: the received rows in rank order, and the number of rows from
        each member of the set (int32).

    Raises:
        Misuse: the splits do not fit the array, or it has no first dimension.
        {start_errors}
    """
    return start_alltoall(array, splits, name, process_set)


def start_alltoall(
    array: Any,
    splits: Optional[Sequence[int]],
    name: Optional[str],
    process_set: Optional[ProcessSet],
    in_place: bool = False,
) -> Handle:
    """Start an alltoall of a copy; ``in_place`` if the received rows replace the array's."""
    context = api.context()
    rows = submitted(context.staging, array, rows=True)
    return context.engine.alltoall(
        rows.flat, rows.shape, splits, name, number_of(process_set),
        convert=lambda result: (rows.deliver(result[0]), result[1]), mirrors=mirrors([rows]),
        in_place=in_place,
    )  # fmt: skip


def finisher(operands: Sequence[Operand], grouped: bool) -> Callable[[Any], Any]:
    """Return the function that makes the results of operands that have been overwritten."""

    def convert(_: Any) -> Any:
        if not grouped:
            return operands[0].finish()
        return [operand.finish() for operand in operands]

    return convert


def deliverer(operands: Sequence[Operand], grouped: bool) -> Callable[[Any], Any]:
    """Return the function that shapes the engine's results, whose rows differ from the operands'."""

    def convert(arrays: Sequence[Array]) -> Any:
        results = [operand.deliver(rows) for operand, rows in zip(operands, arrays)]
        return results if grouped else results[0]

    return convert


@documented
def join() -> int:
    """Announce that this rank has no more data, and wait until all ranks have announced it.

    Until then this rank contributes the neutral element to the other ranks' allreduces (0 to a sum); an
    average still divides by the number of all ranks.

    Returns:
        the rank that joined last, whose state is the newest.

    Raises:
        PeerLostError: a rank ended, or is silent for too long.
        {not_initialized}
    """
    last: int = api.context().engine.join().wait()
    return last


@documented
def pause(reason: str) -> ContextManager[None]:
    """Announce that this rank will start no collectives for a while, for example while it writes a file.

    During the ``with`` block the other ranks neither warn nor time out because of collectives that this rank
    has not started.

    Example: ``with rc.pause("saving checkpoint"): torch.save(model, path)``.

    Args:
        reason: appears in the other ranks' messages.

    Returns:
        a context manager.

    Raises:
        {not_initialized}
    """
    return api.context().engine.pause(reason)


def poll(handle: Handle) -> bool:
    """Return whether an operation is done, so that :func:`synchronize` would not wait.

    Args:
        handle: from one of the asynchronous collectives.

    Returns:
        True if the operation is done or has failed.

    Raises:
        Misuse: it is not such a handle.
    """
    return _checked(handle).done()


@documented
def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result, or raise its error.

    Args:
        handle: from one of the asynchronous collectives.

    Returns:
        the operation's result: an array, a list of arrays, or a pair.

    Raises:
        Misuse: it is not such a handle.
        {rank_errors}
    """
    return _checked(handle).wait()


def _checked(handle: Any) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise Misuse(
        f"{handle!r:.80} is not a handle: pass what a call whose name ends in _async or _async_ has returned."
    )
