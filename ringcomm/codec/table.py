"""Codecs by name."""

from __future__ import annotations

from typing import Dict, Type

from .base import Codec
from .halves import BFloat16, Float16
from .quantized import Int4, Int8

_TABLE: Dict[str, Type[Codec]] = {kind.name: kind for kind in (Float16, BFloat16, Int8, Int4)}


def make_codec(name: str) -> Codec:
    """A new codec, with working space of its own.

    Args:
        name: one of ``fp16``, ``bf16``, ``int8``, ``int4``.

    Raises:
        KeyError: there is none of that name.

    >>> make_codec("int8").encoded_bytes(1000)
    1040
    """
    return _TABLE[name]()
