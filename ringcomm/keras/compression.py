"""Gradients in fewer bytes, on every backend: what ``compression=`` takes."""

from __future__ import annotations


class NoneCompressor:
    """Gradients travel as they are."""

    kind = "none"


class FP16Compressor:
    """Gradients travel as float16: 11 bits precise, up to 65504."""

    kind = "fp16"


class BF16Compressor:
    """Gradients travel as bfloat16: 8 bits precise, as large as float32."""

    kind = "bf16"


class Compression:
    """The compressions that exist."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
