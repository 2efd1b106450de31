"""Adasum: a sum that does not overshoot where gradients agree.

Two gradients a and b become ``a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)``: their sum if they are
orthogonal, their average if they are the same (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021). Ranks combine in pairs at distances 1, 2, 4, ...; with any other
number of ranks than a power of two, those beyond it first combine with one of the others.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from ..collective.runner import Runner
from ..errors import UnsupportedDtypeError


def check_adasum(dtype: np.dtype[Any]) -> None:
    """Raise UnsupportedDtypeError if these are no floating-point numbers."""
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise UnsupportedDtypeError(f"Adasum needs floating-point numbers, not {dtype}.")


def combine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Adasum of two vectors, computed in float64 (complex: not defined); the type of ``a``."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot = float(wide_a @ wide_b)
    norm_a, norm_b = float(wide_a @ wide_a), float(wide_b @ wide_b)
    factor_a = 1.0 - dot / (2.0 * norm_a) if norm_a > 0.0 else 1.0
    factor_b = 1.0 - dot / (2.0 * norm_b) if norm_b > 0.0 else 1.0
    result: np.ndarray[Any, Any] = (factor_a * wide_a + factor_b * wide_b).astype(a.dtype)
    return result


def adasum(runner: Runner, data: np.ndarray[Any, Any], prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Replace ``data`` (flat) by the Adasum over all ranks of the runner, the same bits on each."""
    size, rank = runner.size, runner.rank
    if prescale != 1.0:
        data *= data.dtype.type(prescale)
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
        if partner >= 0:
            # The lower rank's first, on both sides: the same bits.
            first, second = (data, theirs) if rank < partner else (theirs, data)
            data[:] = combine(first, second)
        distance *= 2
    partner = rank - power if rank >= power else rank + power if rank < extra else -1
    theirs = _swap(runner, data, partner)
    if rank >= power:
        data[:] = theirs
    if postscale != 1.0:
        data *= data.dtype.type(postscale)


def _swap(runner: Runner, data: np.ndarray[Any, Any], partner: int) -> np.ndarray[Any, Any]:
    """Exchange whole vectors with a partner (-1: with nobody); every rank must call it."""
    received = np.empty(data.size if partner >= 0 else 0, data.dtype)
    runner.all_to_all(data, received, _to(runner, data.size, partner), _to(runner, data.size, partner))
    return received


def _to(runner: Runner, items: int, partner: int) -> Tuple[int, ...]:
    """Chunk boundaries that give everything to one rank."""
    return tuple(items if 0 <= partner < rank else 0 for rank in range(runner.size + 1))
