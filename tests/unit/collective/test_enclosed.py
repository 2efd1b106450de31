"""Announcements of rows, with and without the rows themselves."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ringcomm.collective.rows import ENCLOSED_BYTES, announced, announcement, joined_rows


def table(counts, arrays):
    return np.stack([announcement(numbers, array) for numbers, array in zip(counts, arrays)])


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float64", "complex128", ml_dtypes.bfloat16])
def test_rows_of_every_rank_come_back(dtype):
    lengths = (0, 3, ENCLOSED_BYTES // np.dtype(dtype).itemsize)
    arrays = [np.arange(length).astype(dtype) for length in lengths]
    counts = [[1, 2], [3, 4], [5, 6]]
    found, rows = announced(table(counts, arrays))
    assert found == counts
    assert rows == [item.tobytes() for item in arrays]
    joined = joined_rows(rows, np.dtype(dtype))
    assert joined.tobytes() == np.concatenate(arrays).tobytes()
    assert joined.dtype == np.dtype(dtype) and joined.flags.writeable and joined.flags.owndata


@pytest.mark.parametrize("absent", [None, np.zeros(ENCLOSED_BYTES + 1, np.uint8)])
def test_all_ranks_see_that_one_has_not_enclosed_its_rows(absent):
    assert announced(table([[1], [7]], [np.zeros(1, np.uint8), absent])) == ([[1], [7]], None)
