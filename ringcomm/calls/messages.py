"""Messages between two ranks, matched by tag."""

from __future__ import annotations

from typing import Any, Optional

from .. import api
from ..arrays.operands import HostOperand, Operand, flat_view, mirrors, submitted
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle
from .process_set import ProcessSet, number_of


@documented
def send(
    array: Any, dest: int, tag: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> None:
    """Send an array to another rank; returns when that rank has received it.

    The other rank calls :func:`recv`. Messages between two ranks with the same tag are received in the order
    in which they were sent. Other ranks take no part.

    Example::

        if rc.rank() == 0:
            rc.send(batch, dest=1)
        elif rc.rank() == 1:
            rc.recv(batch, source=0)

    Args:
        array: NumPy array, or what converts to one.
        dest: the rank that receives it: its rank in the job.
        {message}

    Raises:
        {message_errors}
    """
    flat, shape = flat_view(array)
    operand = HostOperand(flat if flat.flags.writeable else flat.copy(), shape)
    _start(operand, api.rank(), dest, tag, name, process_set, True).wait()


@documented
def send_async(
    array: Any, dest: int, tag: int = 0, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> Handle:
    """Start sending a copy of an array to another rank, as :func:`send` does.

    Args:
        array: array of any kind, or what converts to one.
        dest: the rank that receives it: its rank in the job.
        {message}

    Returns:
        a handle; its ``wait()`` returns when the other rank has received it.

    Raises:
        {message_errors}
    """
    operand = submitted(api.context().staging, array)
    return _start(operand, api.rank(), dest, tag, name, process_set, False)


@documented
def recv(
    array: Array,
    source: int,
    tag: int = 0,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Array:
    """Receive an array that another rank sends with :func:`send` or :func:`send_async`.

    Args:
        array: of the same shape and dtype as the one that is sent; it is overwritten.
        source: the rank that sends it: its rank in the job.
        {message}

    Returns:
        ``array`` itself.

    Raises:
        Misuse: ``array`` is not a NumPy array, or it is read-only.
        {message_errors}
    """
    operand = submitted(api.context().staging, array, "recv", read=False)
    received: Array = _start(operand, source, api.rank(), tag, name, process_set, True).wait()
    return received


@documented
def recv_async(
    array: Array,
    source: int,
    tag: int = 0,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Handle:
    """Start receiving an array that another rank sends, as :func:`recv` does.

    Args:
        array: of the same shape and dtype as the one that is sent; it is overwritten, and must not be used
            until the handle is done.
        source: the rank that sends it: its rank in the job.
        {message}

    Returns:
        a handle; its ``wait()`` returns ``array`` itself.

    Raises:
        Misuse: ``array`` is not a NumPy array, or it is read-only.
        {message_errors}
    """
    operand = submitted(api.context().staging, array, "recv_async", read=False)
    return _start(operand, source, api.rank(), tag, name, process_set, False)


def _start(
    operand: Operand, source: int, dest: int, tag: int, name: Optional[str],
    process_set: Optional[ProcessSet], urgent: bool,
) -> Handle:  # fmt: skip
    """Start a message: a broadcast from its sender in the set of the two ranks."""
    engine, number = api.context().engine, number_of(process_set)
    pair = engine.sets.pair(dest if source == engine.rank else source, number)
    where = f" in process set {number}" if number else ""
    label = f"message from rank {source} to rank {dest}{where}, tag {tag}{f', {name}' if name else ''}"
    return engine.broadcast(
        [operand.flat], source, label, [operand.shape], pair, urgent, lambda _: operand.finish(),
        mirrors=mirrors([operand]),
    )  # fmt: skip
