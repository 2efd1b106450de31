"""Codes of PyTorch's dtypes in message headers."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch


@lru_cache(maxsize=None)
def type_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype: 32 bits, the same in all versions of PyTorch, never 0."""
    return zlib.crc32(str(dtype).encode()) or 1


def type_name(code: int) -> str:
    """Return the name of the dtype with this code, for example ``float32``."""
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype) and type_code(dtype) == code:
            return str(dtype).replace("torch.", "")
    return "a type that this PyTorch does not have"
