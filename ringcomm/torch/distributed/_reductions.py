"""Map PyTorch's reduction operations to ringcomm's."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Union

import torch.distributed as dist

from ...collective.reduce import multiply
from ...dtypes import Array
from ...errors import Misuse
from ...ops import Bitwise, ReduceOp

_KIND = dist.ReduceOp.RedOpType

_OPS: Dict[Any, Union[ReduceOp, Bitwise]] = {
    _KIND.SUM: ReduceOp.SUM,
    _KIND.AVG: ReduceOp.AVERAGE,
    _KIND.MIN: ReduceOp.MIN,
    _KIND.MAX: ReduceOp.MAX,
    _KIND.PRODUCT: ReduceOp.PRODUCT,
    _KIND.BAND: Bitwise.BAND,
    _KIND.BOR: Bitwise.BOR,
    _KIND.BXOR: Bitwise.BXOR,
}


class GroupReduction(NamedTuple):
    """A reduction operation."""

    op: Any
    factor: float = 1.0  # this rank's contribution is multiplied by it
    name: str = ""  # in message headers

    @classmethod
    def of(cls, op: Any) -> GroupReduction:
        """Return the reduction for a ``ReduceOp`` of PyTorch; Misuse if the backend has none."""
        kind = getattr(op, "op", op)
        found = _KNOWN.get(kind)
        if found is not None:
            return found
        if kind == _KIND.PREMUL_SUM:
            # All ranks must multiply; the factors may differ.
            return cls(ReduceOp.SUM, _number(op.factor), "PREMUL_SUM")
        raise Misuse(f"{op!r} is not a reduction that the backend 'ringcomm' supports.")

    @property
    def code(self) -> int:
        """Return its number in message headers."""
        return int(self.op)

    def labelled(self, label: str) -> GroupReduction:
        """Return the same reduction with a label appended to its name."""
        return self._replace(name=f"{self.name} {label}".strip())

    def prepare(self, contribution: Array) -> None:
        """Multiply this rank's contribution by its factor, in place."""
        multiply(contribution, self.factor)


_KNOWN: Dict[Any, GroupReduction] = {kind: GroupReduction(op) for kind, op in _OPS.items()}


def _number(factor: Any) -> float:
    if getattr(factor, "numel", lambda: 1)() != 1:
        raise Misuse("PREMUL_SUM needs one factor for the whole tensor, not a tensor of factors.")
    return float(factor)
