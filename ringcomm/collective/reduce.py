"""The arithmetic of a reduction: folding contributions, and what happens before and after."""

from __future__ import annotations

from typing import Any, Callable, Dict, Sequence

import numpy as np

from ..dtypes import accumulator, check_reducible
from ..ops import ReduceOp

Array = "np.ndarray[Any, Any]"

_UFUNC: Dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class Kernel:
    """How contributions of one element type become one.

    Args:
        op: the reduction.
        dtype: element type of buffers and of what travels.
        size: number of ranks, by which averages are divided.
        prescale: factor for every contribution before the reduction.
        postscale: factor for the result.

    Raises:
        UnsupportedDtypeError: the reduction has no meaning for these elements.
    """

    def __init__(
        self,
        op: ReduceOp,
        dtype: np.dtype[Any],
        size: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        check_reducible(dtype, op)
        self.dtype = dtype
        self.prescale = prescale
        self.postscale = postscale
        self.divisor = size if op == ReduceOp.AVERAGE else 1
        self._ufunc = _UFUNC[op]
        self._wide = accumulator(dtype, op, prescale != 1.0 or postscale != 1.0)
        self._plain = self.divisor == 1 and postscale == 1.0

    @property
    def needs_single_fold(self) -> bool:
        """Whether all contributions must meet in one fold, because sums between would be rounded."""
        return self._wide is not None

    def prepare(self, contribution: np.ndarray[Any, Any]) -> None:
        """Apply the prescale factor, in place."""
        if self.prescale == 1.0:
            return
        if self.dtype.kind in "iu":
            np.copyto(
                contribution, np.trunc(contribution.astype(np.float64) * self.prescale), casting="unsafe"
            )
        elif self._wide is not None:
            np.copyto(
                contribution, contribution.astype(self._wide) * np.float32(self.prescale), casting="unsafe"
            )
        else:
            np.multiply(contribution, self.dtype.type(self.prescale), out=contribution)

    def fold(self, out: np.ndarray[Any, Any], operands: Sequence[np.ndarray[Any, Any]], final: bool) -> None:
        """Combine the operands from left to right into ``out``, which may be one of them.

        Operands other than ``out`` may be used as working space. ``final`` also divides and scales.
        """
        if self._wide is not None:
            self._fold_wide(out, operands)
            return
        # Accumulate in the first operand: if ``out`` stands in the middle it must stay whole until
        # its turn, and if it stands first this is in place anyway.
        accumulated = operands[0]
        for operand in operands[1:-1]:
            self._ufunc(accumulated, operand, out=accumulated)
        self._ufunc(accumulated, operands[-1], out=out)
        if final and not self._plain:
            self._scale(out)

    def finish_alone(self, data: np.ndarray[Any, Any]) -> None:
        """What a job of one rank does instead of a fold, in place."""
        if self._wide is not None:
            self._finish_wide(data, data.astype(self._wide))
        elif not self._plain:
            self._scale(data)

    def _scale(self, data: np.ndarray[Any, Any]) -> None:
        if self.divisor != 1:
            np.divide(data, self.dtype.type(self.divisor), out=data)
        if self.postscale != 1.0:
            np.multiply(data, self.dtype.type(self.postscale), out=data)

    def _fold_wide(self, out: np.ndarray[Any, Any], operands: Sequence[np.ndarray[Any, Any]]) -> None:
        accumulated = operands[0].astype(self._wide)
        for operand in operands[1:]:
            self._ufunc(accumulated, operand.astype(self._wide), out=accumulated)
        self._finish_wide(out, accumulated)

    def _finish_wide(self, out: np.ndarray[Any, Any], accumulated: np.ndarray[Any, Any]) -> None:
        if self.dtype.kind in "iu":
            if not self._plain:
                # Divide, do not multiply by 1/n: 49 * (1 / 49) is less than one and truncates to 0.
                accumulated = np.trunc(accumulated * np.float64(self.postscale) / self.divisor)
        else:
            if self.divisor != 1:
                np.divide(accumulated, np.float32(self.divisor), out=accumulated)
            if self.postscale != 1.0:
                np.multiply(accumulated, np.float32(self.postscale), out=accumulated)
        np.copyto(out, accumulated, casting="unsafe")
