"""Which algorithm for which message, by rule; and the schedules themselves, built once and kept.

The choice depends only on what all ranks know alike (number of ranks, elements, element type,
settings), so all ranks choose the same without asking each other. The limits below are rules of
thumb for networks with a latency of some 50 microseconds and 1 to 10 Gbit/s, from the costs that
the algorithms' docstrings give. They serve where nothing was measured; :mod:`ringcomm.schedule.select`
chooses for the machine at hand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Optional, Tuple

from ..errors import ConfigError
from . import direct, doubling, hierarchy, ring, tree
from .hierarchy import Hosts
from .steps import Step, even_bounds

Steps = Tuple[Step, ...]
"""A schedule that is shared by all who asked for it, so nobody may change it."""

ALL_REDUCE_NAMES = ("one_shot", "direct", "ring", "doubling")
REDUCE_SCATTER_NAMES = ("direct", "ring")
ALL_GATHER_NAMES = ("direct", "ring")
BROADCAST_NAMES = ("tree", "chain")

HIERARCHICAL = "hierarchical"
"""For all of them but broadcast, on hosts with several ranks each; see :mod:`ringcomm.schedule.hierarchy`."""

SINGLE_FOLD_NAMES = ("one_shot", "direct")
"""The all-reduces in which one fold makes each element, so that no sum is rounded on the way."""

DIRECT_MAX_RANKS = 16
"""Up to here everyone may talk to everyone at once. Beyond, that many simultaneous senders overflow
the buffers of small switches, and each rank's share of a message gets too small to be worth one."""

ONE_SHOT_MAX_BYTES = 8 * 1024
"""One round instead of two, for ``(p - 2)/2`` times more bytes. At 16 ranks and 8 KiB each rank sends
120 KiB instead of 15: about 0.1 ms more at 10 Gbit/s, what a round costs (and 0.8 ms at 1 Gbit/s, where
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

_CACHED_SCHEDULES = 256  # per collective; a training step uses a handful of different lengths


def choose_all_reduce(
    size: int, count: int, item_bytes: int, *, needs_single_fold: bool, override: str | None = None
) -> str:
    """Name the all-reduce for a message.

    Args:
        size: number of ranks.
        count: number of elements.
        item_bytes: bytes per element.
        needs_single_fold: sums must not be rounded or wrapped between hops (half types, averages
            of integers).
        override: the name that the user wants, if any. If it cannot give a single fold where one
            is needed, "direct" takes its place.

    Returns:
        One of :data:`ALL_REDUCE_NAMES`, or :data:`HIERARCHICAL` if that is the override.

    Raises:
        ConfigError: there is no algorithm of the override's name.

    >>> choose_all_reduce(4, 1_000_000, 4, needs_single_fold=False)
    'direct'
    """
    if override is not None:
        _check_name("all-reduce", override, (*ALL_REDUCE_NAMES, HIERARCHICAL))
        return "direct" if needs_single_fold and override not in SINGLE_FOLD_NAMES else override
    length_bytes = count * item_bytes
    if size <= DIRECT_MAX_RANKS:
        limit_bytes = ONE_SHOT_PAIR_MAX_BYTES if size == 2 else ONE_SHOT_MAX_BYTES
        return "one_shot" if length_bytes <= limit_bytes else "direct"
    if needs_single_fold:
        return "direct"
    return "doubling" if length_bytes <= DOUBLING_MAX_BYTES else "ring"


def choose_reduce_scatter(size: int, *, needs_single_fold: bool, override: str | None = None) -> str:
    """Name the reduce-scatter: one of :data:`REDUCE_SCATTER_NAMES`.

    Args:
        size: number of ranks.
        needs_single_fold: as for :func:`choose_all_reduce`; only "direct" serves it.
        override: the name that the user wants, if any.

    Raises:
        ConfigError: there is no algorithm of the override's name.
    """
    if override is not None:
        _check_name("reduce-scatter", override, REDUCE_SCATTER_NAMES)
    if needs_single_fold:
        return "direct"
    return override or ("direct" if size <= DIRECT_MAX_RANKS else "ring")


def choose_all_gather(size: int, *, override: str | None = None) -> str:
    """Name the all-gather: one of :data:`ALL_GATHER_NAMES`.

    Args:
        size: number of ranks.
        override: the name that the user wants, if any.

    Raises:
        ConfigError: there is no algorithm of the override's name.
    """
    if override is not None:
        _check_name("all-gather", override, ALL_GATHER_NAMES)
    return override or ("direct" if size <= DIRECT_MAX_RANKS else "ring")


def choose_broadcast(size: int, count: int, item_bytes: int, *, override: str | None = None) -> str:
    """Name the broadcast: one of :data:`BROADCAST_NAMES`.

    Args:
        size: number of ranks.
        count: number of elements.
        item_bytes: bytes per element.
        override: the name that the user wants, if any.

    Raises:
        ConfigError: there is no algorithm of the override's name.
    """
    if override is not None:
        _check_name("broadcast", override, BROADCAST_NAMES)
        return override
    return "tree" if size <= 2 or count * item_bytes <= TREE_MAX_BYTES else "chain"


@lru_cache(maxsize=_CACHED_SCHEDULES)
def build_all_reduce(
    name: str,
    rank: int,
    size: int,
    count: int,
    bounds: Optional[Tuple[int, ...]] = None,
    hosts: Optional[Hosts] = None,
) -> Steps:
    """The schedule of one rank; the name as :func:`choose_all_reduce` gives it.

    Args:
        bounds: chunk boundaries in elements for the algorithms that have chunks; None for even ones.
        hosts: the grid of ranks, for "hierarchical".
    """
    if name == HIERARCHICAL and hosts is not None:
        return tuple(hierarchy.all_reduce(rank, hosts, bounds or even_bounds(count, size)))
    _check_name("all-reduce", name, ALL_REDUCE_NAMES)
    if name == "one_shot":
        return tuple(direct.one_shot(rank, size, count))
    if name == "doubling":
        return tuple(doubling.all_reduce(rank, size, count))
    if name == "direct":
        return tuple(direct.all_reduce(rank, size, bounds or even_bounds(count, size)))
    return tuple(ring.all_reduce(rank, size, bounds or even_bounds(count, size)))


@lru_cache(maxsize=_CACHED_SCHEDULES)
def build_reduce_scatter(
    name: str, rank: int, size: int, bounds: Tuple[int, ...], hosts: Optional[Hosts] = None
) -> Steps:
    """The schedule of one rank; chunk r, of ``bounds`` in elements, becomes rank r's."""
    if name == HIERARCHICAL and hosts is not None:
        return tuple(hierarchy.reduce_scatter(rank, hosts, list(zip(bounds, bounds[1:]))))
    _check_name("reduce-scatter", name, REDUCE_SCATTER_NAMES)
    if name == "direct":
        return tuple(direct.reduce_scatter(rank, size, bounds))
    return tuple(ring.reduce_scatter(rank, size, bounds))


