"""Arrays on devices as arguments of collectives: the mirror to send from, and the caller's result."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple, Union

import numpy as np

from ..collective.placement import LEAST_BYTES
from ..dtypes import code_of
from .bridge import InPlace, flat_copy
from .kinds import DeviceKind, device_kind
from .mapped import MappedMirror, uses_mapped
from .mirrors import BlockMirror, StagingPool

_Span = Tuple[int, int]


class Operand:
    """An array on a device that a collective reads, and where its result goes.

    Args:
        pool: of the context.
        kind: of the array.
        value: the array.
        in_place: the collective's name if the result overwrites the array; empty if it is a new array.
        part: the elements of the flat array that are the result; None: all.

    Attributes:
        mirror: what is sent.
        shape: of the array.
        count: number of its elements.
        on_device: the array's elements on the device, flat.
        output: the result's.

    Raises:
        Misuse: ``in_place``, and the array cannot be overwritten.
        UnsupportedDtypeError: its elements cannot be sent.
    """

    def __init__(
        self,
        pool: StagingPool,
        kind: DeviceKind,
        value: Any,
        in_place: str = "",
        part: Optional[_Span] = None,
    ) -> None:
        self.shape, dtype = kind.describe(value)
        code_of(dtype)
        if in_place:
            kind.check_writable(value, in_place)
        self._kind = kind
        self._value = value
        self._in_place = bool(in_place)
        self.on_device, self._direct = kind.flat(value)
        self.count = _items(self.shape)
        start, stop = (0, self.count) if part is None else part
        self.output = self.on_device if in_place else kind.empty(value, (stop - start,))
        shared = _mapped(pool, kind, self.on_device) if in_place else None
        self.mirror: BlockMirror = shared or pool.mirror(
            kind, self.on_device, self.output, 0 if in_place else start
        )

    @property
    def flat(self) -> np.ndarray[Any, Any]:
        """The block of host memory; see :class:`~ringcomm.collective.staged.Mirror`."""
        return self.mirror.host

    def finish(self, shape: Optional[Tuple[int, ...]] = None) -> Any:
        """The caller's result: its current stream waits for it, the calling thread does not.

        Args:
            shape: of a new array; None: that of the argument.
        """
        self.mirror.finish()
        kind = self._kind
        if self._in_place:
            if not self._direct:
                kind.assign(self._value, kind.reshaped(self.on_device, self.shape))
            return self._value
        result = kind.reshaped(self.output, self.shape if shape is None else shape)
        return kind.result(result, self._value)


class HostCopy:
    """A copy of an array of the host as an argument. The attributes are those of :class:`Operand`."""

    mirror = None

    def __init__(self, value: Any) -> None:
        self.flat, self.shape = flat_copy(value)

    def finish(self) -> Any:
        """The copy, in the array's shape."""
        return self.flat.reshape(self.shape)


Argument = Union[Operand, HostCopy, InPlace]


def submitted(pool: StagingPool, value: Any, in_place: str = "", read: bool = True) -> Argument:
    """An array as the argument of an asynchronous collective that overwrites it, or a copy of it.

    The caller may change the array at once, unless the operation is in place: an array on a device is being
    copied to the host, and the caller's current stream waits for that.

    Args:
        pool: of the context.
        value: an array of any kind.
        in_place: the collective's name if the result overwrites the array; empty if it is a new array.
        read: whether the collective reads the array on this rank.
    """
    kind = device_kind(value)
    if kind is None:
        return InPlace(value, in_place) if in_place else HostCopy(value)
    operand = Operand(pool, kind, value, in_place)
    if read and pool.grouped and operand.flat.nbytes >= LEAST_BYTES:
        # A group of devices works on the result's own memory, and nothing is loaded in advance.
        if not in_place:
            operand.mirror.capture()
    elif read:
        operand.mirror.preload()
        if not in_place:
            operand.mirror.keep_source()
    return operand


class Rows:
    """An array of which an asynchronous collective moves rows: it is copied, and the result is a new array.

    Args:
        pool: of the context.
        value: an array of any kind.

    Attributes:
        flat: the copy, flat and in host memory.
        shape: of the array.
        mirror: of an array on a device; otherwise None.
    """

    def __init__(self, pool: StagingPool, value: Any) -> None:
        self.mirror: Optional[BlockMirror] = None
        self._pool = pool
        self._value = value
        self._kind = device_kind(value)
        if self._kind is None:
            self.flat, self.shape = flat_copy(value)
            return
        self.shape, dtype = self._kind.describe(value)
        code_of(dtype)
        self.mirror = self._pool.mirror(self._kind, self._kind.flat(value)[0])
        self.flat = self.mirror.host
        self.mirror.preload()
        self.mirror.keep_source()

    def deliver(self, rows: np.ndarray[Any, Any]) -> Any:
        """The result as the caller gets it: on the device of the argument, if that was on one."""
        if self.mirror is None or self._kind is None:
            return rows
        self.mirror.finish()
        return to_device(self._pool, self._kind, rows, self._value)


def _mapped(pool: StagingPool, kind: DeviceKind, flat: Any) -> Optional[MappedMirror]:
    """The mirror of an array in mapped memory that the host is to use directly; None otherwise."""
    host = kind.mapped(flat)
    if host is None:
        return None
    engine = pool.engine(kind, flat)
    direct = pool.direct.get(id(engine))
    if direct is None:
        direct = pool.direct[id(engine)] = uses_mapped(engine, kind.device(flat))
    return MappedMirror(engine, host) if direct else None


def mirrors(arguments: Sequence[Any]) -> Sequence[Optional[BlockMirror]]:
    """The mirrors of some arguments, for a request of the engine; empty if there is none.

    Args:
        arguments: of the types above, or others with an attribute ``mirror``.
    """
    found = [argument.mirror for argument in arguments]
    return found if any(mirror is not None for mirror in found) else ()


def to_device(pool: StagingPool, kind: DeviceKind, array: np.ndarray[Any, Any], like: Any) -> Any:
    """A new array on the device of another one, with the elements of a host array of the same type."""
    output = kind.empty(like, (array.size,))
    mirror = pool.mirror(kind, output)
    np.copyto(mirror.host, array.reshape(-1))
    mirror.store_all()
    mirror.finish()
    return kind.result(kind.reshaped(output, array.shape), like)


def _items(shape: Tuple[int, ...]) -> int:
    items = 1
    for length in shape:
        items *= int(length)
    return items
