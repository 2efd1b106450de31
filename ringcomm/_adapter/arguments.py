"""What callers say, checked and translated for the engine; the same words in every adapter."""

from __future__ import annotations

import sys
import warnings
from typing import Any, List, Optional, Sequence, Tuple

from ..errors import ConfigError, NotOfferedError
from ..ops import ReduceOp, op_of


def reduction(op: Any, average: Optional[bool]) -> ReduceOp:
    """The reduction meant by Horovod's two arguments, of which ``average`` is the older one.

    Raises:
        ConfigError: both are given.
        Misuse: there is no such reduction.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else op_of(op)
    if op is not None:
        raise ConfigError("average and op say the same in two ways: leave average out.")
    warnings.warn(
        "average=... is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=_outside()
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def scattered_reduction(op: Any) -> ReduceOp:
    """The reduction that a reducescatter shall do.

    Raises:
        NotOfferedError: it is Adasum, which needs whole tensors.
        Misuse: there is no such reduction.
    """
    chosen = op_of(op)
    if chosen == ReduceOp.ADASUM:
        raise NotOfferedError("reducescatter does not support Adasum: it compares whole tensors.")
    return chosen


def _outside() -> int:
    """The stack level of the caller's own code, whatever function of an adapter it has called."""
    package = __name__.partition(".")[0] + "."
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
        level += 1
    return level


def wire_name(kind: str, name: Optional[str]) -> str:
    """An operation's name among the ranks: operations of two kinds may have the same name.

    Without a name they are matched by their order.
    """
    return f"{kind}.{name}" if name else ""


def row_counts(rows: int, splits: Optional[Sequence[Any]], members: int) -> List[int]:
    """How many rows of an alltoall go to each member.

    Args:
        rows: how many there are.
        splits: what the caller says, or None to deal them out evenly.
        members: of the process set.

    Raises:
        ConfigError: that does not work out.
    """
    if splits is None:
        if rows % members:
            raise ConfigError(
                f"alltoall without splits deals out rows evenly, but {rows} is not an even multiple of the "
                f"number of workers ({members}). Pass splits=[...], one number per rank."
            )
        return [rows // members] * members
    counts = [int(item) for item in splits]
    if any(count != item for count, item in zip(counts, splits)):
        raise ConfigError(f"alltoall expects splits to contain 32-bit integer elements, not {list(splits)}.")
    if len(counts) != members:
        raise ConfigError(
            f"alltoall: the number of entries in splits ({len(counts)}) does not equal the number of workers "
            f"({members})."
        )
    if min(counts, default=0) < 0 or sum(counts) > rows:
        raise ConfigError(
            f"alltoall: the sum of the splits {counts} is greater than the first dimension of the tensor "
            f"({rows}), or one of them is negative."
        )
    if sum(counts) < rows:
        raise ConfigError(f"alltoall: the splits {counts} leave rows over: the tensor has {rows}.")
    return counts


def predivided(op: ReduceOp, factor: float) -> Tuple[float, float]:
    """Prescale and postscale factors that divide an average in two steps.

    Before the sum by ``factor`` and after it by what remains: sums of half types stay small then.

    Raises:
        ConfigError: it is not an average.
    """
    if factor == 1.0:
        return 1.0, 1.0
    if op != ReduceOp.AVERAGE:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    return 1.0 / factor, float(factor)
