"""PyTorch's reductions, in terms of those that ringcomm has."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np
import torch.distributed as dist

from ...collective.reduce import kernel
from ...dtypes import Array
from ...errors import Misuse, UnsupportedDtypeError
from ...ops import Bitwise, ReduceOp

_KIND = dist.ReduceOp.RedOpType

_PLAIN: Dict[Any, ReduceOp] = {
    _KIND.SUM: ReduceOp.SUM,
    _KIND.AVG: ReduceOp.AVERAGE,
    _KIND.MIN: ReduceOp.MIN,
    _KIND.MAX: ReduceOp.MAX,
    _KIND.PRODUCT: ReduceOp.PRODUCT,
}
_BITWISE: Dict[Any, Tuple[Bitwise, Callable[..., Any]]] = {
    _KIND.BAND: (Bitwise.BAND, np.bitwise_and),
    _KIND.BOR: (Bitwise.BOR, np.bitwise_or),
    _KIND.BXOR: (Bitwise.BXOR, np.bitwise_xor),
}


class Reduction(NamedTuple):
    """How contributions become one.

    Attributes:
        op: the reduction that ringcomm has for it, or None.
        ufunc: what combines two contributions, if there is none.
        factor: multiplies this rank's contribution before.
        code: what stands for it in headers.
        name: what headers add to that.
    """

    op: Optional[ReduceOp]
    code: int
    ufunc: Optional[Callable[..., Any]] = None
    factor: float = 1.0
    name: str = ""

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """The reduction that PyTorch's ``ReduceOp`` stands for.

        Raises:
            Misuse: there is none.
        """
        kind = getattr(op, "op", op)
        found = _KNOWN.get(kind)
        if found is not None:
            return found
        if kind == _KIND.PREMUL_SUM:
            # All ranks must multiply; by what, each may decide for itself.
            return cls(ReduceOp.SUM, int(ReduceOp.SUM), None, _number(op.factor), "PREMUL_SUM")
        raise Misuse(f"{op!r} is no reduction that the backend 'ringcomm' knows.")

    def labelled(self, label: str) -> Reduction:
        """The same, with a label that headers add to its name."""
        return self._replace(name=f"{self.name} {label}".strip())

    def prepare(self, contribution: Array) -> None:
        """Multiply this rank's contribution by its factor, in place."""
        if self.factor != 1.0:
            kernel(ReduceOp.SUM, contribution.dtype, 1, self.factor).prepare(contribution)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Raise UnsupportedDtypeError if it has no meaning for these elements."""
        if self.ufunc is not None and dtype.kind not in "biu":
            raise UnsupportedDtypeError(f"bitwise reductions need integers or booleans, not {dtype}.")


_KNOWN: Dict[Any, Reduction] = {
    **{kind: Reduction(op, int(op)) for kind, op in _PLAIN.items()},
    **{kind: Reduction(None, int(op), ufunc) for kind, (op, ufunc) in _BITWISE.items()},
}


def _number(factor: Any) -> float:
    if getattr(factor, "numel", lambda: 1)() != 1:
        raise Misuse("PREMUL_SUM needs one factor for the whole tensor, not a tensor of them.")
    return float(factor)
