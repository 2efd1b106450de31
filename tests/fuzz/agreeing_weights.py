"""Weighted averages from seeds, with weights of all magnitudes; a family of :mod:`tests.fuzz.agreeing`.

Expected is the average in exact arithmetic, rounded to the type; or one error on all ranks.
"""

from __future__ import annotations

import random
import time
import zlib
from fractions import Fraction
from typing import Any, List

import numpy as np

import ringcomm as rc
from ringcomm.dtypes import dtype_named

WEIGHTS = (0.0, 0.0, 5e-324, 1e-308, 1e-46, 1e-9, 1.0, 3, 50, 1e9, 1e39, 1e308, 1.7976931348623157e308)
BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


def delay(rng: random.Random) -> None:
    """Now and then, wait for a few milliseconds."""
    if rng.random() < 0.1:
        time.sleep(rng.uniform(0.0, 0.004))


class WeightFamily:
    """``weight=`` in direct calls, in place and by name, of every type that can be weighted."""

    def run(self, seed: int) -> int:
        """Run a program; a digest of its results."""
        pick, rank, size = random.Random(f"weights {seed}"), rc.rank(), rc.size()
        digest = 0
        for number in range(4):
            kind, way = pick.choice(list(BITS)), pick.choice(("direct", "in place", "named", "grouped"))
            count = pick.choice((0, 1, 2, 7, 300))
            alike = pick.choice(WEIGHTS) if pick.random() < 0.2 else None
            weights = [pick.choice(WEIGHTS) if alike is None else alike for _ in range(size)]
            arrays = [_values(seed * 10 + number, other, count, kind) for other in range(size)]
            own = arrays[rank].copy() if weights[rank] else np.full_like(arrays[rank], np.nan)
            delay(random.Random(f"{seed} {number} {rank}"))
            case = f"{kind}, {way}, {count} elements, weights {weights}"
            try:
                found = _average(way, own, weights[rank])
            except rc.RingcommError as error:
                assert not any(weights) and "weights of all ranks are 0" in str(error), (case, error)
                continue
            assert any(weights), f"{case}: no error"
            _check(found, arrays, weights, BITS[kind], case)
            digest = zlib.crc32(found.tobytes(), digest)
        return digest


def _values(seed: int, rank: int, count: int, kind: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng((seed, rank))
    return rng.uniform(-9.0, 9.0, count).astype(dtype_named(kind))


def _average(way: str, array: np.ndarray[Any, Any], weight: float) -> np.ndarray[Any, Any]:
    if way == "in place":
        rc.allreduce_(array, weight=weight)
        return array
    if way == "named":
        return rc.allreduce_async(array, name="average", weight=weight).wait()
    if way == "grouped":
        return rc.grouped_allreduce([array, array[:1]], name="both", weight=weight)[0]
    return rc.allreduce(array, weight=weight)


def _check(
    found: np.ndarray[Any, Any], arrays: List[Any], weights: List[float], bits: int, case: str
) -> None:
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    wide = [array.astype(np.float64) for array in arrays]
    for place, value in enumerate(found.astype(np.float64).tolist()):
        parts = [share * Fraction(float(array[place])) for share, array in zip(shares, wide)]
        # Each part is rounded, and so is every sum; a part may be multiplied by the number of ranks first.
        bound = 4 * len(parts) * sum(map(abs, parts)) * Fraction(1, 2**bits) + Fraction(1, 10**6) / 2**bits
        assert abs(Fraction(value) - sum(parts)) <= bound, (case, place, value, float(sum(parts)))
