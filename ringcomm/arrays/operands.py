"""Arguments of collectives: their elements as flat host memory, and the way from there to the results.

:class:`HostOperand` and :class:`InPlace` are arrays of the host, :class:`DeviceOperand` is one of a device.
Direct calls make them with :func:`operand_of`, calls by name with :func:`submitted`. Ranks may hold the same
matrix in different memory layouts, so elements are always sent in C order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from math import prod
from operator import attrgetter
from typing import Any, Optional, Sequence, Tuple

import numpy as np
from numpy import ndarray

from ..dtypes import Array, code_of
from ..errors import Misuse
from .kinds import BlockMirror, DeviceKind, MappedMirror, StagingPool, device_kind, kind_of

_Shape = Tuple[int, ...]


class Operand(ABC):
    """An argument of a collective; ``flat`` has its elements in host memory and C order, and then the result.
    """

    __slots__ = ()

    flat: Array
    shape: _Shape
    mirror: Optional[BlockMirror] = None  # of an array on a device, of which ``flat`` is the host's block

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the element type."""
        return self.flat.dtype

    @abstractmethod
    def finish(self, shape: Optional[_Shape] = None) -> Array:
        """Return the result, of ``shape`` if it is new; its stream waits for it, the thread does not."""

    def narrow(self, first: int, last: int) -> None:  # noqa: B027 - the host copies nothing back
        """Declare, before the call, that :meth:`finish_rows` takes these rows and that no others change."""

    def finish_rows(self, first: int, last: int) -> Array:
        """Return the rows ``[first, last)`` of the result, which alone are defined."""
        return self.finish()[first:last]

    def send_only(self) -> None:  # noqa: B027 - what the host sends is the result already
        """Declare that the collective only reads the argument on this rank, so that it is the result."""

    def deliver(self, rows: Array) -> Array:
        """Return an engine's result in the form that the caller gets, where the argument is."""
        return rows

    def output(self, items: int, at: int, part: Sequence[int]) -> Operand:
        """Return an operand for a new array of ``items`` elements; those of ``part`` are in it already, from
        ``at`` on.
        """
        flat = np.empty(items, self.flat.dtype)
        start, stop = part
        flat[at : at + stop - start] = self.flat[start:stop]
        return HostOperand(flat, flat.shape)

    def overwrite(self, made: Operand) -> Array:
        """Overwrite the argument with an :meth:`output` of as many elements; return the caller's array."""
        return self.fill(made.flat)

    def fill(self, result: Array) -> Array:
        """Overwrite the argument with an engine's delivered result; return the caller's array."""
        self.flat[:] = result.reshape(-1)
        return self.finish()


class HostOperand(Operand):
    """A copy of an array of the host, or an array that is only read."""

    __slots__ = ("flat", "shape")

    def __init__(self, flat: Array, shape: _Shape) -> None:
        self.flat = flat
        self.shape = shape

    def finish(self, shape: Optional[_Shape] = None) -> Array:
        return self.flat.reshape(self.shape if shape is None else shape)

    def finish_rows(self, first: int, last: int) -> Array:
        # A copy, so that a small result does not keep the whole input's memory alive.
        return np.array(self.finish()[first:last])


