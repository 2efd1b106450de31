"""How rows are divided over ranks, and how several arrays of rows become one buffer and come out of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ringcomm.collective.rows import (
    ENCLOSED_BYTES,
    RowLayout,
    announced,
    announcement,
    cumulative,
    even_layout,
    joined_rows,
    row_counts,
)
from ringcomm.errors import ConfigError, ShapeError

SHAPES = ((5, 2), (2,), (0, 3), (4, 0))


def arrays():
    return [np.arange(np.prod(shape), dtype=np.float32) + 100 * n for n, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_even_parts_of_several_arrays_and_back(size):
    layout = even_layout(SHAPES, size)
    given = arrays()
    buffer = np.empty(layout.bounds[-1], np.float32)
    layout.pack(given, buffer)
    rows = [0] * len(SHAPES)
    for rank in range(size):
        pieces = layout.pieces(buffer, rank)
        assert sum(piece.size for piece in pieces) == layout.bounds[rank + 1] - layout.bounds[rank]
        for place, (piece, shape) in enumerate(zip(pieces, SHAPES)):
            count = shape[0] // size + (rank < shape[0] % size)
            whole = given[place].reshape(shape)
            assert piece.shape == (count, *shape[1:])
            assert piece.tolist() == whole[rows[place] : rows[place] + count].tolist()
            rows[place] += count
    joined = layout.join(buffer)
    for whole, shape, found in zip(given, SHAPES, joined):
        assert found.shape == shape and found.reshape(-1).tolist() == whole.tolist()


def test_too_many_rows_are_an_error_of_that_array_alone():
    many = 2**62
    layout = RowLayout([cumulative([many, many]), cumulative([1, 1])], [(0,), (1,)])
    problem, joined = layout.join(np.array([1, 2], np.uint8))
    assert isinstance(problem, ShapeError) and joined.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("rows", "splits"),
    [
        (5, None), (3, [1, 1]), (3, [1, 1, 2]), (3, [1, 1, 0]), (1, [2, -1, 0]), (3, [0.5, 1, 1.5]),
        (3, 3), (3, []), (3, [[1, 1, 1]]), (3, [True, True, True]),
    ],
)  # fmt: skip
def test_row_counts_that_do_not_fit(rows, splits):
    with pytest.raises(ConfigError, match="alltoall"):
        row_counts(rows, splits, 3)


def table(counts, arrays):
    return np.stack([announcement(numbers, array) for numbers, array in zip(counts, arrays)])


@pytest.mark.parametrize("dtype", ["bool", "complex128", ml_dtypes.bfloat16])
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
