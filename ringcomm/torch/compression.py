"""Gradients in fewer bytes: what ``compression=`` takes."""

from __future__ import annotations

from typing import Any, Tuple, Type

import torch

from .._adapter.compression import wire_dtype


class Compressor:
    """How a tensor travels. Derive from it for a way of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """What is to travel, and what :meth:`decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor again, from what has travelled."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    kind = "none"

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """The same tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The same tensor."""
        return tensor


class _HalfCompressor(Compressor):
    kind = ""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Wider floating-point numbers become those of 16 bits."""
        smaller = wire_torch_dtype(cls, tensor.dtype)
        return (tensor, None) if smaller is None else (tensor.to(smaller), tensor.dtype)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """And what they were before."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_HalfCompressor):
    """Floating-point numbers travel as float16: 11 bits precise, up to 65504."""

    kind = "fp16"


class BF16Compressor(_HalfCompressor):
    """Floating-point numbers travel as bfloat16: 8 bits precise, as large as float32."""

    kind = "bf16"


class Compression:
    """The compressions that exist."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def wire_torch_dtype(compression: Any, dtype: torch.dtype) -> Any:
    """As what elements travel under a compression of ours; None if as they are."""
    name = wire_dtype(compression.kind, str(dtype).rpartition(".")[2])
    return None if name is None else getattr(torch, name)


def is_elementwise(compression: Type[Any]) -> bool:
    """Whether it may be applied to several tensors side by side: whether it is one of ours."""
    return compression in (NoneCompressor, FP16Compressor, BF16Compressor)
