"""Divides samples among ranks when the number of ranks may change in the middle of an epoch."""

from __future__ import annotations

import random
from typing import List, NamedTuple


class Share(NamedTuple):
    """A rank's part of the remaining samples of an epoch.

    Attributes:
        remaining: indices of all samples that no rank has processed yet, in the order of the epoch.
        indices: indices of the samples for this rank. All ranks get the same number; samples are repeated
            where the division leaves a remainder.
    """

    remaining: List[int]
    indices: List[int]


def plan_share(
    count: int, rank: int, size: int, epoch: int = 0, seed: int = 0, shuffle: bool = True, processed: int = 0
) -> Share:
    """Divide the remaining samples of an epoch.

    Args:
        count: number of samples in the data set.
        rank: this process's rank.
        size: number of ranks.
        epoch: index of the epoch; it determines the order together with ``seed``.
        seed: of the shuffle, the same on all ranks.
        shuffle: shuffle the samples of each epoch.
        processed: number of samples of this epoch that all ranks together have processed.
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
