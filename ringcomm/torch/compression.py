"""Compression of tensors on the network: the values of ``compression=``."""

from __future__ import annotations

from typing import Union

import torch

from .._adapter.compression import *  # noqa: F403
from .._adapter.compression import compressor_of as compressor_of
from .._adapter.compression import register_cast


def _cast(tensor: torch.Tensor, dtype: Union[str, torch.dtype]) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


register_cast(torch.Tensor, _cast)
