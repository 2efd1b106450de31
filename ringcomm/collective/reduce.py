"""The arithmetic of a reduction: folding contributions, weights, and the scaling before and after."""

from __future__ import annotations

from functools import lru_cache
from math import frexp, fsum, ldexp
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array, accumulator, check_reducible, check_scalable
from ..errors import UnsupportedDtypeError
from ..ops import Bitwise, ReduceOp, op_name

_UFUNC: Dict[int, Callable[..., Any]] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    Bitwise.BAND: np.bitwise_and,
    Bitwise.BOR: np.bitwise_or,
    Bitwise.BXOR: np.bitwise_xor,
}

_BLOCK_ITEMS = 1 << 15
"""Wide arithmetic goes block by block, so that its working space stays in the processor's cache."""
_FEW = 8
"""Python looks through this many numbers in a fifth of the time that NumPy takes to begin."""


class Workspace:
    """Two blocks of wide elements, so that folding allocates nothing. For one thread at a time."""

    def __init__(self) -> None:
        self._blocks: List[Array] = []

    def wide(self, block: Array, dtype: np.dtype[Any], index: int) -> Array:
        """Return a copy of a block, of a wider type, in place ``index`` (0 or 1)."""
        if not self._blocks:
            self._blocks = [np.empty(_BLOCK_ITEMS, np.float64) for _ in range(2)]
        copy = self._blocks[index].view(dtype)[: block.size]
        np.copyto(copy, block, casting="unsafe")
        return copy


class Kernel:
    """The combination of contributions of one element type; immutable."""

    def __init__(
        self,
        op: int,  # :class:`~ringcomm.ops.ReduceOp` or :class:`~ringcomm.ops.Bitwise`
        dtype: np.dtype[Any],
        size: int,  # averages are divided by it
        prescale: float = 1.0,  # of every contribution before the reduction
        postscale: float = 1.0,  # of the result
    ) -> None:
        scaled = prescale != 1.0 or postscale != 1.0
        if op not in _UFUNC:
            raise UnsupportedDtypeError(f"{op_name(op)} exists for allreduce only.")
        check_reducible(dtype, op)
        if scaled:
            check_scalable(dtype)
        self.dtype = dtype
        self.prescale = prescale
        self.postscale = postscale
        self.divisor = size if op == ReduceOp.AVERAGE else 1
        with np.errstate(all="ignore"):
            # As arrays without dimensions: NumPy takes half as long again with a scalar.
            self._divisor, self._postscale = (
                np.asarray(number).astype(dtype) for number in (self.divisor, postscale)
            )
            self.unit = np.float64(self.divisor / postscale if postscale else 0.0).astype(np.float32)
            """The change of a contribution per unit of the result, for error feedback."""
        self._ufunc = _UFUNC[op]
        self._wide = accumulator(dtype, op, scaled)
        self._plain = self.divisor == 1 and postscale == 1.0
        self._selects = op in (ReduceOp.MIN, ReduceOp.MAX)
        self._exact = dtype.kind in "biu"

    @property
    def needs_single_fold(self) -> bool:
        """Return whether all contributions must meet in one fold, because sums between would be rounded."""
        return self._wide is not None

    @property
    def warns(self) -> bool:
        """Return whether NumPy may warn about the numbers: overflow, or NaN."""
        return not self._exact or self._wide is not None

    def prepare(self, contribution: Array) -> None:
        """Apply the prescale factor, in place."""
        if self.prescale != 1.0:
            multiply(contribution, self.prescale)

    def fold(
        self,
        out: Array,
        operands: Sequence[Array],
        final: bool,
        workspace: Optional[Workspace] = None,
    ) -> None:
        """Combine the operands from left to right into ``out``, which may be one of them; the others may be
        used as working space. ``final`` also divides, scales and settles the result.
        """
        if self._wide is not None:
            self._fold_wide(out, operands, self._wide, workspace or Workspace())
            return
        # Accumulate in the first operand: if ``out`` stands in the middle it must stay whole until
        # its turn, and if it stands first this is in place anyway.
        accumulated = operands[0]
        for operand in operands[1:-1]:
            self._ufunc(accumulated, operand, out=accumulated)
        self._ufunc(accumulated, operands[-1], out=out)
        if final:
            if not self._plain:
                self._scale(out)
            self._settle(out)

    def finish_alone(self, data: Array) -> None:
        """Finish the data of a job of one rank, in place, without a fold."""
        if self._plain:
            return
        with np.errstate(all="ignore"):
            if self._wide is not None:
                for block in _blocks(data):
                    self._finish_wide(block, block.astype(self._wide))
            else:
                self._scale(data)

    def _settle(self, data: Array) -> None:
        """Give results the bits that IEEE 754 leaves open, in place: which NaN, and which zero. NumPy's
        choice varies with alignment, length and processor, so ranks that compute the same element would
        differ.
        """
        if self._exact or data.size == 0:
            return
        if data.dtype.kind == "c":
            data = data.view(np.float32 if data.dtype == np.complex64 else np.float64)
        # NaN if one of them is: one quick pass in the case without.
        total = sum(data.tolist()) if data.size <= _FEW else np.maximum.reduce(data)
        if total != total:
            data[np.isnan(data)] = np.nan
        if self._selects:
            np.add(data, data.dtype.type(0), out=data)  # -0.0 + 0.0 is 0.0

    def _scale(self, data: Array) -> None:
        if self.divisor != 1:
            np.divide(data, self._divisor, out=data)
        if self.postscale != 1.0:
            np.multiply(data, self._postscale, out=data)

    def _fold_wide(
        self,
        out: Array,
        operands: Sequence[Array],
        wide: np.dtype[Any],
        workspace: Workspace,
    ) -> None:
        for start in range(0, out.size, _BLOCK_ITEMS):
            block = slice(start, start + _BLOCK_ITEMS)
            accumulated = workspace.wide(operands[0][block], wide, 0)
            for operand in operands[1:]:
                self._ufunc(accumulated, workspace.wide(operand[block], wide, 1), out=accumulated)
            self._finish_wide(out[block], accumulated)

    def _finish_wide(self, out: Array, accumulated: Array) -> None:
        wide = accumulated.dtype.type
        if self.postscale != 1.0:
            np.multiply(accumulated, wide(self.postscale), out=accumulated)
        if self.divisor != 1:
            # Divide, do not multiply by 1/n: 49 * (1 / 49) is less than one and truncates to 0.
            np.divide(accumulated, wide(self.divisor), out=accumulated)
        self._settle(accumulated)  # before the rounding: wide types are quicker to look through
        _round(out, accumulated)


