"""Sixteen bits per value: float16 and bfloat16, each value rounded by itself to the nearest, ties to even."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .base import SEGMENT_ITEMS, Codec

_INFINITY = 0x7F800000
_NAN_HIGH = 0x7FC0
_HALF_INFINITY = 0x7C00


class BFloat16(Codec):
    """The upper half of a float32: its range, and 8 bits of precision. Rounded by integer operations."""

    name = "bf16"

    def __init__(self) -> None:
        self._work = np.empty(SEGMENT_ITEMS, np.uint32)

    def encoded_bytes(self, count: int) -> int:
        """Return the size in bytes of ``count`` encoded values."""
        return 2 * count

    def encode(
        self,
        values: np.ndarray[Any, Any],
        codes: np.ndarray[Any, Any],
        decoded: Optional[np.ndarray[Any, Any]] = None,
    ) -> bool:
        """Encode one segment; see :meth:`Codec.encode`."""
        bits, work = values.view(np.uint32), self._work[: values.size]
        halves = codes.view(np.uint16)
        np.bitwise_and(bits, 0x7FFFFFFF, out=work)
        largest = int(np.maximum.reduce(work, initial=0))
        nans = np.isnan(values) if largest > _INFINITY else None
        np.right_shift(bits, 16, out=work)
        np.bitwise_and(work, 1, out=work)
        np.add(work, 0x7FFF, out=work)
        np.add(work, bits, out=work)
        np.right_shift(work, 16, out=work)
        np.copyto(halves, work, casting="unsafe")
        if nans is not None:
            halves[nans] = _NAN_HIGH  # rounding would make an infinity of some of them
        if decoded is not None:
            self.decode(codes, decoded)
        return largest < _INFINITY

    def decode(self, codes: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Decode one segment; see :meth:`Codec.decode`."""
        bits = values.view(np.uint32)
        np.copyto(bits, codes.view(np.uint16))
        np.left_shift(bits, 16, out=bits)


class Float16(Codec):
    """IEEE 754 half precision: 11 bits of precision, nothing above 65504. NumPy's own conversion."""

    name = "fp16"

    def __init__(self) -> None:
        self._work = np.empty(SEGMENT_ITEMS, np.uint16)

    def encoded_bytes(self, count: int) -> int:
        """Return the size in bytes of ``count`` encoded values."""
        return 2 * count

    def encode(
        self,
        values: np.ndarray[Any, Any],
        codes: np.ndarray[Any, Any],
        decoded: Optional[np.ndarray[Any, Any]] = None,
    ) -> bool:
        """Encode one segment; see :meth:`Codec.encode`."""
        halves = codes.view(np.float16)
        np.copyto(halves, values, casting="unsafe")
        magnitudes = self._work[: values.size]
        np.left_shift(codes.view(np.uint16), 1, out=magnitudes)  # without the sign
        finite = int(np.maximum.reduce(magnitudes, initial=0)) < _HALF_INFINITY << 1
        if not finite:
            halves[np.isnan(halves)] = np.nan
        if decoded is not None:
            self.decode(codes, decoded)
        return finite

    def decode(self, codes: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Decode one segment; see :meth:`Codec.decode`."""
        np.copyto(values, codes.view(np.float16))
