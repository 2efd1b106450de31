"""Element types that can be sent, their codes on the wire, and the accumulators of their sums; shapes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional, Sequence, Tuple

import numpy as np

from .errors import Misuse, ShapeError, UnsupportedDtypeError
from .ops import CODECS, ENCODED, Bitwise, ReduceOp, op_name

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:
    Array = np.ndarray  # on Python 3.8 it takes no parameters

_NAMES: Tuple[str, ...] = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
)  # fmt: skip
_CODE_OF_NAME: Dict[str, int] = {name: code for code, name in enumerate(_NAMES, start=1)}

_MAX_ROWS = 2**63 - 1
HALF_TYPES = frozenset(("float16", "bfloat16"))


@lru_cache(maxsize=None)  # spelling out a dtype's name costs microseconds, and there are few
def code_of(dtype: np.dtype[Any]) -> int:
    """Return the wire code of an element type; UnsupportedDtypeError if it cannot be sent."""
    return code_of_name(dtype.name)


def code_of_name(name: str) -> int:
    """Return the wire code of the element type with this name; UnsupportedDtypeError if it cannot be sent."""
    try:
        return _CODE_OF_NAME[name]
    except KeyError:
        raise UnsupportedDtypeError(
            f"elements of type {name} cannot be sent. These can: {', '.join(_NAMES)}. "
            "For anything else there are broadcast_object and allgather_object."
        ) from None


@lru_cache(maxsize=None)
def type_names(dtype: np.dtype[Any]) -> Tuple[str, ...]:
    """Return the names of the element types of one array: only its dtype."""
    return (dtype.name,)


def name_of_code(code: int) -> str:
    """Return the name of the type with this code; KeyError if no type has it."""
    if not 1 <= code <= len(_NAMES):
        raise KeyError(code)
    return _NAMES[code - 1]


def check_reducible(dtype: np.dtype[Any], op: int) -> None:
    """Raise UnsupportedDtypeError if the reduction has no meaning for these elements."""
    if op >= Bitwise.BAND and dtype.kind not in "biu":
        raise UnsupportedDtypeError(f"bitwise reductions need integers or booleans, not {dtype}.")
    if dtype.kind == "b" and op == ReduceOp.AVERAGE:
        raise UnsupportedDtypeError(
            "an average of booleans has no meaning. Use op=Sum or Max (any), op=Product or Min (all), "
            "or convert to a number type."
        )
    if dtype.kind == "c" and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UnsupportedDtypeError(f"complex numbers have Sum and Average only, not {op_name(op)}.")


def check_scalable(dtype: np.dtype[Any]) -> None:
    """Raise UnsupportedDtypeError if scale factors have no meaning for these elements."""
    if dtype.kind == "b":
        raise UnsupportedDtypeError(
            "prescale_factor and postscale_factor have no meaning for booleans. Convert to a number type."
        )


def check_weighable(dtype: np.dtype[Any], op: int) -> None:
    """Raise an error if a weighted average has no meaning for these elements or this reduction."""
    if op != ReduceOp.AVERAGE:
        raise Misuse(
            f"weight=... makes a weighted average, so it has no meaning with op={op_name(op)}."
        )
    if dtype.kind in "biu":
        raise UnsupportedDtypeError(
            f"a weighted average needs floating-point or complex numbers, not {dtype.name}. Convert it first."
        )


def usable_codec(codec: int, dtype: np.dtype[Any], op: int) -> int:
    """Return the codec with which elements are sent: none for integers, and reductions that do not add."""
    wide = dtype.kind == "f" and dtype.itemsize > 2
    half = dtype.name in HALF_TYPES and CODECS[codec] in ENCODED
    return codec if (wide or half) and op in (ReduceOp.SUM, ReduceOp.AVERAGE) else 0


def accumulator(dtype: np.dtype[Any], op: int, scaled: bool) -> Optional[np.dtype[Any]]:
    """Return the wider type in which contributions are combined before they are rounded once, or None.

    Half-precision sums and products are kept in float32. Integer averages, and scaled integer results, are
    kept in float64: sums of up to 32 bits stay exact in it, and sums of 64 bits do not wrap before they are
    divided.
    """
    if dtype.name in HALF_TYPES:
        if op in (ReduceOp.MIN, ReduceOp.MAX) and not scaled:
            return None
        return np.dtype(np.float32)
    if dtype.kind in "iu" and (op == ReduceOp.AVERAGE or scaled):
        return np.dtype(np.float64)
    return None


@lru_cache(maxsize=None)
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the element type with this name; UnsupportedDtypeError if its package is not installed."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise UnsupportedDtypeError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
        name = ml_dtypes.bfloat16
    return np.dtype(name)


def joined_shape(counts: Iterable[Any], inner: Sequence[int]) -> Tuple[int, ...]:
    """Return the shape of an array of all ranks' rows, from their counts and the shape of a row.

    ShapeError: no array has that many rows, even without elements.
    """
    total = sum(map(int, counts))
    if total > _MAX_ROWS:
        raise ShapeError(f"All ranks' arrays have {total} rows together; an array has at most {_MAX_ROWS}.")
    return (total, *inner)
