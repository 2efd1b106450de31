"""Weighted averages: contributions are multiplied by their relative weights, then averaged as always."""

from __future__ import annotations

from math import frexp, fsum, ldexp
from typing import Any, Iterable, NamedTuple, Tuple

import numpy as np

from ..dtypes import check_weighable
from ..errors import Misuse
from ..ops import Collective, ReduceOp, weight_of
from .reduce import weigh, weighable
from .runner import Runner

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


def apply_weight(
    runner: Runner,
    data: np.ndarray[Any, Any],
    weight: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    shape: Tuple[int, ...] = (),
    kind: Collective = Collective.ALLREDUCE,
) -> np.ndarray[Any, Any]:
    """Multiply this rank's contribution to an average that follows by its weight, relative to all ranks';
    return the array to be averaged: ``data``, flat, multiplied in place, or for float16 a copy in float32.
    Raises UnsupportedDtypeError for integers or booleans, Misuse if the weight is not a finite number from 0
    on, ``op`` is not an average, or all weights are 0.

    The ranks exchange their weights first: the reduced numbers then have the magnitude of the data, whatever
    the weights are. A rank of weight 0 contributes nothing, whatever its data are.
    """
    own = np.array([weight_of(weight)])
    check_weighable(data.dtype, op)
    bits = runner.exchange(own.view(np.int64).tolist(), kind, data.dtype, name, shape, int(op), weighted=True)
    total = Total.of(bits.view(np.float64)[:, 0].tolist())
    if not total.part:
        raise Misuse(f"{kind.name.lower()}(shape {shape}, {data.dtype.name}): {NO_WEIGHTS}")
    weighted = weighable(data)
    weigh(weighted, total.share(float(own[0]), runner.size))
    return weighted