@lru_cache(maxsize=_CACHED_SCHEDULES)
def build_all_gather(
    name: str, rank: int, size: int, bounds: Tuple[int, ...], hosts: Optional[Hosts] = None
) -> Steps:
    """The schedule of one rank; chunk r, of ``bounds`` in elements, is rank r's."""
    if name == HIERARCHICAL and hosts is not None:
        return tuple(hierarchy.all_gather(rank, hosts, list(zip(bounds, bounds[1:]))))
    _check_name("all-gather", name, ALL_GATHER_NAMES)
    if name == "direct":
        return tuple(direct.all_gather(rank, size, bounds))
    return tuple(ring.all_gather(rank, size, bounds))


@lru_cache(maxsize=_CACHED_SCHEDULES)
def build_broadcast(name: str, rank: int, size: int, root: int, count: int) -> Steps:
    """The schedule of one rank; ``count`` elements of rank ``root`` go to all."""
    _check_name("broadcast", name, BROADCAST_NAMES)
    if name == "tree":
        return tuple(tree.broadcast(rank, size, root, count))
    return tuple(tree.chain(rank, size, root, count))


@lru_cache(maxsize=_CACHED_SCHEDULES)
def build_all_to_all(
    rank: int, size: int, send_bounds: Tuple[int, ...], recv_bounds: Tuple[int, ...]
) -> Steps:
    """The schedule of one rank; see :func:`ringcomm.schedule.direct.all_to_all`."""
    return tuple(direct.all_to_all(rank, size, send_bounds, recv_bounds))


def _check_name(collective: str, name: str, names: Tuple[str, ...]) -> None:
    if name not in names:
        raise ConfigError(f"no {collective} algorithm is called {name!r}; there are {', '.join(names)}")
