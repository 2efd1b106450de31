"""Chooses an algorithm for a message by rule.

The choice depends only on values that are equal on all ranks (number of ranks, elements, element type,
settings), so all ranks choose the same without communication. The limits below are rules of thumb for
networks with a latency of some 50 microseconds and 1 to 10 Gbit/s, from the costs that the algorithms'
docstrings give. They serve where nothing was measured; :mod:`ringcomm.schedule.select` chooses for the
machine at hand.
"""

from __future__ import annotations

from . import direct
from .registry import algorithm

HIERARCHICAL = "hierarchical"
"""For all of them but broadcast, on hosts with several ranks each; see :mod:`ringcomm.schedule.hierarchy`."""

ONE_SHOT_MAX_BYTES = 8 * 1024
"""One round instead of two, for ``(p - 2)/2`` times more bytes. At 16 ranks and 8 KiB each rank sends
120 KiB instead of 15: about 0.1 ms more at 10 Gbit/s, the cost of a round (and 0.8 ms at 1 Gbit/s, where
8 ranks and 2 KiB would be the limit)."""

ONE_SHOT_PAIR_MAX_BYTES = 64 * 1024
"""The same for two ranks. One round and two move the same bytes then; but both ranks fold everything
instead of half, which for 64 KiB is a few microseconds."""

DOUBLING_MAX_BYTES = 128 * 1024
"""Doubling sends the whole vector in each of ``log2(p)`` rounds, a ring sends two in ``2 (p - 1)``.
At 32 ranks, 50 us and 1 Gbit/s both take the same for 120 KiB; with faster networks doubling wins for
more, but then the difference is small."""

TREE_MAX_BYTES = 64 * 1024
"""A tree sends the whole vector in each of ``log2(p)`` rounds, a chain once after ``p - 1`` hops. At 8
ranks, 50 us and 10 Gbit/s both take the same for 125 KB; at 1 Gbit/s already for 12 KB."""


def choose_all_reduce(
    size: int, count: int, item_bytes: int, *, needs_single_fold: bool, override: str | None = None
) -> str:
    """Return the name of the all-reduce for a message. ``needs_single_fold``: sums must not be rounded or
    wrapped between hops (half types, averages of integers); if the user's ``override`` cannot give that,
    "direct" takes its place. Raises ConfigError for an unknown override.

    >>> choose_all_reduce(4, 1_000_000, 4, needs_single_fold=False)
    'direct'
    """
    if override is not None:
        wanted = algorithm("allreduce", override)
        return "direct" if needs_single_fold and not wanted.single_fold else override
    length_bytes = count * item_bytes
    if size <= direct.MAX_RANKS:
        limit_bytes = ONE_SHOT_PAIR_MAX_BYTES if size == 2 else ONE_SHOT_MAX_BYTES
        return "one_shot" if length_bytes <= limit_bytes else "direct"
    if needs_single_fold:
        return "direct"
    return "doubling" if length_bytes <= DOUBLING_MAX_BYTES else "ring"


def choose_reduce_scatter(size: int, *, needs_single_fold: bool) -> str:
    """Return the name of the reduce-scatter. Only "direct" folds once, see :func:`choose_all_reduce`."""
    return "direct" if needs_single_fold or size <= direct.MAX_RANKS else "ring"


def choose_all_gather(size: int) -> str:
    """Return the name of the all-gather."""
    return "direct" if size <= direct.MAX_RANKS else "ring"


def choose_broadcast(size: int, count: int, item_bytes: int) -> str:
    """Return the name of the broadcast."""
    return "tree" if size <= 2 or count * item_bytes <= TREE_MAX_BYTES else "chain"
