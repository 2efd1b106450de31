"""Codecs by name."""

from __future__ import annotations

from typing import Dict, Type

from .base import Codec
from .halves import BFloat16, Float16
from .quantized import Int4, Int8

_TABLE: Dict[str, Type[Codec]] = {kind.name: kind for kind in (Float16, BFloat16, Int8, Int4)}


def make_codec(name: str) -> Codec:
    """Return a new codec with its own working space; raises KeyError for an unknown name.

    >>> make_codec("int8").encoded_bytes(1000)
    1040
    """
    return _TABLE[name]()
