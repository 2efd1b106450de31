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
    """Return the value as an array whose elements can be sent. Raises UnsupportedDtypeError for other
    elements, Misuse for a masked array, whose mask is not sent.
    """
    array: np.ndarray[Any, Any] = value
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


def flat_copy(value: Any) -> Tuple[np.ndarray[Any, Any], Tuple[int, ...]]:
    """Return a new flat array with the value's elements in C order, and the value's shape."""
    array = as_array(value)
    return np.array(array, order="C", copy=True).reshape(-1), array.shape


def flat_view(value: Any) -> Tuple[np.ndarray[Any, Any], Tuple[int, ...]]:
    """Return a flat array with the value's elements in C order, without a copy if possible, and its shape."""
    array = as_array(value)
    return np.ascontiguousarray(array).reshape(-1), array.shape
