"""Which samples a rank takes, when ranks may come and go in the middle of an epoch."""

from __future__ import annotations

import random
from typing import List, NamedTuple


class Share(NamedTuple):
    """A rank's part of what is left of an epoch.

    Attributes:
        remaining: all samples that nobody has taken yet, in the order of the epoch.
        indices: those for this rank. Every rank has as many: some are taken twice if it must be.
    """

    remaining: List[int]
    indices: List[int]


def plan_share(
    count: int, rank: int, size: int, epoch: int = 0, seed: int = 0, shuffle: bool = True, processed: int = 0
) -> Share:
    """Divide what is left of an epoch.

    Args:
        count: how many samples the data set has.
        processed: how many of this epoch have been taken, by all ranks together.
    """
    order = list(range(count))
    if shuffle:
        random.Random(seed + epoch).shuffle(order)
    remaining = order[processed:]
    each = -(-len(remaining) // size)
    padded = list(remaining)
    while len(padded) < each * size:
        # More than once around, if fewer are left than there are ranks.
        padded += remaining[: each * size - len(padded)]
    return Share(remaining, padded[rank::size])
