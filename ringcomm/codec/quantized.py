"""Eight or four bits per value: blocks of 256 values with one scale.

A block's scale is its greatest magnitude divided by the greatest code (127 or 7), and a value becomes the
nearest multiple of it; so the error of a value is at most half a scale, and zeros stay zero. If a value of a
block is NaN or infinite the scale is NaN, and the whole block decodes to NaN: an overflow stays visible. A
block whose greatest magnitude is below :data:`TINY` becomes zeros.

A segment is laid out as all its scales (float32), then all its codes. The last block is padded with zeros.

Rounding adds 1.5 * 2**23, which leaves the nearest whole number (ties to even) in the low bits of a float32:
that replaces a rounding and a conversion by an addition and a copy of bytes. Magnitudes are compared as
integers, because floating-point maxima of NumPy are several times slower and order is the same.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from .base import BLOCK_ITEMS, SEGMENT_ITEMS, Codec

TINY = 1e-30
"""Below, reciprocals of scales overflow."""

_ROUNDER = np.float32(12582912.0)
_INFINITY = 0x7F800000
_BLOCKS = SEGMENT_ITEMS // BLOCK_ITEMS
_STARTS = np.arange(0, SEGMENT_ITEMS, BLOCK_ITEMS)


class _Quantized(Codec):
    """Blocks, scales and rounding of both quantized codecs."""

    levels = 0
    """The greatest code."""
    code_bytes = 0
    """Bytes of codes per block."""

    def __init__(self) -> None:
        self._work = np.empty(SEGMENT_ITEMS, np.float32)
        self._padded = np.zeros(BLOCK_ITEMS, np.float32)
        self._scales = np.empty(_BLOCKS, np.float32)
        self._inverse = np.empty(_BLOCKS, np.float32)

    def encoded_bytes(self, count: int) -> int:
        """Return the size in bytes of ``count`` encoded values."""
        return -(-count // BLOCK_ITEMS) * (4 + self.code_bytes)

    def encode(
        self,
        values: np.ndarray[Any, Any],
        codes: np.ndarray[Any, Any],
        decoded: Optional[np.ndarray[Any, Any]] = None,
    ) -> bool:
        """Encode one segment; see :meth:`Codec.encode`."""
        blocks = -(-values.size // BLOCK_ITEMS)
        whole = values.size // BLOCK_ITEMS * BLOCK_ITEMS
        work = self._work[: blocks * BLOCK_ITEMS]
        scales, inverse = self._scales[:blocks], self._inverse[:blocks]
        tail = self._padded if whole < values.size else None
        if tail is not None:
            tail[: values.size - whole] = values[whole:]
            tail[values.size - whole :] = 0
        self._measure(values[:whole], tail, work, scales)
        greatest = int(np.maximum.reduce(scales.view(np.int32), initial=0))
        np.divide(np.float32(self.levels), scales, out=inverse)
        nothing = scales < TINY
        inverse[nothing] = 0
        np.divide(scales, np.float32(self.levels), out=scales)
        scales[nothing] = 0
        if greatest >= _INFINITY:
            scales[~np.isfinite(scales)] = np.nan
        rows = whole // BLOCK_ITEMS
        np.multiply(_rows(values[:whole]), inverse[:rows, None], out=_rows(work[:whole]))
        if tail is not None:
            np.multiply(tail, inverse[rows], out=work[whole:])
        np.add(work, _ROUNDER, out=work)
        codes[: 4 * blocks].view(np.float32)[:] = scales
        self._pack(work.view(np.int32), codes[4 * blocks :])
        if decoded is not None:
            np.subtract(work, _ROUNDER, out=work)
            self._scale(work, scales, decoded)
        return greatest < _INFINITY

    def _measure(
        self,
        values: np.ndarray[Any, Any],
        tail: Optional[np.ndarray[Any, Any]],
        work: np.ndarray[Any, Any],
        scales: np.ndarray[Any, Any],
    ) -> None:
        """Store the greatest magnitude of each block in ``scales``."""
        bits, magnitudes = work.view(np.int32), scales.view(np.int32)
        np.bitwise_and(values.view(np.int32), 0x7FFFFFFF, out=bits[: values.size])
        if tail is not None:
            np.bitwise_and(tail.view(np.int32), 0x7FFFFFFF, out=bits[values.size :])
        if scales.size:
            np.maximum.reduceat(bits, _STARTS[: scales.size], out=magnitudes)

    def decode(self, codes: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Decode one segment; see :meth:`Codec.decode`."""
        blocks = -(-values.size // BLOCK_ITEMS)
        work = self._work[: blocks * BLOCK_ITEMS]
        self._unpack(codes[4 * blocks :], work)
        self._scale(work, codes[: 4 * blocks].view(np.float32), values)

    def _scale(
        self, work: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], values: np.ndarray[Any, Any]
    ) -> None:
        """Multiply whole numbers in ``work`` by their scales into ``values``."""
        whole = values.size // BLOCK_ITEMS * BLOCK_ITEMS
        rows = whole // BLOCK_ITEMS
        np.multiply(_rows(work[:whole]), scales[:rows, None], out=_rows(values[:whole]))
        if whole < values.size:
            np.multiply(work[whole : values.size], scales[rows], out=values[whole:])
        greatest = np.maximum.reduce(scales, initial=0)
        if greatest != greatest:
            # Which NaN a multiplication gives depends on the processor.
            for block in np.flatnonzero(np.isnan(scales)):
                values[block * BLOCK_ITEMS : (block + 1) * BLOCK_ITEMS] = np.nan

    def _pack(self, numbers: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> None:
        """Store the low bits of int32 numbers as codes."""
        raise NotImplementedError

    def _unpack(self, codes: np.ndarray[Any, Any], work: np.ndarray[Any, Any]) -> None:
        """Store codes as whole numbers of float32."""
        raise NotImplementedError


class Int8(_Quantized):
    """8 bits per value and a scale per block: 260 bytes for 256 values."""

    name = "int8"
    levels = 127
    code_bytes = BLOCK_ITEMS

    def _pack(self, numbers: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> None:
        np.copyto(codes.view(np.int8), numbers, casting="unsafe")

    def _unpack(self, codes: np.ndarray[Any, Any], work: np.ndarray[Any, Any]) -> None:
        np.copyto(work, codes.view(np.int8))


class Int4(_Quantized):
    """4 bits per value and a scale per block: 132 bytes for 256 values.

    The low halves of a segment's bytes hold the first half of its values, the high halves the second.
    """

    name = "int4"
    levels = 7
    code_bytes = BLOCK_ITEMS // 2

    def __init__(self) -> None:
        super().__init__()
        self._bytes = np.empty(SEGMENT_ITEMS, np.uint8)

    def _pack(self, numbers: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> None:
        half = numbers.size // 2
        low = self._bytes[: numbers.size]
        np.copyto(low, numbers, casting="unsafe")
        np.left_shift(low[half:], 4, out=codes)
        np.bitwise_and(low[:half], 15, out=low[:half])
        np.bitwise_or(codes, low[:half], out=codes)

    def _unpack(self, codes: np.ndarray[Any, Any], work: np.ndarray[Any, Any]) -> None:
        half = work.size // 2
        signed, low = codes.view(np.int8), self._bytes[:half].view(np.int8)
        np.left_shift(signed, 4, out=low)
        np.right_shift(low, 4, out=low)
        np.copyto(work[:half], low)
        np.right_shift(signed, 4, out=low)
        np.copyto(work[half:], low)


def _rows(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.reshape(-1, BLOCK_ITEMS)
