"""MLX arrays as NumPy arrays of the same memory, and back."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence

import mlx.core as mx
import numpy as np

from .._adapter.compression import register_cast
from ..dtypes import Array, dtype_named
from ..errors import NotOfferedError

register_cast(
    mx.array, lambda array, dtype: array.astype(getattr(mx, dtype) if isinstance(dtype, str) else dtype)
)


def to_host(array: mx.array) -> Array:
    """Compute an array, and return its memory as a NumPy array."""
    if array.dtype == mx.bfloat16:  # NumPy does not take it from MLX
        bits: Array = to_host(array.view(mx.uint16))
        return bits.view(dtype_named("bfloat16"))
    evaluate(mx.eval, [array])
    return np.asarray(array)


def from_host(array: Array) -> mx.array:
    """Return a new array with the elements of a NumPy array."""
    if array.dtype.name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array, dtype=getattr(mx, array.dtype.name.replace("bool", "bool_")))


def evaluate(how: Any, arrays: Sequence[mx.array]) -> None:
    """Compute arrays by ``mx.eval`` or ``mx.async_eval``.

    NotOfferedError: MLX is transforming the function that has called the collective.
    """
    try:
        how(*arrays)
    except (ValueError, RuntimeError) as problem:
        if "transformation" not in str(problem):
            raise
        raise NotOfferedError(
            "A collective cannot be part of a function that mx.compile or mx.vmap transforms: call it "
            "outside, between two compiled functions."
        ) from problem


class Blocks:
    """Copies of arrays in new memory, which collectives overwrite.

    ``groups`` are indices of arrays that are side by side in one block, with one dtype.
    """

    def __init__(self, arrays: Sequence[mx.array], groups: Sequence[Sequence[int]]) -> None:
        self._arrays, self._groups = arrays, groups
        self._blocks = []
        for group in groups:
            flat = [arrays[index].reshape(-1) for index in group]
            # Of one array MLX makes no copy; the empty part makes it one of two.
            self._blocks.append(mx.concatenate([*flat, flat[0][:0]]))

    def start(self) -> None:
        """Compute all blocks in the background, in their order; not while MLX differentiates."""
        evaluate(mx.async_eval, self._blocks)

    def views(self, weight: Optional[float] = None) -> Iterator[Any]:
        """Yield NumPy arrays of the memory when they are computed, and ``weight`` after each group."""
        for place, group in enumerate(self._groups):
            yield from self._parts(to_host(self._blocks[place]), group)
            if weight is not None:
                yield weight

    def results(self) -> List[mx.array]:
        """Return the arrays in place of the given ones, in their order."""
        found: List[Any] = [None] * len(self._arrays)
        for block, group in zip(self._blocks, self._groups):
            for index, part in zip(group, self._parts(block, group)):
                found[index] = part
        return found

    def _parts(self, block: Any, group: Sequence[int]) -> Iterator[Any]:
        start = 0
        for index in group:
            array = self._arrays[index]
            yield block[start : start + array.size].reshape(array.shape)
            start += array.size
