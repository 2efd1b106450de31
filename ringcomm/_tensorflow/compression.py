"""The compressors for ``compression=``, with TensorFlow's cast registered."""

from __future__ import annotations

import tensorflow as tf

from .._adapter.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    Int4Compressor,
    Int8Compressor,
    NoneCompressor,
    PowerSGD,
    register_cast,
)

__all__ = [
    "BF16Compressor", "Compression", "Compressor", "FP16Compressor", "Int4Compressor", "Int8Compressor",
    "NoneCompressor", "PowerSGD",
]  # fmt: skip

register_cast(tf.Tensor, tf.cast)
