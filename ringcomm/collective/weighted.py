"""Weighted averages in one pass: the weights are one more element of what is reduced."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from ..dtypes import accumulator, check_weighable
from ..errors import Misuse
from ..ops import WEIGHTED_AVERAGE, Collective, ReduceOp, weight_of
from .calls import Intent
from .runner import Runner

NO_WEIGHTS = "the weights of all ranks are 0, so there is no average."


def weighted_average(
    runner: Runner,
    data: np.ndarray[Any, Any],
    weight: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    shape: Tuple[int, ...] = (),
) -> None:
    """Replace ``data`` by the sum of ``weight * data`` over all ranks, divided by the sum of the weights.

    A rank of weight 0 contributes nothing, whatever its data are. Half types are sent as float32: products
    with weights, and sums of weights, would not fit into them.

    Args:
        runner: of the ranks that take part.
        data: one-dimensional and contiguous.
        weight: of this rank's data.
        shape: of the array that the program has passed.

    Raises:
        UnsupportedDtypeError: the elements are integers or booleans.
        Misuse: the weight is negative, not finite or no number; ``op`` is no average; all weights are 0.
    """
    weight = weight_of(weight)
    check_weighable(data.dtype, op)
    dtype = accumulator(data.dtype, op, True) or data.dtype
    sums = np.zeros(data.size + 1, dtype)
    if weight:
        with np.errstate(all="ignore"):
            np.multiply(data, dtype.type(weight), out=sums[:-1], dtype=dtype, casting="unsafe")
    sums[-1] = weight
    intent = Intent(Collective.ALLREDUCE, WEIGHTED_AVERAGE, name=name, text=f"shape {shape}, with a weight")
    runner.all_reduce(sums, ReduceOp.SUM, name, shape, intent=intent)
    if not sums[-1].real > 0.0:
        raise Misuse(f"allreduce(shape {shape}, {data.dtype.name}): {NO_WEIGHTS}")
    with np.errstate(all="ignore"):
        np.divide(sums[:-1], sums[-1], out=sums[:-1])
        np.copyto(data, sums[:-1], casting="unsafe")
