"""Adasum: a sum that does not overshoot where gradients agree.

Two gradients a and b become ``a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)``: their sum if they are
orthogonal, their average if they are the same (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021). Ranks combine in pairs at distances 1, 2, 4, ...; with any other
number of ranks than a power of two, those beyond it first combine with one of the others.

The two factors come from dot products, which BLAS adds up in another order on another processor or with
another number of threads. So in each round one rank computes them for all ranks whose results must be the
same; what follows is element by element, and the same everywhere.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from ..collective.reduce import multiply
from ..collective.runner import Runner
from ..errors import UnsupportedDtypeError
from ..ops import Collective
from ..wire.signature import direct_call


def check_adasum(dtype: np.dtype[Any]) -> None:
    """Raise UnsupportedDtypeError if these are no floating-point numbers."""
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise UnsupportedDtypeError(f"Adasum needs floating-point numbers, not {dtype}.")


def dot(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The dot product of two vectors of float64, in whatever order BLAS adds it up here."""
    return float(a @ b)


def factors(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> Tuple[float, float]:
    """Return what two vectors are multiplied by before they are added up; not defined for complex ones."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    both, norm_a, norm_b = dot(a, b), dot(a, a), dot(b, b)
    return (
        1.0 - both / (2.0 * norm_a) if norm_a > 0.0 else 1.0,
        1.0 - both / (2.0 * norm_b) if norm_b > 0.0 else 1.0,
    )


def combine(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], by: Optional[Tuple[float, float]] = None
) -> np.ndarray[Any, Any]:
    """Return Adasum of two vectors, in the type of ``a``; ``by`` are their :func:`factors` if known."""
    factor_a, factor_b = factors(a, b) if by is None else by
    wide: np.ndarray[Any, Any] = factor_a * a.astype(np.float64) + factor_b * b.astype(np.float64)
    # Which NaN an operation gives depends on the processor, and several ranks compute the same element.
    wide[np.isnan(wide)] = np.nan
    result: np.ndarray[Any, Any] = wide.astype(a.dtype)
    return result


def adasum(runner: Runner, data: np.ndarray[Any, Any], prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Replace ``data`` (flat) by the Adasum over all ranks of the runner, the same bits on each."""
    with np.errstate(all="ignore"):  # Overflow and NaN are the caller's numbers.
        multiply(data, prescale)
        _add_up(runner, data)
        multiply(data, postscale)


def _add_up(runner: Runner, data: np.ndarray[Any, Any]) -> None:
    size, rank = runner.size, runner.rank
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    # Those beyond the power of two hand theirs to a partner, and get the result at the end.
    partner = rank - power if rank >= power else rank + power if rank < extra else -1
    theirs = _swap(runner, data, partner)
    if 0 <= rank < extra:
        data[:] = combine(data, theirs)
    distance = 1
    while distance < power:
        partner = rank ^ distance if rank < power else -1
        theirs = _swap(runner, data, partner)
        start = rank - rank % (2 * distance)
        group = range(start, start + 2 * distance if partner >= 0 else start)  # all with the same two vectors
        # The lower rank's first, on both sides: the same bits.
        first, second = (data, theirs) if rank < partner else (theirs, data)
        found = _hand_out(runner, group, factors(first, second) if rank in group[:1] else (0.0, 0.0))
        if partner >= 0:
            data[:] = combine(first, second, found)
        distance *= 2
    partner = rank - power if rank >= power else rank + power if rank < extra else -1
    theirs = _swap(runner, data, partner)
    if rank >= power:
        data[:] = theirs


def _hand_out(runner: Runner, group: range, found: Tuple[float, float]) -> Tuple[float, float]:
    """Return what the first rank of a group has found; every rank must call it, those of no group, too."""
    first = runner.rank in group[:1]
    counts = [2 * (first and rank in group[1:]) for rank in range(runner.size)]
    source = np.resize(np.array(found), sum(counts))
    received = np.array(found)
    wanted = _to(runner, 2, group[0]) if group and not first else _to(runner, 0, -1)
    bounds = (0, *np.cumsum(counts).tolist())
    runner.all_to_all(source, received, bounds, wanted, direct_call(Collective.ALLTOALL, received, items=0))
    return float(received[0]), float(received[1])


def _swap(runner: Runner, data: np.ndarray[Any, Any], partner: int) -> np.ndarray[Any, Any]:
    """Exchange whole vectors with a partner (-1: no partner); every rank must call it."""
    received = np.empty(data.size if partner >= 0 else 0, data.dtype)
    bounds, call = _to(runner, data.size, partner), direct_call(Collective.ALLTOALL, received, items=0)
    runner.all_to_all(data, received, bounds, bounds, call)
    return received


def _to(runner: Runner, items: int, partner: int) -> Tuple[int, ...]:
    """Chunk boundaries that give everything to one rank."""
    return tuple(items if 0 <= partner < rank else 0 for rank in range(runner.size + 1))
