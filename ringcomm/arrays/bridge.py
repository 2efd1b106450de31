"""Converts NumPy arrays of any memory layout to flat, native, contiguous arrays, and back.

Ranks may hold the same matrix in different memory layouts, so elements are always sent in C order.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from ..dtypes import code_of
from ..errors import Misuse
from .kinds import kind_of


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """The value as an array whose elements can be sent.

    Raises:
        UnsupportedDtypeError: its elements cannot be sent.
        Misuse: it is a masked array; a mask is not sent.
    """
    _refuse_masked(value)
    kind = None if isinstance(value, np.ndarray) else kind_of(value)
    # NumPy itself takes neither a tensor of bfloat16 nor one that requires a gradient.
    shared = None if kind is None else kind.host_memory(value)
    array = np.asarray(value) if shared is None else shared
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    code_of(array.dtype)
    return array


def _refuse_masked(value: Any) -> None:
    # The exact type first: access to numpy.ma may import that module.
    is_subclass = isinstance(value, np.ndarray) and type(value) is not np.ndarray
    if is_subclass and isinstance(value, np.ma.MaskedArray):
        raise Misuse(
            "A masked array would lose its mask: masks are not sent. Pass array.filled(value), or array.data "
            "and array.mask."
        )


def flat_copy(value: Any) -> Tuple[np.ndarray[Any, Any], Tuple[int, ...]]:
    """A new flat array with the value's elements in C order, and the value's shape."""
    array = as_array(value)
    return np.array(array, order="C", copy=True).reshape(-1), array.shape


def flat_view(value: Any) -> Tuple[np.ndarray[Any, Any], Tuple[int, ...]]:
    """A flat array with the value's elements in C order, without a copy if possible, and its shape."""
    array = as_array(value)
    return np.ascontiguousarray(array).reshape(-1), array.shape


class InPlace:
    """An array that is to be overwritten, as a flat array.

    :attr:`flat` shares the array's memory where the layout allows; otherwise it is a copy that
    :meth:`finish` writes back.

    Raises:
        Misuse: the value is no array in the host's memory, is masked, or is read-only.
        UnsupportedDtypeError: its elements cannot be sent.
    """

    __slots__ = ("_owner", "_shared", "array", "flat", "shape")

    mirror = None  # as arrays on devices have one

    def __init__(self, array: Any, what: str) -> None:
        self._owner = array
        if type(array) is np.ndarray:
            # By far the most frequent: nothing that other arrays need costs it anything.
            self.array = array
            self.shape = array.shape
            flags = array.flags
            if flags.c_contiguous and flags.writeable and array.dtype.isnative:
                self._shared = True
                self.flat = array.reshape(-1)
                code_of(array.dtype)
                return
        elif not isinstance(array, np.ndarray):
            kind = kind_of(array)
            shared = None if kind is None else kind.host_memory(array)
            if shared is None:
                raise Misuse(
                    f"{what} works in place, so it needs a numpy array, not {type(array).__name__}. "
                    f"Without the trailing underscore it returns a new array."
                )
            array = shared
        _refuse_masked(array)
        flags = array.flags
        if not flags.writeable:
            raise Misuse(f"{what} works in place, but this array is read-only. Pass a copy of it.")
        self.array = array
        self.shape = array.shape
        plain = np.asarray(array)  # the plain array of a subclass
        direct = flags.c_contiguous and plain.dtype.isnative
        self.flat = plain.reshape(-1) if direct else flat_copy(plain)[0]
        self._shared = direct
        code_of(self.flat.dtype)

    def finish(self) -> np.ndarray[Any, Any]:
        """Write the copy back, if there is one, and return the caller's own array."""
        if not self._shared:
            self.array[...] = self.flat.reshape(self.shape)
        owner: np.ndarray[Any, Any] = self._owner
        return owner
