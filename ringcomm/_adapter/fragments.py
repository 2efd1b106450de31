"""Parts of a model that are exchanged together, and the exchange of one."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from ..dtypes import Array
from ..engine.request import Handle


class Exchange(NamedTuple):
    """The reduction of a fragment that is running.

    Attributes:
        until: the local step after which its result is taken.
        handles: of the engine's operations.
        started: by place, the weights when it began; empty if it is waited for at once.
        deltas: by place, what is being averaged.
        distance: square of the norm of this rank's deltas.
        before: the arrays to be averaged, when it began.
        means: what becomes their averages.
        facts: what becomes the average of the ranks' numbers, with the last fragment.
    """

    until: int
    handles: List[Handle]
    started: Dict[int, Array]
    deltas: Dict[int, Array]
    distance: float
    before: List[Array]
    means: List[Array]
    facts: Optional[Array]


def divided(sizes: Sequence[int], parts: int) -> List[List[int]]:
    """Neighbouring places in so many parts of similar total size; parts may be empty.

    >>> divided([4, 4, 1, 1, 6], 2)
    [[0, 1], [2, 3, 4]]
    """
    found: List[List[int]] = [[] for _ in range(parts)]
    total, reached = max(1, sum(sizes)), 0
    for place, size in enumerate(sizes):
        found[min(parts - 1, (2 * reached + size) * parts // (2 * total))].append(place)
        reached += size
    return found


def square(array: Array) -> float:
    """The square of an array's norm."""
    flat = array.reshape(-1)
    return float(np.dot(flat, flat))
