"""What a reduction must give, worked out in the plainest way: one element type, one rounding."""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np

from ringcomm.dtypes import HALF_TYPES
from ringcomm.ops import ReduceOp

ELEMENTWISE = tuple(op for op in ReduceOp if op != ReduceOp.ADASUM)

REAL_NAMES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64",
)  # fmt: skip


def all_dtypes() -> List[np.dtype[Any]]:
    """Every element type that can travel here; bfloat16 only where ml_dtypes is installed."""
    found = [np.dtype(name) for name in ("bool", *REAL_NAMES, "complex64", "complex128")]
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return found
    return [*found, np.dtype(bfloat16)]


def ops_for(dtype: np.dtype[Any]) -> List[ReduceOp]:
    """The reductions that mean something for these elements."""
    if dtype.kind == "b":
        return [op for op in ELEMENTWISE if op != ReduceOp.AVERAGE]
    if dtype.kind == "c":
        return [ReduceOp.AVERAGE, ReduceOp.SUM]
    return list(ELEMENTWISE)


def contributions(dtype: np.dtype[Any], size: int, count: int, seed: int = 0) -> List[np.ndarray[Any, Any]]:
    """One array per rank: small numbers of both signs, so that products of nine of them still fit."""
    random = np.random.default_rng((seed, size, count))
    if dtype.kind == "b":
        return list(random.random((size, count)) < 0.5)
    if dtype.kind in "iu":
        low = 0 if dtype.kind == "u" else -3
        return list(random.integers(low, 4, (size, count)).astype(dtype))
    values = random.uniform(-2, 2, (size, count))
    if dtype.kind == "c":
        return list((values + 1j * random.uniform(-2, 2, (size, count))).astype(dtype))
    return list(values.astype(dtype))


def hard_bits(dtype: np.dtype[Any], count: int, seed: Sequence[int]) -> np.ndarray[Any, Any]:
    """Random bits: every kind of NaN, infinity, zero and subnormal among ordinary numbers."""
    random = np.random.default_rng(seed)
    part = np.dtype({"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype))
    unsigned = np.dtype(f"u{part.itemsize}")
    count *= dtype.itemsize // part.itemsize
    bits = random.integers(0, 2 ** (8 * part.itemsize) - 1, count, dtype=unsigned, endpoint=True)
    infinity = np.array([np.inf], part).view(unsigned)
    kind = random.integers(0, 6, count)
    bits = np.where(kind < 3, bits | infinity, bits)
    bits = np.where(kind == 3, np.zeros(1, unsigned), bits)
    bits = np.where(kind == 4, np.array([-0.0], part).view(unsigned), bits)
    return bits.astype(unsigned).view(dtype)


def reduced(arrays: Sequence[np.ndarray[Any, Any]], op: ReduceOp) -> np.ndarray[Any, Any]:
    """The reduction of all arrays. Integers wrap as numpy's do; floats are rounded once, from float64."""
    dtype = arrays[0].dtype
    if dtype.kind in "bc" or (dtype.kind in "iu" and op != ReduceOp.AVERAGE):
        stacked, keep = np.stack(arrays), dtype
    else:
        stacked, keep = np.stack(arrays).astype(np.float64), np.dtype(np.float64)
    if op == ReduceOp.MIN:
        return np.asarray(stacked.min(axis=0)).astype(dtype)
    if op == ReduceOp.MAX:
        return np.asarray(stacked.max(axis=0)).astype(dtype)
    if op == ReduceOp.PRODUCT:
        return np.asarray(np.multiply.reduce(stacked, axis=0, dtype=keep)).astype(dtype)
    total = np.add.reduce(stacked, axis=0, dtype=keep)
    if op == ReduceOp.AVERAGE:
        total = total / len(arrays)
        total = np.trunc(total) if dtype.kind in "iu" else total
    return np.asarray(total).astype(dtype)


def assert_reduced(
    actual: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]], op: ReduceOp
) -> None:
    """Fail unless ``actual`` is the reduction of the arrays, as exactly as its type allows."""
    expected = reduced(arrays, op)
    assert actual.dtype == expected.dtype, f"{actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{actual.shape}, not {expected.shape}"
    if actual.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected)
        return
    # Half types are added in float32 and rounded once; the others are rounded at every addition.
    bits = {"float16": 10, "bfloat16": 7, "float32": 20, "complex64": 20}.get(actual.dtype.name, 48)
    scale = np.add.reduce(np.abs(np.stack(arrays).astype(np.complex128)), axis=0)
    wide = np.dtype(np.complex128 if actual.dtype.kind == "c" else np.float64)
    slack = np.abs(expected.astype(wide)) if op == ReduceOp.PRODUCT else scale
    slack = np.abs(expected.astype(wide)) if actual.dtype.name in HALF_TYPES else slack
    wrong = np.abs(actual.astype(wide) - expected.astype(wide)) > slack * 2.0**-bits + 1e-30
    assert not wrong.any(), f"{op.name}: {actual[wrong][:3]}, not {expected[wrong][:3]}"


def same_bits(arrays: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Return whether all arrays hold exactly the same bytes."""
    return len({(array.dtype, array.shape, array.tobytes()) for array in arrays}) == 1