def multiply(data: Array, factor: float) -> None:
    """Multiply numbers in place; those of types with few digits, or of integers, in a wider type."""
    if factor == 1.0:
        return
    wide = accumulator(data.dtype, ReduceOp.SUM, True)
    with np.errstate(all="ignore"):
        if wide is None:
            np.multiply(data, data.dtype.type(factor), out=data)
            return
        for block in _blocks(data):
            copy = block.astype(wide)
            _round(block, np.multiply(copy, wide.type(factor), out=copy))


NO_WEIGHTS = "the weights of all ranks are 0, so there is no average."


class Total(NamedTuple):
    """A sum of weights: ``part * 2 ** exponent``, since it may exceed the range of a float.

    >>> Total.of([1e308, 1e308, 0.0]).share(1e308, 3)
    1.5
    """

    part: float
    exponent: int

    @classmethod
    def of(cls, weights: Iterable[float]) -> Total:
        """Return the exactly rounded sum: the same for any order of the ranks."""
        listed = list(weights)
        exponent = frexp(max(listed))[1]
        return cls(fsum(ldexp(weight, -exponent) for weight in listed), exponent)

    def share(self, weight: float, count: int) -> float:
        """Return a weight relative to the mean of ``count`` weights; 1.0 exactly if all are equal."""
        return ldexp(weight, -self.exponent) * count / self.part


def weigh(data: Array, factor: float) -> None:
    """Multiply a contribution (:func:`weighable`) by its weight relative to the mean of all, in place."""
    if factor == 0.0:
        data[...] = 0
    else:
        multiply(data, factor)


def weighable(data: Array) -> Array:
    """Return numbers for :func:`weigh`: a copy in float32 of float16, whose products may not fit."""
    return data.astype(np.float32) if data.dtype == np.float16 else data


def restore(data: Array, result: Array) -> None:
    """Overwrite the argument of :func:`weighable` with a result."""
    if result is not data:
        with np.errstate(all="ignore"):
            np.copyto(data, result, casting="unsafe")


def _round(out: Array, wide: Array) -> None:
    """Convert to the type of the elements: integers truncate, and stop at their limits; NaN becomes 0."""
    if out.dtype.kind in "iu":
        # The conversion of a number that does not fit, or of NaN, differs between x86 and ARM.
        np.clip(wide, *_limits(out.dtype), out=wide)
        greatest = np.maximum.reduce(wide, initial=0.0)  # NaN if one of them is
        if greatest != greatest:
            wide[np.isnan(wide)] = 0
    np.copyto(out, wide, casting="unsafe")


def _blocks(data: Array) -> Iterator[Array]:
    """Yield the array in pieces of which a wide copy costs little."""
    for start in range(0, data.size, _BLOCK_ITEMS):
        yield data[start : start + _BLOCK_ITEMS]


@lru_cache(maxsize=None)
def _limits(dtype: np.dtype[Any]) -> Tuple[float, float]:
    """Return the least and the greatest float64 that an integer type can hold."""
    info = np.iinfo(dtype)
    highest = float(info.max)
    return float(info.min), highest if int(highest) <= info.max else float(np.nextafter(highest, 0.0))


@lru_cache(maxsize=64)
def kernel(
    op: int, dtype: np.dtype[Any], size: int, prescale: float = 1.0, postscale: float = 1.0
) -> Kernel:
    """Return the :class:`Kernel` for these arguments, made once."""
    return Kernel(op, dtype, size, prescale, postscale)
