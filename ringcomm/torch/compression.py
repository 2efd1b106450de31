"""Compression of tensors on the network: the values of ``compression=``."""

from __future__ import annotations

from typing import Any, Union

import torch

from .._adapter.compression import *  # noqa: F403
from .._adapter.compression import compressor_of as compressor_of
from .._adapter.compression import register_cast, wire_dtype


def wire_torch_dtype(compression: Any, dtype: torch.dtype) -> Any:
    """Return the dtype on the network under one of ringcomm's compressions; None if unchanged."""
    name = wire_dtype(compression.kind, str(dtype).rpartition(".")[2])
    return None if name is None else getattr(torch, name)


def _cast(tensor: torch.Tensor, dtype: Union[str, torch.dtype]) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


register_cast(torch.Tensor, _cast)
