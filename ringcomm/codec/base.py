"""The interface of a codec: float32 values to fewer bytes and back, one segment at a time.

A span of a vector is coded in *segments* of :data:`SEGMENT_ITEMS` values, so that all passes over a segment
stay in the processor's cache and sending can start when the first segment is done. The layout of a segment is
part of the wire format. A codec has its own working space, so it allocates nothing after it was made; one
thread at a time may use it.

Everything that more than one rank computes (decoding) is element-wise arithmetic of IEEE 754 in a fixed
order, so different processors get the same bits. Scales are computed once, by the rank that encodes, and
sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Optional

import numpy as np

BLOCK_ITEMS = 256
"""Values that share a scale. The boundaries between ranks' chunks are multiples of it."""

SEGMENT_ITEMS = 32768
"""Values per segment: 128 KiB of float32; two copies and the codes fit into most second-level caches."""


class Codec(ABC):
    """Encodes and decodes segments. For one thread at a time."""

    name = ""  # one of :data:`ringcomm.ops.CODECS`

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the size in bytes of ``count`` encoded values."""

    @abstractmethod
    def encode(
        self,
        values: np.ndarray[Any, Any],
        codes: np.ndarray[Any, Any],
        decoded: Optional[np.ndarray[Any, Any]] = None,
    ) -> bool:
        """Encode one segment of float32 values, flat and contiguous, into ``encoded_bytes(values.size)``
        bytes, and return whether all values were finite and within the codec's range.

        ``decoded`` is overwritten with the result of :meth:`decode`; it may be ``values`` itself. The caller
        suppresses NumPy's warnings about overflow and NaN.
        """

    @abstractmethod
    def decode(self, codes: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Decode one segment into as many float32 values as were encoded."""
