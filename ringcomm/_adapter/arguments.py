"""Checks the arguments of collectives and converts them for the engine, in the same way in every adapter."""

from __future__ import annotations

import sys
import warnings
from typing import Any, List, Optional, Sequence, Tuple

from ..errors import ConfigError, NotOfferedError
from ..ops import ReduceOp, op_of


def reduction(op: Any, average: Optional[bool]) -> ReduceOp:
    """The reduction that Horovod's arguments ``op`` and the older ``average`` select.

    Raises:
        ConfigError: both are given.
        Misuse: ``op`` is not a reduction.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else op_of(op)
    if op is not None:
        raise ConfigError("average and op both select the reduction: pass op only.")
    warnings.warn(
        "average=... is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=_outside()
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def scattered_reduction(op: Any) -> ReduceOp:
    """The reduction of a reducescatter.

    Raises:
        NotOfferedError: it is Adasum, which needs whole tensors.
        Misuse: ``op`` is not a reduction.
    """
    chosen = op_of(op)
    if chosen == ReduceOp.ADASUM:
        raise NotOfferedError("reducescatter does not support Adasum: it compares whole tensors.")
    return chosen


def _outside() -> int:
    """The stack level of the first caller outside ringcomm."""
    package = __name__.partition(".")[0] + "."
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
        level += 1
    return level


class SequenceName(str):
    """The one name of operations that run one after another, in the same order on all ranks.

    All kinds share it, so that ranks get an error if the kinds of their next operations differ. Unlike
    operations without a name, they may run beside others that have none.
    """


def wire_name(kind: str, name: Optional[str]) -> str:
    """The name by which the ranks match an operation: the kind and the caller's name.

    Without a name it is empty: operations are matched by their order.
    """
    if isinstance(name, SequenceName):
        return str(name)
    return f"{kind}.{name}" if name else ""


def row_counts(rows: int, splits: Optional[Sequence[Any]], members: int) -> List[int]:
    """The number of rows of an alltoall for each member of the process set.

    Args:
        rows: number of rows of the tensor.
        splits: the caller's numbers, or None to divide the rows evenly.
        members: number of members of the process set.

    Raises:
        ConfigError: the numbers do not match the rows or the members.
    """
    if splits is None:
        if rows % members:
            raise ConfigError(
                f"alltoall without splits divides rows evenly, but {rows} is not an even multiple of the "
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
        raise ConfigError(f"alltoall: splits {counts} have sum {sum(counts)}, the tensor {rows} rows.")
    return counts


def predivided(op: ReduceOp, factor: float) -> Tuple[float, float]:
    """Prescale and postscale factors that divide an average in two steps.

    It is divided by ``factor`` before the sum and by the rest after it, so that float16 sums stay in range.

    Raises:
        ConfigError: the op is not Average.
    """
    if factor == 1.0:
        return 1.0, 1.0
    if op != ReduceOp.AVERAGE:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    return 1.0 / factor, float(factor)
