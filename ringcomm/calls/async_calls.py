"""Collectives on NumPy arrays that ranks match by name, asynchronous or grouped, and messages.

Functions without a trailing underscore copy their input before they return, so the caller may change it at
once. Functions with one work in the caller's own arrays, which must not be used until the handle is done. A
group is one operation: all of its arrays are reduced, or none.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, ContextManager, List, Optional, Sequence

from .. import api
from ..arrays.operands import HostOperand, Operand, flat_view, mirrors, submitted
from ..collective.options import Options, takes
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import Misuse
from .process_set import ProcessSet, number_of

Operands = Sequence[Operand]
_flat_of, _shape_of = attrgetter("flat"), attrgetter("shape")

# ---- operations on operands, of adapters too ---------------------------------------------------------------

# Of all of them: ``urgent``: the caller waits at once; ``grouped``: the result is a list; ``kind``: a part of
# the name by which ranks match the operation.


class SequenceName(str):
    """The common name of operations that run one after another, in the same order on all ranks.

    All kinds share it, so that ranks get an error if the kinds of their next operations differ. Unlike
    operations without a name, they may run beside others that have none.
    """


def wire_name(kind: str, name: Optional[str]) -> str:
    """Return the name by which ranks match an operation: its kind and the caller's name.

    Without the caller's name it is empty: operations are matched by their order.
    """
    if isinstance(name, SequenceName):
        return str(name)
    return f"{kind}.{name}" if name else ""


def start_allreduce(
    operands: Operands, options: Options, urgent: bool = False, grouped: bool = False,
    convert: Optional[Callable[[Any], Any]] = None, kind: str = "",
) -> Handle:  # fmt: skip
    """Start a reduction; ``convert`` makes the result otherwise."""
    name, process_set = options.name, options.process_set
    return api.context().engine.allreduce(
        [*map(_flat_of, operands)], options, wire_name(kind, name) if kind else name,
        [*map(_shape_of, operands)], 0 if process_set is None else number_of(process_set), urgent,
        convert or (_finisher(operands) if grouped else operands[0].finish), mirrors=mirrors(operands),
    )  # fmt: skip


def start_reducescatter(
    operands: Operands, options: Options, urgent: bool = False, grouped: bool = False, kind: str = ""
) -> Handle:
    """Start a reduction of which every rank gets its rows."""
    if kind:
        options = options._replace(name=wire_name(kind, options.name))
    return api.context().engine.reducescatter(
        [*map(_flat_of, operands)], [*map(_shape_of, operands)], options, number_of(options.process_set),
        urgent, _deliverer(operands, grouped), mirrors(operands),
    )  # fmt: skip


def start_allgather(
    operands: Operands, name: Optional[str], process_set: Optional[ProcessSet], urgent: bool = False,
    grouped: bool = False, bounds: Sequence[int] = (), kind: str = "",
) -> Handle:  # fmt: skip
    """Start gathering the rows of all ranks; with ``bounds``, the ranks' row boundaries, in place."""
    return api.context().engine.allgather(
        [*map(_flat_of, operands)], [item.shape if kind else item.shape or (1,) for item in operands],
        wire_name(kind, name) if kind else name, number_of(process_set), urgent,
        _deliverer(operands, grouped), mirrors(operands), bounds,
    )  # fmt: skip


def start_broadcast(
    operands: Operands, root_rank: int, name: Optional[str], process_set: Optional[ProcessSet],
    urgent: bool = False, grouped: bool = False, kind: str = "",
) -> Handle:  # fmt: skip
    """Start copying the root's elements to all ranks."""
    return api.context().engine.broadcast(
        [*map(_flat_of, operands)], root_rank, wire_name(kind, name) if kind else name,
        [*map(_shape_of, operands)], number_of(process_set), urgent,
        _finisher(operands) if grouped else operands[0].finish, mirrors(operands),
    )  # fmt: skip


