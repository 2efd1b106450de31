"""Unequal links get unequal chunks: how much of a vector each rank should add up.

In a direct (or hierarchical) all-reduce, the rank that owns the share f of n elements receives and sends
``n (1 + (p - 2) f)`` of them: its own part of all other ranks' shares out and the results back in, or the
other way round, and p - 1 times its own share. So a rank with a slow link should own little. The least
time is reached by water-filling: every rank gets as much as its link can carry in the same time T, ranks
whose links are busy without a share get none, and T is the smallest for which the shares add up to one::

    f_i = max(0, (T B_i / n - 1) / (p - 2))        sum f_i = 1        T >= n / min B

With several ranks per host, those that share an interface count together: with m of them and the share F
it carries ``n (m + F (p - 2 m))`` elements each way.

Everything is plain additions, multiplications and divisions of doubles, so all ranks compute the same.

Sources: the load model is that of hivemind's averager (M. Ryabinin et al., arXiv:2103.03239), which solves
it as a linear program; the bound ``max(n / min B, 2 (p - 1) n / sum B)`` follows from adding up all links.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

_HALVINGS = 60  # more than a double's mantissa has bits


def interface_shares(ranks: Sequence[int], speeds: Sequence[float]) -> List[float]:
    """Return the share of a vector for each interface that finishes a direct all-reduce the soonest; of
    several solutions the one nearest to equal shares for all ranks. ``ranks``: users of each interface;
    ``speeds``: each way, in any unit.

    >>> [round(share, 3) for share in interface_shares([1, 1, 1, 1], [1.0, 10.0, 10.0, 10.0])]
    [0.0, 0.333, 0.333, 0.333]
    >>> interface_shares([2, 2], [1.0, 10.0])
    [0.5, 0.5]
    """
    total = sum(ranks)
    # T starts where every interface can carry its load even without a share (or with all shares).
    slow, fast = 0.0, 2.0 * total / min(speeds)
    for _ in range(_HALVINGS):
        middle = (slow + fast) / 2
        if _possible(_limits(ranks, speeds, total, middle)):
            fast = middle
        else:
            slow = middle
    return _fill(ranks, total, _limits(ranks, speeds, total, fast))


Limits = List[Tuple[float, float]]


def _limits(ranks: Sequence[int], speeds: Sequence[float], total: int, time: float) -> Limits:
    """Return the least and the greatest share of each interface within a time; nothing fits if low > high."""
    limits: Limits = []
    for count, speed in zip(ranks, speeds):
        spare, per_share = time * speed - count, total - 2 * count
        if per_share > 0:
            limits.append((0.0, min(1.0, spare / per_share)))
        elif per_share == 0:
            limits.append((0.0, 1.0 if spare >= 0 else -1.0))
        else:
            # More than half of all ranks are here: the more they own, the less has to travel.
            limits.append((max(0.0, spare / per_share), 1.0))
    return limits


def _possible(limits: Limits) -> bool:
    return (
        all(low <= high for low, high in limits)
        and sum(low for low, _ in limits) <= 1.0
        and sum(high for _, high in limits) >= 1.0
    )


def _fill(ranks: Sequence[int], total: int, limits: Limits) -> List[float]:
    """Return shares within the limits, as nearly proportional to the ranks as they allow."""
    level, above = 0.0, float(total)

    def shares(level: float) -> List[float]:
        return [min(high, max(low, level * n / total)) for n, (low, high) in zip(ranks, limits)]

    for _ in range(_HALVINGS):
        middle = (level + above) / 2
        if sum(shares(middle)) > 1.0:
            above = middle
        else:
            level = middle
    found = shares(above)
    whole = sum(found)
    return [share / whole for share in found]


def share_bounds(count: int, shares: Sequence[float]) -> Tuple[int, ...]:
    """Return chunk boundaries in elements for the ranks' shares of a vector, which add up to one.

    >>> share_bounds(10, [0.0, 0.5, 0.5])
    (0, 0, 5, 10)
    """
    bounds, reached = [0], 0.0
    for share in shares:
        reached += share
        bounds.append(min(count, max(bounds[-1], int(count * reached + 0.5))))
    bounds[-1] = count
    return tuple(bounds)


def even_classes(speeds: Sequence[float], tolerance: float = 1.8) -> Tuple[float, ...]:
    """Equalize speeds that differ by no more than measuring errors: equal links get equal chunks.

    On a busy machine, measuring a wire for some ten milliseconds may be off by half. Wires that really differ
    are of different kinds, and differ by more. Each group of speeds within the tolerance of its fastest gets
    that group's mean.

    >>> even_classes([100.0, 95.0, 11.0, 12.0])
    (97.5, 97.5, 11.5, 11.5)
    """
    order = sorted(range(len(speeds)), key=lambda index: (-speeds[index], index))
    result = list(speeds)
    while order:
        group = [index for index in order if speeds[index] * tolerance >= speeds[order[0]]]
        mean = sum(speeds[index] for index in group) / len(group)
        for index in group:
            result[index] = mean
        order = order[len(group) :]
    return tuple(result)
