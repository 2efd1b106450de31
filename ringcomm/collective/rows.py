"""Arrays as rows of their first dimension, divided over ranks: the meaning of the collectives by rows.

A reducescatter gives each rank its part of :func:`even_layout`; an allgather and an alltoall join the rows
that ranks announce. Everything here is arithmetic on shapes and views of flat arrays, so that direct calls,
calls by name and process groups use the same.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import prod
from struct import pack
from typing import Any, Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np

from ..dtypes import Array, joined_shape
from ..errors import ConfigError, ShapeError
from ..schedule.steps import even_bounds
from .options import Options, whole_numbers

Shape = Tuple[int, ...]

_ITEMS = 32
ENCLOSED_BYTES = 8 * _ITEMS
"""Rows up to this length travel with the numbers that announce them, so that an allgather or alltoall of them
takes one round. Two ranks of a host, 8 bytes each: 20 us instead of 26, and 22 instead of 25."""
_NOT_ENCLOSED = -1


def check_rows(what: str, shapes: Iterable[Sequence[int]]) -> None:
    """Raise ShapeError if an array has no first dimension. ``what``: the collective."""
    for shape in shapes:
        if not shape:
            raise ShapeError(f"{what} divides the first dimension, and a zero-dimensional array has none.")


def cumulative(counts: Iterable[int], width: int = 1) -> Tuple[int, ...]:
    """Return the boundaries in elements of parts with these numbers of rows, each of ``width`` elements.

    >>> cumulative([2, 0, 1], 3)
    (0, 6, 6, 9)
    """
    return tuple(accumulate((int(count) * width for count in counts), initial=0))


class RowLayout:
    """Rows of several arrays side by side in one flat buffer: for each rank in turn its rows of every array.
    ``edges`` are the boundaries between ranks' rows by array, ``bounds`` those of the parts in elements.
    """

    __slots__ = ("_inner", "_widths", "bounds", "edges")

    def __init__(self, edges: Sequence[Sequence[int]], inner: Sequence[Shape]) -> None:
        self.edges = edges
        self._inner = inner
        self._widths = [prod(shape) for shape in inner]
        self.bounds = cumulative(
            sum((rows[rank + 1] - rows[rank]) * width for rows, width in zip(edges, self._widths))
            for rank in range(len(edges[0]) - 1 if edges else 0)
        )

    def pack(self, arrays: Sequence[Array], buffer: Array) -> None:
        """Copy whole flat arrays into the buffer, each rank's rows to its part."""
        pieces = [
            array[rows[rank] * width : rows[rank + 1] * width]
            for rank in range(len(self.bounds) - 1)
            for array, rows, width in zip(arrays, self.edges, self._widths)
        ]
        np.concatenate(pieces, out=buffer)

    def pieces(self, buffer: Array, rank: int) -> List[Array]:
        """Return a rank's part of the buffer: by array its rows, as views."""
        start, found = self.bounds[rank], []
        for rows, width, shape in zip(self.edges, self._widths, self._inner):
            count = rows[rank + 1] - rows[rank]
            found.append(buffer[start : start + count * width].reshape((count, *shape)))
            start += count * width
        return found

    def join(self, buffer: Array) -> List[Union[Array, ShapeError]]:
        """Return by array all ranks' rows in order, or the ShapeError if there cannot be so many."""
        if len(self.edges) == 1:
            by_array: Iterable[Sequence[Array]] = [(buffer,)]
        else:
            by_array = zip(*(self.pieces(buffer, rank) for rank in range(len(self.bounds) - 1)))
        return [_joined(*parts) for parts in zip(by_array, self.edges, self._inner)]


def _joined(pieces: Sequence[Array], edges: Sequence[int], inner: Shape) -> Union[Array, ShapeError]:
    try:
        shape = joined_shape([edges[-1]], inner)
    except ShapeError as problem:
        return problem
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(shape)


@lru_cache(maxsize=1024)
def even_layout(shapes: Tuple[Shape, ...], size: int) -> RowLayout:
    """Return the layout in which every rank has as many rows of each array, the first ranks one more."""
    return RowLayout([even_bounds(shape[0], size) for shape in shapes], [shape[1:] for shape in shapes])


def scatter_layout(shapes: Sequence[Shape], size: int, options: Options) -> RowLayout:
    """Return the layout of a reducescatter."""
    check_rows("reducescatter", shapes)
    if options.splits is None:
        return even_layout(tuple(map(tuple, shapes)), size)
    edges = [cumulative(row_counts(shape[0], options.splits, size, "reducescatter")) for shape in shapes]
    return RowLayout(edges, [shape[1:] for shape in shapes])


def row_counts(
    rows: int, splits: Optional[Sequence[Any]], members: int, what: str = "alltoall"
) -> List[int]:
    """Return the number of rows for each member: the caller's, or divided evenly."""
    if splits is None:
        if rows % members:
            raise ConfigError(
                f"alltoall without splits divides rows evenly, but {rows} is not an even multiple of the "
                f"number of workers ({members}). Pass splits=[...], one number per rank."
            )
        return [rows // members] * members
    counts = whole_numbers(what, splits)
    if len(counts) != members:
        raise ConfigError(
            f"{what}: the number of entries in splits ({len(counts)}) does not equal the number of workers "
            f"({members})."
        )
    if min(counts) < 0 or sum(counts) > rows:
        raise ConfigError(
            f"{what}: the sum of the splits {counts} is greater than the first dimension of the tensor "
            f"({rows}), or one of them is negative."
        )
    if sum(counts) < rows:
        raise ConfigError(f"{what}: splits {counts} have sum {sum(counts)}, the tensor {rows} rows.")
    return counts


def announcement(counts: Sequence[int], flat: Optional[Array]) -> Array:
    """Return the int64 numbers that a rank exchanges before a collective by rows: the counts, the length of
    the enclosed rows in bytes (-1: too long, or not in host memory), and their bytes.
    """
    rows, length = b"", _NOT_ENCLOSED
    if flat is not None and flat.nbytes <= ENCLOSED_BYTES:
        rows = flat.tobytes()
        length = len(rows)
    # One packing takes a third of the time of assignments to parts of an array.
    return np.frombuffer(pack(f"={len(counts) + 1}q{ENCLOSED_BYTES}s", *counts, length, rows), np.int64)


def announced(table: Array) -> Tuple[List[List[int]], Optional[List[bytes]]]:
    """Return, by rank, all counts and the bytes of the rows, or None if not all have enclosed them."""
    first, step = table.shape[1] - _ITEMS, 8 * table.shape[1]
    counts: List[List[int]] = table[:, :first].tolist()
    raw, at, enclosed = table.tobytes(), 8 * first, True
    rows = []
    for numbers in counts:
        length = numbers.pop()
        if length < 0:
            enclosed = False
        rows.append(raw[at : at + length])
        at += step
    return counts, rows if enclosed else None


def joined_rows(pieces: Iterable[bytes], dtype: np.dtype[np.generic]) -> Array:
    """Return enclosed rows as one new flat array."""
    data = b"".join(pieces)
    return np.frombuffer(data, dtype).copy() if data else np.empty(0, dtype)
