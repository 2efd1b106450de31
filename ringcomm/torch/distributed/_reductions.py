"""Maps PyTorch's reduction operations to ringcomm's."""

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
    """A reduction operation.

    Attributes:
        op: ringcomm's operation, or None if it has none.
        code: its number in message headers.
        ufunc: combines two contributions, if ``op`` is None.
        factor: this rank's contribution is multiplied by it.
        name: appended to the code in message headers.
    """

    op: Optional[ReduceOp]
    code: int
    ufunc: Optional[Callable[..., Any]] = None
    factor: float = 1.0
    name: str = ""

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """The reduction for a ``ReduceOp`` of PyTorch.

        Raises:
            Misuse: the backend has none.
        """
        kind = getattr(op, "op", op)
        found = _KNOWN.get(kind)
        if found is not None:
            return found
        if kind == _KIND.PREMUL_SUM:
            # All ranks must multiply; the factors may differ.
            return cls(ReduceOp.SUM, int(ReduceOp.SUM), None, _number(op.factor), "PREMUL_SUM")
        raise Misuse(f"{op!r} is not a reduction that the backend 'ringcomm' supports.")

    def labelled(self, label: str) -> Reduction:
        """The same reduction with a label appended to its name."""
        return self._replace(name=f"{self.name} {label}".strip())

    def prepare(self, contribution: Array) -> None:
        """Multiply this rank's contribution by its factor, in place."""
        if self.factor != 1.0:
            kernel(ReduceOp.SUM, contribution.dtype, 1, self.factor).prepare(contribution)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Raise UnsupportedDtypeError if it is not defined for this dtype."""
        if self.ufunc is not None and dtype.kind not in "biu":
            raise UnsupportedDtypeError(f"bitwise reductions need integers or booleans, not {dtype}.")


_KNOWN: Dict[Any, Reduction] = {
    **{kind: Reduction(op, int(op)) for kind, op in _PLAIN.items()},
    **{kind: Reduction(None, int(op), ufunc) for kind, (op, ufunc) in _BITWISE.items()},
}


def _number(factor: Any) -> float:
    if getattr(factor, "numel", lambda: 1)() != 1:
        raise Misuse("PREMUL_SUM needs one factor for the whole tensor, not a tensor of factors.")
    return float(factor)
