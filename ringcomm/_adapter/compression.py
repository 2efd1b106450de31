"""The compressors for ``compression=``, for every framework."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple, Type

WIRE_DTYPES = {"none": None, "fp16": "float16", "bf16": "bfloat16"}
"""The dtype in which floating-point numbers are sent, by the name of the compression."""

_WIDE = ("float32", "float64")


def wire_dtype(compression: str, dtype: str) -> Optional[str]:
    """The dtype in which elements of a dtype are sent; None: their own.

    Only float32 and float64 are converted.
    """
    return WIRE_DTYPES[compression] if dtype in _WIDE else None


def dtype_name(tensor: Any) -> str:
    """NumPy's name of a tensor's dtype."""
    dtype = tensor.dtype
    return str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])


Cast = Callable[[Any, Any], Any]

_casts: List[Tuple[type, Cast]] = []


def register_cast(kind: type, cast: Cast) -> None:
    """Register the function that converts tensors of a class to another dtype, given by name or object.

    Tensors of unregistered classes must have a method ``astype()``, as NumPy's arrays do.
    """
    _casts.append((kind, cast))


def _cast(tensor: Any, dtype: Any) -> Any:
    for kind, cast in _casts:
        if isinstance(tensor, kind):
            return cast(tensor, dtype)
    return tensor.astype(dtype)


class Compressor:
    """Base class of compressors, which convert a tensor before it is sent and back after it was received."""

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Compress a tensor.

        Args:
            tensor: a tensor of the adapter's framework.

        Returns:
            the tensor to send, and a context for :meth:`decompress`.
        """
        raise NotImplementedError

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Restore a tensor from the reduced compressed one.

        Args:
            tensor: the received tensor.
            ctx: the context from :meth:`compress`.

        Returns:
            the tensor with its original dtype.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors in their own dtype."""

    kind = "none"

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Convert a float32 or float64 tensor to this compressor's dtype, if it has one.

        Args:
            tensor: a tensor of the adapter's framework.

        Returns:
            the tensor to send, and its original dtype, or None if it was not converted.
        """
        smaller = wire_dtype(cls.kind, dtype_name(tensor))
        return (tensor, None) if smaller is None else (_cast(tensor, smaller), tensor.dtype)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Convert a tensor back to its original dtype.

        Args:
            tensor: the received tensor.
            ctx: the original dtype, or None.

        Returns:
            the tensor with its original dtype.
        """
        return tensor if ctx is None else _cast(tensor, ctx)


class FP16Compressor(NoneCompressor):
    """Sends float32 and float64 as float16: 11 bits of precision, largest value 65504."""

    kind = "fp16"


class BF16Compressor(NoneCompressor):
    """Sends float32 and float64 as bfloat16: 8 bits of precision, the range of float32."""

    kind = "bf16"


class Compression:
    """The compressors for ``compression=``.

    Attributes:
        none: sends tensors in their own dtype.
        fp16: sends float32 and float64 as float16.
        bf16: sends float32 and float64 as bfloat16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def is_elementwise(compression: Type[Any]) -> bool:
    """Whether a compressor can be applied to several concatenated tensors: true for ringcomm's own."""
    return compression in (NoneCompressor, FP16Compressor, BF16Compressor)
