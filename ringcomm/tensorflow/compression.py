"""Tensors in fewer bytes: what ``compression=`` takes."""

from __future__ import annotations

from typing import Any, Tuple

import tensorflow as tf

from .._adapter.compression import wire_dtype


class Compressor:
    """How a tensor travels. Derive from it for a way of your own."""

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """What is to travel, and what :meth:`decompress` needs to know."""
        raise NotImplementedError

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The tensor again, from what has travelled."""
        raise NotImplementedError


class _Cast(Compressor):
    kind = "none"

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        smaller = wire_dtype(cls.kind, tensor.dtype.name)
        return (tensor, None) if smaller is None else (tf.cast(tensor, smaller), tensor.dtype)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class NoneCompressor(_Cast):
    """Tensors travel as they are."""


class FP16Compressor(_Cast):
    """Floating-point numbers travel as float16: 11 bits precise, up to 65504."""

    kind = "fp16"


class BF16Compressor(_Cast):
    """Floating-point numbers travel as bfloat16: 8 bits precise, as large as float32."""

    kind = "bf16"


class Compression:
    """The compressions that exist."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
