"""Check the arguments of collectives and convert them for the engine, in the same way in every adapter."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Optional, Tuple

from ..errors import ConfigError, NotOfferedError
from ..ops import ReduceOp, op_of


def scattered_reduction(op: Any) -> ReduceOp:
    """Return the reduction of a reducescatter.

    NotOfferedError: Adasum needs whole tensors. Misuse: ``op`` is not a reduction.
    """
    chosen = op_of(op)
    if chosen == ReduceOp.ADASUM:
        raise NotOfferedError("reducescatter does not support Adasum: it compares whole tensors.")
    return chosen


def checked_passes(passes: Any) -> int:
    """Return a number of backward passes per step; a ConfigError in Horovod's words if it is not positive."""
    if not isinstance(passes, Integral) or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be > 0, not {passes!r}.")
    return int(passes)


class SequenceName(str):
    """The common name of operations that run one after another, in the same order on all ranks.

    All kinds share it, so that ranks get an error if the kinds of their next operations differ. Unlike
    operations without a name, they may run beside others that have none.
    """


def wire_name(kind: str, name: Optional[str]) -> str:
    """Return the name by which ranks match an operation: its kind and the caller's name.

    Without the caller's name it is empty: operations are matched by their order.
    """
    if isinstance(name, SequenceName):
        return str(name)
    return f"{kind}.{name}" if name else ""


def predivided(op: ReduceOp, factor: float) -> Tuple[float, float]:
    """Return the prescale and postscale factors that divide an average in two steps.

    It is divided by ``factor`` before the sum and by the rest after it, so that float16 sums stay in range.
    ConfigError: the op is not Average.
    """
    if factor == 1.0:
        return 1.0, 1.0
    if op != ReduceOp.AVERAGE:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    return 1.0 / factor, float(factor)
