"""Which numbers travel in fewer bytes: the same rule for every framework."""

from __future__ import annotations

from typing import Optional

WIRE_DTYPES = {"none": None, "fp16": "float16", "bf16": "bfloat16"}
"""The compressions that exist, and what numbers become on the way."""

_WIDE = ("float32", "float64")


def wire_dtype(compression: str, dtype: str) -> Optional[str]:
    """As what elements of a type travel; None if they stay what they are.

    Only floating-point numbers are made smaller, and only to something smaller.
    """
    return WIRE_DTYPES[compression] if dtype in _WIDE else None
