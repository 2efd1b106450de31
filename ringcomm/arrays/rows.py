"""Arrays as rows of their first dimension, distributed over ranks."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from ..errors import Misuse


def row_items(shape: Sequence[int], what: str) -> int:
    """The number of elements in a row of the first dimension."""
    if not shape:
        raise Misuse(f"{what} divides the first dimension, and a zero-dimensional array has none.")
    items = 1
    for length in shape[1:]:
        items *= int(length)
    return items


def cumulative(rows: np.ndarray[Any, Any], width: int) -> Tuple[int, ...]:
    """Chunk boundaries in elements, for a number of rows from each rank."""
    bounds = [0]
    for count in rows:
        bounds.append(bounds[-1] + int(count) * width)
    return tuple(bounds)


def check_splits(rows: int, splits: Optional[Sequence[int]], size: int) -> List[int]:
    """The number of rows for each of ``size`` ranks; without ``splits`` equally many.

    Raises:
        Misuse: the splits do not fit the rows.
    """
    if splits is None:
        if rows % size:
            raise Misuse(
                f"alltoall without splits deals out rows evenly, but {rows} is not an even multiple of "
                f"the number of workers ({size}). Pass splits=[...], one number per rank."
            )
        return [rows // size] * size
    array = np.asarray(splits)
    if array.ndim != 1 or array.size != size or array.dtype.kind not in "iu":
        raise Misuse(f"alltoall: splits must be {size} whole numbers, one per rank; got {array.tolist()!r}.")
    counts = [int(number) for number in array]
    if min(counts) < 0 or sum(counts) != rows:
        raise Misuse(
            f"alltoall: the splits {counts} do not add up to the array's {rows} rows, or are negative."
        )
    return counts
