"""The compressors for ``compression=``, for every framework, their public names, and error feedback.

Error feedback adds the compression error of each gradient to the next one. These residuals belong to
parameters by name, so they survive new buckets, and a program can save them. Every rank has other residuals.
"""

from __future__ import annotations

import logging
from math import prod
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from ..errors import ConfigError

logger = logging.getLogger(__name__)

__all__ = [
    "BF16Compressor", "Compression", "Compressor", "FP16Compressor", "Int4Compressor", "Int8Compressor",
    "NoneCompressor",
]  # fmt: skip

# The dtype in which floating-point numbers are sent, by the name of the compression.
WIRE_DTYPES: Dict[str, Optional[str]] = {"none": None, "fp16": "float16", "bf16": "bfloat16"}

_WIDE = ("float32", "float64")


def wire_dtype(compression: str, dtype: str) -> Optional[str]:
    """Return the dtype in which float32 and float64 are sent; None: their own."""
    return WIRE_DTYPES.get(compression) if dtype in _WIDE else None


def dtype_name(tensor: Any) -> str:
    """Return NumPy's name of a tensor's dtype."""
    dtype = tensor.dtype
    if isinstance(dtype, type):  # MXNet's: numpy.float32 itself
        return dtype.__name__
    return str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])


Cast = Callable[[Any, Any], Any]

_casts: List[Tuple[type, Cast]] = []


def register_cast(kind: type, cast: Cast) -> None:
    """Register a conversion to another dtype for tensors that have no ``astype()`` as NumPy's arrays do."""
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
        """Return the tensor to send, and a context for :meth:`decompress`."""
        raise NotImplementedError

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its original dtype; ``ctx`` is from :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors in their own dtype."""

    kind = "none"

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Convert a float32 or float64 tensor to this compressor's dtype, if it has one.

        Return it with its original dtype, or None if it was not converted.
        """
        smaller = wire_dtype(cls.kind, dtype_name(tensor))
        return (tensor, None) if smaller is None else (_cast(tensor, smaller), tensor.dtype)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Convert a tensor back to its original dtype ``ctx``; None: leave it."""
        return tensor if ctx is None else _cast(tensor, ctx)


class FP16Compressor(NoneCompressor):
    """Send float32 and float64 as float16: 11 bits of precision, largest value 65504."""

    kind = "fp16"


class BF16Compressor(NoneCompressor):
    """Send float32 and float64 as bfloat16: 8 bits of precision, the range of float32."""

    kind = "bf16"


class _GradientCompressor(NoneCompressor):
    """A compression that the reduction itself executes, because sums of what is sent have no meaning."""

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Raise ConfigError: the compressor must be passed to a reduction."""
        raise ConfigError(
            f"Compression {cls.kind} has no compress(): codes cannot be added. Pass it as compression= to "
            "allreduce(), reducescatter(), DistributedOptimizer or DistributedGradientTape."
        )


class Int8Compressor(_GradientCompressor):
    """Send gradients of matrices as int8 (a scale per 256), others as bfloat16, with error feedback."""

    kind = "int8"


class Int4Compressor(_GradientCompressor):
    """Send gradients of matrices as int4 (a scale per 256), others as bfloat16, with error feedback."""

    kind = "int4"


class Compression:
    """The compressors for ``compression=``.

    Attributes:
        none: sends tensors in their own dtype.
        fp16: sends float32 and float64 as float16.
        bf16: sends float32 and float64 as bfloat16.
        int8: gradients of matrices in a quarter of the bytes of float32; with error feedback.
        int4: in an eighth.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor


_NAMED: Dict[str, Any] = {
    kind.kind: kind
    for kind in (NoneCompressor, FP16Compressor, BF16Compressor, Int8Compressor, Int4Compressor)
}

BLOCKWISE = frozenset(("int8", "int4"))  # codecs with a scale per block and error feedback

# Smaller gradients are sent as bfloat16: they have few bytes, and biases and scales of normalization lose
# most by coarse rounding.
MIN_ITEMS = 4096


def compressor_of(compression: Any) -> Any:
    """Return the compressor for ``compression=``: a compressor, a name, or None; else ConfigError."""
    if compression is None:
        return NoneCompressor
    if hasattr(compression, "compress") or hasattr(compression, "kind"):
        return compression
    if not isinstance(compression, str) or compression not in _NAMED:
        raise ConfigError(
            f"compression={compression!r}: there are {', '.join(map(repr, _NAMED))}, and objects with "
            "compress() and decompress(), such as Compression.fp16."
        )
    return _NAMED[compression]


def codec_for(compression: Any, dtype: str, shape: Sequence[int]) -> str:
    """Return the codec of a gradient, or ``"none"`` if the reduction does not encode it."""
    kind = getattr(compression, "kind", "")
    if kind not in BLOCKWISE or dtype not in _WIDE:
        return "none"
    return str(kind) if len(shape) >= 2 and prod(shape) >= MIN_ITEMS else "bf16"


def is_elementwise(compression: Any) -> bool:
    """Return whether a compressor can be applied to several concatenated tensors: all of ringcomm's can."""
    return compression in _NAMED.values()


class Residuals:
    """The residuals of one rank, float32, by parameter name."""

    def __init__(self) -> None:
        self._arrays: Dict[str, Array] = {}

    def of(self, name: str, items: int) -> Array:
        """Return the flat residual of a parameter; zeros at first."""
        known = self._arrays.get(name)
        if known is None or known.size != items:
            known = self._arrays[name] = np.zeros(items, np.float32)
        return known

    def side_by_side(
        self, names: Sequence[str], sizes: Sequence[int], starts: Sequence[int], count: int
    ) -> Array:
        """Return residuals in one array of ``count`` elements, which replaces the separate ones."""
        whole = np.zeros(count, np.float32)
        for name, items, start in zip(names, sizes, starts):
            part = whole[start : start + items]
            part[:] = self.of(name, items)
            self._arrays[name] = part
        return whole

    def drop(self, names: Sequence[str]) -> None:
        """Forget the residuals of some parameters."""
        for name in names:
            self._arrays.pop(name, None)

    def reset(self, why: str) -> None:
        """Forget all residuals, and log that in one line if there were any."""
        reset_all([self], why)

    def clear(self) -> int:
        """Forget all residuals; return how many parameters had one."""
        lost = sum(1 for array in self._arrays.values() if array.any())
        for array in self._arrays.values():
            array[:] = 0
        return lost

    def scale(self, factor: float) -> None:
        """Multiply all residuals, for example after the scale of losses has changed by that factor."""
        for array in self._arrays.values():
            np.multiply(array, np.float32(factor), out=array)

    def state(self) -> Dict[str, Array]:
        """Return copies by parameter name, for a checkpoint of this rank."""
        return {name: array.copy() for name, array in self._arrays.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Continue with the residuals of :meth:`state`; parameters that are not in it start with zeros."""
        for name, array in self._arrays.items():
            array[:] = state[name] if name in state and state[name].size == array.size else 0
        for name, given in state.items():
            if name not in self._arrays:
                self._arrays[name] = np.array(given, np.float32).reshape(-1)


def reset_all(residuals: Sequence[Residuals], why: str) -> None:
    """Forget the residuals of several groups of parameters, and log that in one line if there were any."""
    lost = sum(item.clear() for item in residuals)
    if lost:
        logger.info("error feedback of %d parameters is dropped: %s", lost, why)
