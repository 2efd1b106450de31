"""Which samples are in which global batch: a function of seed, epoch and number alone.

It does not depend on the number of ranks, on their speeds, or on versions of Python and NumPy: it consists of
integer arithmetic and a stable sort.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import Array

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> Array:
    """Return the indices of all samples in the order of an epoch; ``seed`` must be equal on all ranks.

    >>> epoch_order(5, 0, 0).tolist() == epoch_order(5, 0, 0).tolist()
    True
    """
    indices = np.arange(count, dtype=np.int64)
    if not shuffle:
        return indices
    start = _mixed(np.array([(_mixed_int(seed & _MASK) + epoch * _GOLDEN) & _MASK], np.uint64))
    keys = _mixed(indices.astype(np.uint64) * np.uint64(_GOLDEN) + start)
    order: Array = np.argsort(keys, kind="stable").astype(np.int64)
    return order


def _mixed(state: Any) -> Any:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014), which permutes the 64-bit numbers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _mixed_int(state: int) -> int:
    return int(_mixed(np.array([state], np.uint64))[0])


def steps_in(count: int, global_batch: int, drop_last: bool = False) -> int:
    """Return the number of global batches of an epoch."""
    return count // global_batch if drop_last else -(-count // global_batch)
