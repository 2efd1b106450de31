"""Codecs: float32 values to fewer bytes and back, one segment at a time.

A span of a vector is coded in *segments* of :data:`SEGMENT_ITEMS` values, so that all passes over a segment
stay in the processor's cache and sending can start when the first segment is done. The layout of a segment is
part of the wire format. A codec has its own working space, so it allocates nothing after it was made; one
thread at a time may use it.

Everything that more than one rank computes (decoding) is element-wise arithmetic of IEEE 754 in a fixed
order, so different processors get the same bits. Scales are computed once, by the rank that encodes, and
sent.

**float16 and bfloat16**: each value is rounded by itself to the nearest, ties to even.

**int8 and int4**: blocks of 256 values with one scale, the greatest magnitude divided by the greatest code
(127 or 7); a value becomes the nearest multiple of it. So the error of a value is at most half a scale, and
zeros stay zero. If a value of a block is NaN or infinite the scale is NaN, and the whole block decodes to
NaN: an overflow stays visible. A block whose greatest magnitude is below :data:`TINY` becomes zeros. A
segment is laid out as all its scales (float32), then all its codes. The last block is padded with zeros.

Rounding adds 1.5 * 2**23, which leaves the nearest whole number (ties to even) in the low bits of a float32:
that replaces a rounding and a conversion by an addition and a copy of bytes. Magnitudes are compared as
integers, because floating-point maxima of NumPy are several times slower and order is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Dict, Optional, Type

import numpy as np

from ..dtypes import Array

BLOCK_ITEMS = 256
"""Values that share a scale. The boundaries between ranks' chunks are multiples of it."""

SEGMENT_ITEMS = 32768
"""Values per segment: 128 KiB of float32; two copies and the codes fit into most second-level caches."""
TINY = 1e-30
"""Below, reciprocals of scales overflow."""
_INFINITY = 0x7F800000
_BF16_INFINITY = 0x7F7F8000  # the least magnitude that becomes infinite
_NAN_HIGH = 0x7FC0
_HALF_INFINITY = 0x7C00
_ROUNDER = np.float32(12582912.0)
_BLOCKS = SEGMENT_ITEMS // BLOCK_ITEMS
_STARTS = np.arange(0, SEGMENT_ITEMS, BLOCK_ITEMS)


class Codec(ABC):
    """Encodes and decodes segments. For one thread at a time."""

    name = ""  # one of :data:`ringcomm.ops.CODECS`

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the size in bytes of ``count`` encoded values."""

    @abstractmethod
    def encode(self, values: Array, codes: Array, decoded: Optional[Array] = None) -> bool:
        """Encode one segment of float32 values, flat and contiguous, into ``encoded_bytes(values.size)``
        bytes, and return whether all values were finite and within the codec's range.

        ``decoded`` is overwritten with the result of :meth:`decode`; it may be ``values`` itself. The caller
        suppresses NumPy's warnings about overflow and NaN.
        """

    @abstractmethod
    def decode(self, codes: Array, values: Array) -> None:
        """Decode one segment into as many float32 values as were encoded."""


class BFloat16(Codec):
    """The upper half of a float32: its range, and 8 bits of precision. Rounded by integer operations."""

    name = "bf16"

    def __init__(self) -> None:
        self._work = np.empty(SEGMENT_ITEMS, np.uint32)

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Array, codes: Array, decoded: Optional[Array] = None) -> bool:
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
        return largest < _BF16_INFINITY

    def decode(self, codes: Array, values: Array) -> None:
        bits = values.view(np.uint32)
        np.copyto(bits, codes.view(np.uint16))
        np.left_shift(bits, 16, out=bits)


class Float16(Codec):
    """IEEE 754 half precision: 11 bits of precision, nothing above 65504. NumPy's own conversion."""

    name = "fp16"

    def __init__(self) -> None:
        self._work = np.empty(SEGMENT_ITEMS, np.uint16)

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Array, codes: Array, decoded: Optional[Array] = None) -> bool:
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

    def decode(self, codes: Array, values: Array) -> None:
        np.copyto(values, codes.view(np.float16))


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
        return -(-count // BLOCK_ITEMS) * (4 + self.code_bytes)

    def encode(self, values: Array, codes: Array, decoded: Optional[Array] = None) -> bool:
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

    def _measure(self, values: Array, tail: Optional[Array], work: Array, scales: Array) -> None:
        """Store the greatest magnitude of each block in ``scales``."""
        bits, magnitudes = work.view(np.int32), scales.view(np.int32)
        np.bitwise_and(values.view(np.int32), 0x7FFFFFFF, out=bits[: values.size])
        if tail is not None:
            np.bitwise_and(tail.view(np.int32), 0x7FFFFFFF, out=bits[values.size :])
        if scales.size:
            np.maximum.reduceat(bits, _STARTS[: scales.size], out=magnitudes)

    def decode(self, codes: Array, values: Array) -> None:
        blocks = -(-values.size // BLOCK_ITEMS)
        work = self._work[: blocks * BLOCK_ITEMS]
        self._unpack(codes[4 * blocks :], work)
        self._scale(work, codes[: 4 * blocks].view(np.float32), values)

    def _scale(self, work: Array, scales: Array, values: Array) -> None:
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

    def _pack(self, numbers: Array, codes: Array) -> None:
        """Store the low bits of int32 numbers as codes."""
        raise NotImplementedError

    def _unpack(self, codes: Array, work: Array) -> None:
        """Store codes as whole numbers of float32."""
        raise NotImplementedError


class Int8(_Quantized):
    """8 bits per value and a scale per block: 260 bytes for 256 values."""

    name = "int8"
    levels = 127
    code_bytes = BLOCK_ITEMS

    def _pack(self, numbers: Array, codes: Array) -> None:
        np.copyto(codes.view(np.int8), numbers, casting="unsafe")

    def _unpack(self, codes: Array, work: Array) -> None:
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

    def _pack(self, numbers: Array, codes: Array) -> None:
        half = numbers.size // 2
        low = self._bytes[: numbers.size]
        np.copyto(low, numbers, casting="unsafe")
        np.left_shift(low[half:], 4, out=codes)
        np.bitwise_and(low[:half], 15, out=low[:half])
        np.bitwise_or(codes, low[:half], out=codes)

    def _unpack(self, codes: Array, work: Array) -> None:
        half = work.size // 2
        signed, low = codes.view(np.int8), self._bytes[:half].view(np.int8)
        np.left_shift(signed, 4, out=low)
        np.right_shift(low, 4, out=low)
        np.copyto(work[:half], low)
        np.right_shift(signed, 4, out=low)
        np.copyto(work[half:], low)


def _rows(values: Array) -> Array:
    return values.reshape(-1, BLOCK_ITEMS)


_TABLE: Dict[str, Type[Codec]] = {kind.name: kind for kind in (Float16, BFloat16, Int8, Int4)}


def make_codec(name: str) -> Codec:
    """Return a new codec with its own working space; raises KeyError for an unknown name.

    >>> make_codec("int8").encoded_bytes(1000)
    1040
    """
    return _TABLE[name]()