class InPlace(Operand):
    """An array of the host that the result overwrites. :attr:`flat` shares its memory where the layout
    allows; otherwise it is a copy that :meth:`finish` writes back. Raises Misuse if it cannot be overwritten.
    """

    __slots__ = ("_array", "_owner", "_shared", "flat", "shape")

    def __init__(self, array: Any, what: str) -> None:
        self._owner = array
        if type(array) is ndarray:
            # By far the most frequent: nothing that other arrays need costs it anything.
            self._array = array
            self.shape = array.shape
            flags = array.flags
            if flags.c_contiguous and flags.writeable and array.dtype.isnative:
                self._shared = True
                self.flat = array.reshape(-1)
                code_of(array.dtype)
                return
        elif not isinstance(array, ndarray):
            kind = kind_of(array)
            shared = None if kind is None else kind.host_memory(array)
            if shared is None:
                raise Misuse(
                    f"{what} works in place, so it needs a numpy array, not {type(array).__name__}. "
                    f"Without the trailing underscore it returns a new array."
                )
            array = shared
        refuse_masked(array)
        flags = array.flags
        if not flags.writeable:
            raise Misuse(f"{what} works in place, but this array is read-only. Pass a copy of it.")
        self._array = array
        self.shape = array.shape
        plain = np.asarray(array)  # the plain array of a subclass
        direct = flags.c_contiguous and plain.dtype.isnative
        self.flat = plain.reshape(-1) if direct else flat_copy(plain)[0]
        self._shared = direct
        code_of(self.flat.dtype)

    def finish(self, shape: Optional[_Shape] = None) -> Array:
        """Write the copy back, if there is one, and return the caller's own array."""
        if not self._shared:
            self._array[...] = self.flat.reshape(self.shape)
        return self._owner


class DeviceOperand(Operand):
    """An array on a device that a collective reads, and the place of its result: the array itself
    (``in_place``), an :meth:`output` (``rows``), or a new array. The mirror is made when it is first used.
    """

    def __init__(
        self, pool: StagingPool, kind: DeviceKind, value: Any, in_place: str = "", rows: bool = False
    ) -> None:
        self.shape, self._dtype = kind.describe(value)
        code_of(self._dtype)
        if in_place:
            kind.check_writable(value, in_place)
        self._pool = pool
        self._kind = kind
        self._value: Array = value
        self._in_place = bool(in_place)
        self.on_device, self._direct = kind.flat(value)  # its elements on the device, flat
        self._part = (0, prod(self.shape))
        self._target = self.on_device if in_place or rows else None
        self._mirror: Optional[BlockMirror] = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def target(self) -> Any:
        """Return the elements of the result on the device, flat."""
        if self._target is None:
            start, stop = self._part
            self._target = self._kind.empty(self._value, (stop - start,))
        return self._target

    @property
    def mirror(self) -> BlockMirror:  # type: ignore[override]
        """Return the array and its block of host memory."""
        if self._mirror is None:
            target, pool, kind = self.target, self._pool, self._kind
            host = kind.mapped(self.on_device) if self._in_place else None
            if host is not None:
                self._mirror = MappedMirror(pool.engine(kind, self.on_device), host)
            else:
                start = 0 if target is self.on_device else self._part[0]
                self._mirror = pool.mirror(kind, self.on_device, target, start)
        return self._mirror

    @property
    def flat(self) -> Array:  # type: ignore[override]
        """Return the block of host memory; see :class:`.kinds.BlockMirror`."""
        return self.mirror.host

    def narrow(self, first: int, last: int) -> None:
        width = prod(self.shape[1:])
        self._part = (first * width, last * width)

    def send_only(self) -> None:
        if self.target is not self.on_device:
            self._kind.assign(self.target, self.on_device)

    def finish(self, shape: Optional[_Shape] = None) -> Array:
        self.mirror.finish()
        kind = self._kind
        if self._in_place:
            if not self._direct:
                kind.assign(self._value, kind.reshaped(self.on_device, self.shape))
            return self._value
        flat = kind.reshaped(self.target, self.shape if shape is None else shape)
        return kind.result(flat, self._value)

    def finish_rows(self, first: int, last: int) -> Array:
        if self._in_place:
            return self.finish()[first:last]
        return self.finish((last - first, *self.shape[1:]))

    def deliver(self, rows: Array) -> Array:
        self.mirror.finish()
        made = self._new(rows.size)
        np.copyto(made.flat, rows.reshape(-1))
        made.mirror.store_all()
        return made.finish(rows.shape)

    def output(self, items: int, at: int, part: Sequence[int]) -> DeviceOperand:
        made = self._new(items)
        start, stop = part
        self._kind.assign(made.target[at : at + stop - start], self.on_device[start:stop])
        return made

    def _new(self, items: int) -> DeviceOperand:
        """Return an operand for a new flat array on the same device, which is not loaded from another one."""
        made = copy(self)
        made.on_device = made._target = self._kind.empty(self._value, (items,))
        made._part, made._in_place, made._mirror = (0, items), False, None
        return made

    def overwrite(self, made: Operand) -> Array:
        return self.fill(made.finish(self.shape))

    def fill(self, result: Array) -> Array:
        self._kind.assign(self._value, result)
        return self._value


