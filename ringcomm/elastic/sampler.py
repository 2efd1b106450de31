"""Divide samples among ranks when the number of ranks may change in the middle of an epoch."""

from __future__ import annotations

import random
from typing import List, NamedTuple


class Share(NamedTuple):
    """A rank's part of the remaining samples of an epoch.

    All ranks get the same number of ``indices``; samples are repeated if the division leaves a remainder.
    """

    remaining: List[int]  # samples that no rank has processed, in the order of the epoch
    indices: List[int]


def plan_share(
    count: int, rank: int, size: int, epoch: int = 0, seed: int = 0, shuffle: bool = True, processed: int = 0
) -> Share:
    """Divide the remaining samples of an epoch.

    ``processed`` counts samples of this epoch on all ranks together; ``seed`` must be the same on all ranks.
    """
    order = list(range(count))
    if shuffle:
        random.Random(seed + epoch).shuffle(order)
    remaining = order[processed:]
    each = -(-len(remaining) // size)
    padded = list(remaining)
    while len(padded) < each * size:
        # Repeat more than once if fewer samples remain than there are ranks.
        padded += remaining[: each * size - len(padded)]
    return Share(remaining, padded[rank::size])
