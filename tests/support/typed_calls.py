"""Calls as a type checker is to judge them: mypy reads this module, and refuses an ``ignore`` without use."""

from __future__ import annotations

import numpy as np

import ringcomm as rc
from ringcomm.dtypes import Array
from ringcomm.engine.request import Handle

x = np.ones(3)


def calls(context: rc.Context) -> None:
    """What is right has the type of the result; a wrong name or type of an option is an error."""
    reduced: Array = rc.allreduce(x, rc.Sum, "x", weight=1.0)
    reduced = rc.allreduce_(array=x, op="sum")
    started: Handle = rc.allreduce_async(x, op=rc.Sum, name="x", process_set=rc.global_process_set)
    reduced = context.allreduce(x, prescale_factor=0.5)
    del reduced, started
    rc.allreduce(x, opp=1)  # type: ignore[call-overload]
    rc.allreduce(x, name=1)  # type: ignore[call-overload]
    rc.grouped_allreduce([x], weights=1.0)  # type: ignore[call-overload]
    rc.reducescatter(x, splits="3, 1", postscale=2)  # type: ignore[call-overload]
    context.allreduce(x, prescale_factor="half")  # type: ignore[call-overload]
    text: str = rc.allreduce(x)  # type: ignore[assignment]
    del text
