"""Compression of gradients on the network: the values of ``compression=``."""

from __future__ import annotations

from typing import Any

import mxnet as mx

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
from ..errors import UnsupportedDtypeError

__all__ = [
    "BF16Compressor", "Compression", "Compressor", "FP16Compressor", "Int4Compressor", "Int8Compressor",
    "NoneCompressor", "PowerSGD",
]  # fmt: skip


def _cast(array: mx.nd.NDArray, dtype: Any) -> mx.nd.NDArray:
    if dtype == "bfloat16":
        raise UnsupportedDtypeError(
            "MXNet's NDArrays cannot be converted to bfloat16. Pass Compression.bf16 to DistributedTrainer: "
            "it converts gradients while they are sent."
        )
    return array.astype(dtype)


register_cast(mx.nd.NDArray, _cast)
