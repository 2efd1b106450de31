"""What ranks contribute to collectives, and settings with which even little of it has many segments."""

from __future__ import annotations

import numpy as np

from ringcomm.config import Settings
from tests.support.reference import all_dtypes

ONES = np.ones(8, np.float32)
ROWS = np.ones((6, 2))
DTYPES = all_dtypes()
FLOATS = [dtype for dtype in DTYPES if dtype.kind not in "biu"]


def small(**changes):
    """Settings with segments so short that ordinary tests have many of them."""
    return Settings(spin_us=0.0, timeout_s=30.0, segment_bytes=64, **changes)


def numbers(rank, *shape, dtype=np.float32):
    """Whole numbers that differ from rank to rank and from element to element."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) + 100 * rank).astype(dtype)