def start_alltoall(
    operand: Operand, splits: Optional[Sequence[int]], name: Optional[str], process_set: Optional[ProcessSet],
    urgent: bool = False, counted: Callable[[Any], Any] = lambda numbers: numbers, in_place: bool = False,
    kind: str = "",
) -> Handle:  # fmt: skip
    """Start exchanging rows; the result is the rows, and what ``counted`` makes of their number by rank.

    ``in_place``: the received rows replace those that were sent.
    """
    return api.context().engine.alltoall(
        operand.flat, operand.shape, splits, wire_name(kind, name) if kind else name, number_of(process_set),
        urgent, lambda result: (operand.deliver(result[0]), counted(result[1])), mirrors([operand]), in_place,
    )  # fmt: skip


def _finisher(operands: Operands) -> Callable[[Any], Any]:
    """Return the function that makes the results of operands that have been overwritten, of nothing."""
    return lambda _: [operand.finish() for operand in operands]


def _deliverer(operands: Operands, grouped: bool) -> Callable[[Any], Any]:
    """Return the function that shapes the engine's results, whose rows differ from the operands'."""

    def convert(arrays: Sequence[Array]) -> Any:
        results = [operand.deliver(rows) for operand, rows in zip(operands, arrays)]
        return results if grouped else results[0]

    return convert


def all_submitted(arrays: Sequence[Any], in_place: str = "", rows: bool = False) -> List[Operand]:
    """Return operands; ``in_place`` is the function's name if the arrays are overwritten, else ""."""
    staging = api.context().staging
    return [submitted(staging, array, in_place, rows=rows) for array in arrays]


# ---- single arrays -----------------------------------------------------------------------------------------


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
    return start_allreduce([submitted(api.context().staging, array)], options)


@takes("allreduce", texts="core")
def allreduce_async_(array: Array, options: Options) -> Handle:
    """Start an allreduce in place: the result overwrites ``array`` on every rank.

    Args:
        {array_pending}
        {options}

    Returns:
        a handle; its ``wait()`` returns ``array`` itself.

    Raises:
        Misuse: an array is not a NumPy array, or is read-only.
        {start_errors}
    """
    return start_allreduce([submitted(api.context().staging, array, "allreduce_async_")], options)


@takes("reducescatter", texts="core")
def reducescatter_async(array: Any, options: Options) -> Handle:
    """Start a reducescatter of a copy of an array: every rank gets only its rows of the result.

    Args:
        {array_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a new array with this rank's rows. Every member of the set gets ``n
        // size`` of ``n`` rows; the first ``n % size`` members get one more.

    Raises:
        Misuse: the array has no first dimension.
        {start_errors}
    """
    return start_reducescatter(all_submitted([array], rows=True), options)


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
        rows may differ between ranks.

    Raises:
        {start_errors}
    """
    return start_allgather(all_submitted([array], rows=True), name, process_set)


@documented
def broadcast_async(
    array: Any, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start copying the root's array to a new array on every rank.

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
    operand = submitted(context.staging, array, read=context.rank == root_rank)
    return start_broadcast([operand], root_rank, name, process_set)


@documented
def broadcast_async_(
    array: Array, root_rank: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start overwriting ``array`` on every rank with the root's array.

    Args:
        {array_pending}
        {root_rank}
        {matching}

    Returns:
        a handle; its ``wait()`` returns ``array`` itself.

    Raises:
        Misuse: an array is not a NumPy array, or is read-only.
        {start_errors}
    """
    context = api.context()
    operand = submitted(context.staging, array, "broadcast_async_", read=context.rank == root_rank)
    return start_broadcast([operand], root_rank, name, process_set)


