"""Tensors in fewer bytes: what ``compression=`` takes, the same for every framework."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple, Type

WIRE_DTYPES = {"none": None, "fp16": "float16", "bf16": "bfloat16"}
"""The compressions that exist, and what numbers become on the way."""

_WIDE = ("float32", "float64")


def wire_dtype(compression: str, dtype: str) -> Optional[str]:
    """As what elements of a type travel; None if they stay what they are.

    Only floating-point numbers are made smaller, and only to something smaller.
    """
    return WIRE_DTYPES[compression] if dtype in _WIDE else None


def dtype_name(tensor: Any) -> str:
    """The name of a tensor's element type, as NumPy has it."""
    dtype = tensor.dtype
    return str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])


Cast = Callable[[Any, Any], Any]

_casts: List[Tuple[type, Cast]] = []


def register_cast(kind: type, cast: Cast) -> None:
    """Tell how tensors of a kind are changed to another element type, named or their framework's own.

    Those of other kinds have a method ``astype()``, as NumPy's do.
    """
    _casts.append((kind, cast))


def _cast(tensor: Any, dtype: Any) -> Any:
    for kind, cast in _casts:
        if isinstance(tensor, kind):
            return cast(tensor, dtype)
    return tensor.astype(dtype)


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


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    kind = "none"

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """See :meth:`Compressor.compress`."""
        smaller = wire_dtype(cls.kind, dtype_name(tensor))
        return (tensor, None) if smaller is None else (_cast(tensor, smaller), tensor.dtype)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """See :meth:`Compressor.decompress`."""
        return tensor if ctx is None else _cast(tensor, ctx)


class FP16Compressor(NoneCompressor):
    """Floating-point numbers travel as float16: 11 bits precise, up to 65504."""

    kind = "fp16"


class BF16Compressor(NoneCompressor):
    """Floating-point numbers travel as bfloat16: 8 bits precise, as large as float32."""

    kind = "bf16"


class Compression:
    """The compressions that exist."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def is_elementwise(compression: Type[Any]) -> bool:
    """Whether it may be applied to several tensors side by side: whether it is one of ours."""
    return compression in (NoneCompressor, FP16Compressor, BF16Compressor)
