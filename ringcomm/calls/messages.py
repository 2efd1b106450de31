"""Messages between two ranks, matched by tag."""

from __future__ import annotations

from typing import Any

from .. import api
from ..arrays.bridge import flat_view
from ..arrays.operands import InPlace
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle


@documented
def send(array: Any, dest: int, tag: int = 0) -> None:
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
        dest: the rank that receives it.
        tag: distinguishes messages between the same two ranks.

    Raises:
        ConfigError: there is no such rank, or it is this one.
        DuplicateNameError: another thread is sending with this tag to that rank.
        MismatchError: the receiver expects another shape or element type.
        PeerLostError: a rank was lost.
        {not_initialized}
    """
    flat, shape = flat_view(array)
    flat = flat if flat.flags.writeable else flat.copy()
    _start(flat, shape, api.rank(), dest, tag, None).wait()


@documented
def recv(array: Array, source: int, tag: int = 0) -> Array:
    """Receive an array that another rank sends with :func:`send`.

    Args:
        array: NumPy array of the same shape and dtype as the one that is sent; it is overwritten.
        source: the rank that sends it.
        tag: the tag with which it is sent.

    Returns:
        ``array`` itself.

    Raises:
        ConfigError: there is no such rank, or it is this one.
        DuplicateNameError: another thread is receiving with this tag from that rank.
        Misuse: ``array`` is not a NumPy array, or it is read-only.
        MismatchError: the array that is sent has another shape or element type.
        PeerLostError: a rank was lost.
        {not_initialized}
    """
    target = InPlace(array, "recv")
    result: Array = _start(
        target.flat, target.shape, source, api.rank(), tag, lambda _: target.finish()
    ).wait()
    return result


def _start(flat: Any, shape: Any, source: int, dest: int, tag: int, convert: Any) -> Handle:
    """A message is a broadcast from its sender in the set of two ranks."""
    engine = api.context().engine
    number = engine.sets.pair(dest if source == engine.rank else source)
    name = f"message from rank {source} to rank {dest}, tag {tag}"
    return engine.broadcast([flat], source, name, [shape], number, urgent=True, convert=convert)