@documented
def alltoall_async(
    array: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Handle:  # fmt: skip
    """Start sending rows to every rank, and receiving rows from every rank.

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
    operand = submitted(api.context().staging, array, rows=True)
    return start_alltoall(operand, splits, name, process_set)


# ---- groups ------------------------------------------------------------------------------------------------


@takes("allreduce", texts="core")
def grouped_allreduce_async(arrays: Sequence[Any], options: Options) -> Handle:
    """Start one allreduce of copies of several arrays: either all are reduced, or none.

    Args:
        {arrays_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays.

    Raises:
        {start_errors}
    """
    return start_allreduce(all_submitted(arrays), options, grouped=True)


@takes("allreduce", texts="core")
def grouped_allreduce_async_(arrays: Sequence[Array], options: Options) -> Handle:
    """Start one allreduce of several arrays in place: either all are reduced, or none.

    Args:
        {arrays_pending}
        {options}

    Returns:
        a handle; its ``wait()`` returns a list of the arrays themselves.

    Raises:
        Misuse: an array is not a NumPy array, or is read-only.
        {start_errors}
    """
    return start_allreduce(all_submitted(arrays, "grouped_allreduce_async_"), options, grouped=True)


@takes("allreduce", texts="core")
def grouped_allreduce(arrays: Sequence[Any], options: Options) -> List[Array]:
    """Reduce several arrays over all ranks in one operation: either all are reduced, or none.

    Example: ``weights, bias = rc.grouped_allreduce([weights, bias], op=rc.Sum)``.

    Args:
        {arrays_in}
        {options}

    Returns:
        a list of new arrays.

    Raises:
        {call_errors}
    """
    return start_allreduce(all_submitted(arrays), options, grouped=True).wait()


@takes("allreduce", texts="core")
def grouped_allreduce_(arrays: Sequence[Array], options: Options) -> List[Array]:
    """Reduce several arrays in place, in one operation: either all are reduced, or none.

    Example: ``rc.grouped_allreduce_([weights, bias], op=rc.Sum, name="layer1")``.

    Args:
        {arrays_pending}
        {options}

    Returns:
        a list of the arrays themselves.

    Raises:
        Misuse: an array is not a NumPy array, or is read-only.
        {call_errors}
    """
    operands = all_submitted(arrays, "grouped_allreduce_")
    return start_allreduce(operands, options, grouped=True).wait()


@takes("reducescatter", texts="core")
def grouped_reducescatter_async(arrays: Sequence[Any], options: Options) -> Handle:
    """Start one reducescatter of copies of several arrays.

    Args:
        {arrays_in}
        {options}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays with this rank's rows of each.

    Raises:
        Misuse: an array has no first dimension.
        {start_errors}
    """
    return start_reducescatter(all_submitted(arrays, rows=True), options, grouped=True)


@takes("reducescatter", texts="core")
def grouped_reducescatter(arrays: Sequence[Any], options: Options) -> List[Array]:
    """Reduce several arrays over all ranks in one operation; every rank gets only its rows of each.

    Args:
        {arrays_in}
        {options}

    Returns:
        a list of new arrays. Every member of the set gets ``n // size`` of ``n`` rows; the first ``n % size``
        members get one more.

    Raises:
        Misuse: an array has no first dimension.
        {call_errors}
    """
    operands = all_submitted(arrays, rows=True)
    return start_reducescatter(operands, options, grouped=True).wait()


@documented
def grouped_allgather_async(
    arrays: Sequence[Any], name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start one allgather of copies of several arrays.

    Args:
        {arrays_rows}
        {matching}

    Returns:
        a handle; its ``wait()`` returns a list of new arrays with the rows of all ranks, in rank order.

    Raises:
        {start_errors}
    """
    return start_allgather(all_submitted(arrays, rows=True), name, process_set, grouped=True)


@documented
def grouped_allgather(
    arrays: Sequence[Any], name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> List[Array]:
    """Concatenate several arrays of every rank along the first dimension, in one operation.

    Args:
        {arrays_rows}
        {matching}

    Returns:
        a list of new arrays with the rows of all ranks, in rank order. The number of rows may differ between
        ranks. A zero-dimensional array counts as one row.

    Raises:
        {call_errors}
    """
    return grouped_allgather_async(arrays, name, process_set).wait()


# ---- messages between two ranks, matched by tag ------------------------------------------------------------


@documented
def send(
    array: Any, dest: int, tag: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> None:
    """Send an array to another rank, and return when that rank has received it.

    The other rank calls :func:`recv`. Messages between two ranks with the same tag are received in the order
    in which they were sent. Other ranks take no part.

    Example::

        if rc.rank() == 0:
            rc.send(batch, dest=1)
        elif rc.rank() == 1:
            rc.recv(batch, source=0)

    Args:
        array: a NumPy array, or an object that converts to one.
        dest: the rank of the job that receives it.
        {message}

    Raises:
        {message_errors}
    """
    flat, shape = flat_view(array)
    operand = HostOperand(flat if flat.flags.writeable else flat.copy(), shape)
    _start_message(operand, api.rank(), dest, tag, name, process_set, True).wait()


@documented
def send_async(
    array: Any, dest: int, tag: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start sending a copy of an array to another rank, as :func:`send` does.

    Args:
        array: an array of any kind, or an object that converts to one.
        dest: the rank of the job that receives it.
        {message}

    Returns:
        a handle; its ``wait()`` returns when the other rank has received it.

    Raises:
        {message_errors}
    """
    operand = submitted(api.context().staging, array)
    return _start_message(operand, api.rank(), dest, tag, name, process_set, False)


@documented
def recv(
    array: Array, source: int, tag: int = 0, name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Array:  # fmt: skip
    """Receive an array that another rank sends with :func:`send` or :func:`send_async`.

    Args:
        array: an array of the shape and dtype of the sent array. It is overwritten.
        source: the rank of the job that sends it.
        {message}

    Returns:
        ``array`` itself.

    Raises:
        Misuse: ``array`` is not a NumPy array, or it is read-only.
        {message_errors}
    """
    operand = submitted(api.context().staging, array, "recv", read=False)
    return _start_message(operand, source, api.rank(), tag, name, process_set, True).wait()


@documented
def recv_async(
    array: Array, source: int, tag: int = 0, name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Handle:  # fmt: skip
    """Start receiving an array that another rank sends, as :func:`recv` does.

    Args:
        array: an array of the shape and dtype of the sent array. It is overwritten, and must not be used
            until the handle is done.
        source: the rank of the job that sends it.
        {message}

    Returns:
        a handle; its ``wait()`` returns ``array`` itself.

    Raises:
        Misuse: ``array`` is not a NumPy array, or it is read-only.
        {message_errors}
    """
    operand = submitted(api.context().staging, array, "recv_async", read=False)
    return _start_message(operand, source, api.rank(), tag, name, process_set, False)


def _start_message(
    operand: Operand, source: int, dest: int, tag: int, name: Optional[str],
    process_set: Optional[ProcessSet], urgent: bool,
) -> Handle:  # fmt: skip
    """Start a message: a broadcast from its sender in the set of the two ranks."""
    engine, number = api.context().engine, number_of(process_set)
    pair = engine.sets.pair(dest if source == engine.rank else source, number)
    where = f" in process set {number}" if number else ""
    label = f"message from rank {source} to rank {dest}{where}, tag {tag}{f', {name}' if name else ''}"
    return engine.broadcast(
        [operand.flat], source, label, [operand.shape], pair, urgent, operand.finish, mirrors([operand])
    )


# ---- the program as a whole, and handles -------------------------------------------------------------------


@documented
def join() -> int:
    """Announce that this rank has no more data, and wait until all ranks have announced it.

    Until then this rank contributes the neutral element (0 for a sum) to the allreduces of the other ranks.
    An average still divides by the number of all ranks.

    Returns:
        the rank that joined last. Its state is the newest.

    Raises:
        PeerLostError: a rank ended, or is silent for too long.
        {not_initialized}
    """
    return api.context().engine.join().wait()


@documented
def pause(reason: str) -> ContextManager[None]:
    """Announce that this rank will start no collectives for a while, for example while it writes a file.

    During the ``with`` block, other ranks can wait for collectives of this rank without a warning or a
    timeout.

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
    """Return whether an operation is done; :func:`synchronize` then does not wait.

    Args:
        handle: the handle of an asynchronous collective.

    Returns:
        True if the operation is done or has failed.

    Raises:
        Misuse: ``handle`` is not such a handle.
    """
    return _checked(handle).done()


@documented
def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result, or raise its error.

    Args:
        handle: the handle of an asynchronous collective.

    Returns:
        the operation's result: an array, a list of arrays, or a pair.

    Raises:
        Misuse: ``handle`` is not such a handle.
        {rank_errors}
    """
    return _checked(handle).wait()


def _checked(handle: Any) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise Misuse(
        f"{handle!r:.80} is not a handle: pass what a call whose name ends in _async or _async_ has returned."
    )
