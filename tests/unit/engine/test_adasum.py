"""Adasum of two vectors: the bits that a processor may choose are the same on all."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ringcomm.engine.bucket_runner import combine
from tests.support.reference import all_dtypes

FLOATS = [dtype for dtype in all_dtypes() if dtype.kind == "f" or dtype.name == "bfloat16"]
NEGATIVE_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
"""As an operation without a result gives on x86-64 (but for its payload); on ARM the sign is positive."""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_nan_of_a_result_is_the_same(dtype: np.dtype) -> None:
    wanted = np.array([np.nan, 3.0]).astype(dtype)
    vectors = np.array([1.0, 1.0]).astype(dtype), np.array([-np.inf, 2.0]).astype(dtype)
    with np.errstate(all="ignore"):
        found = combine(*vectors, (NEGATIVE_NAN, 1.0))
        assert found[:1].tobytes() == wanted[:1].tobytes()
        found = combine(*vectors[::-1], (0.0, 3.0))  # 0 times infinity
    assert found.tobytes() == wanted.tobytes()
