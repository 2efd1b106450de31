"""The compressors for ``compression=``. JAX arrays convert themselves, in compiled programs too."""

from __future__ import annotations

from .._adapter.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    Int4Compressor,
    Int8Compressor,
    NoneCompressor,
    PowerSGD,
)

__all__ = [
    "BF16Compressor", "Compression", "Compressor", "FP16Compressor", "Int4Compressor", "Int8Compressor",
    "NoneCompressor", "PowerSGD",
]  # fmt: skip