def operand_of(pool: StagingPool, value: Any, in_place: str = "", rows: bool = False) -> Operand:
    """Return an array as the argument of a direct collective. ``in_place``: the collective's name if the
    result overwrites the array; ``rows``: the result has other rows. Raises Misuse, UnsupportedDtypeError.
    """
    # By far the most frequent is an array of NumPy, which needs no look-up of its kind.
    if type(value) is not ndarray:
        kind = device_kind(value)
        if kind is not None:
            return DeviceOperand(pool, kind, value, in_place, rows)
    if in_place:
        return InPlace(value, in_place)
    return HostOperand(*(flat_view(value) if rows else flat_copy(value)))


def submitted(
    pool: StagingPool, value: Any, in_place: str = "", read: bool = True, rows: bool = False
) -> Operand:
    """Return an array as the argument of an asynchronous collective that overwrites it, or a copy of it, so
    that the caller may change the array at once. ``read``: the collective reads the array on this rank.
    """
    kind = None if type(value) is ndarray else device_kind(value)
    if kind is None:
        return InPlace(value, in_place) if in_place else HostOperand(*flat_copy(value))
    operand = DeviceOperand(pool, kind, value, in_place, rows)
    mirror = operand.mirror
    if read:
        mirror.preload()
        if not in_place:
            mirror.keep_source()
    return operand


def mirrors(arguments: Sequence[Any]) -> Sequence[Optional[BlockMirror]]:
    """Return the ``mirror`` of each argument, for a request of the engine; empty if there are none."""
    found = [*map(attrgetter("mirror"), arguments)]
    return found if found.count(None) < len(found) else ()


# ---- NumPy arrays of any memory layout -----------------------------------------------------------


def as_array(value: Any) -> Array:
    """Return the value as an array whose elements can be sent; UnsupportedDtypeError, or Misuse if masked."""
    array: Array = value
    if type(value) is not np.ndarray:
        refuse_masked(value)
        kind = None if isinstance(value, np.ndarray) else kind_of(value)
        # NumPy itself takes neither a tensor of bfloat16 nor one that requires a gradient.
        shared = None if kind is None else kind.host_memory(value)
        array = np.asarray(value) if shared is None else shared
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    code_of(array.dtype)
    return array


def refuse_masked(value: Any) -> None:
    """Raise Misuse for a masked array."""
    # The exact type first: access to numpy.ma may import that module.
    is_subclass = isinstance(value, np.ndarray) and type(value) is not np.ndarray
    if is_subclass and isinstance(value, np.ma.MaskedArray):
        raise Misuse(
            "A masked array would lose its mask: masks are not sent. Pass array.filled(value), or array.data "
            "and array.mask."
        )


def flat_copy(value: Any) -> Tuple[Array, Tuple[int, ...]]:
    """Return a new flat array with the value's elements in C order, and the value's shape."""
    array = as_array(value)
    return np.array(array, order="C", copy=True).reshape(-1), array.shape


def flat_view(value: Any) -> Tuple[Array, Tuple[int, ...]]:
    """Return a flat array with the value's elements in C order, without a copy if possible, and its shape."""
    array = as_array(value)
    return np.ascontiguousarray(array).reshape(-1), array.shape
