"""Slices of several views at once."""

from __future__ import annotations

from typing import List

import numpy as np

from .base import Views


def flat(view: memoryview) -> memoryview:
    """Return the view as plain bytes."""
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def address_of(view: memoryview) -> int:
    """Return where a contiguous view's bytes lie in this process."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def clipped(views: Views, most: int) -> List[memoryview]:
    """Return the first ``most`` bytes of the views."""
    found: List[memoryview] = []
    for view in views:
        if view.nbytes >= most:
            found.append(view[:most])
            break
        found.append(view)
        most -= view.nbytes
    return found


def after(views: Views, count: int) -> List[memoryview]:
    """Return the rest of the views after ``count`` bytes."""
    remaining = []
    for view in views:
        skipped = min(count, view.nbytes)
        count -= skipped
        if skipped < view.nbytes:
            remaining.append(view[skipped:])
    return remaining
