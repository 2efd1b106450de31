"""Compression of gradients on the network: the values of ``compression=``."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from .._adapter.compression import *  # noqa: F403
from .._adapter.compression import register_cast
from ..errors import UnsupportedDtypeError


def _cast(array: mx.nd.NDArray, dtype: Any) -> mx.nd.NDArray:
    if dtype == "bfloat16":
        raise UnsupportedDtypeError(
            "MXNet's NDArrays cannot be converted to bfloat16. Pass Compression.bf16 to DistributedTrainer: "
            "it converts gradients while they are sent."
        )
    return array.astype(dtype)


register_cast(mx.nd.NDArray, _cast)
