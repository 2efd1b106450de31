"""How long a rank computes for a batch, and the division of a global batch by which all take equally long.

A share is a rank's number of samples of a global batch. A rank takes ``fixed_s + sample_s * samples`` for its
share, and nothing for none. The division minimizes the time of the slowest rank. All of this is arithmetic:
no clock, no other rank. Every rank computes it from the measurements of all ranks, or from the user's speeds,
so all ranks get the same shares.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..errors import ConfigError

Shares = Tuple[int, ...]  # samples of a global batch, by rank

_MIN_SAMPLE_S = 1e-9
_MIN_PART = 1e-6  # of the mean time per sample: the time of a rank always depends on its share a little
_HALVINGS = 100  # after this many steps of the bisection a time is as exact as a float can be


class ComputeTime(NamedTuple):
    """The compute time of a rank as a function of its share."""

    fixed_s: float  # whatever the number of samples
    sample_s: float  # more than 0

    def compute_s(self, samples: float) -> float:
        """Return the seconds for this number of samples; none take no time."""
        return self.fixed_s + self.sample_s * samples if samples > 0 else 0.0


class TimedShare(NamedTuple):
    """A measured compute time."""

    samples: int  # more than 0
    compute_s: float  # without waiting for other ranks
    steps: int = 1  # over which it was measured: its weight among others


class ShareLimits(NamedTuple):
    """The limits of a division."""

    min_batch: int = 0
    max_batch: Optional[Sequence[Optional[int]]] = None  # for each rank; None: no limit
    multiple_of: int = 1  # the remainder of a global batch or max_batch may be another number

    def most(self, rank: int, total: int) -> int:
        """Return the most samples for a rank."""
        limit = None if self.max_batch is None else self.max_batch[rank]
        return total if limit is None else min(total, limit)


class StepWeight:
    """The weight of this rank's gradients in a weighted average, from step to step; for optimizers."""

    def now(self) -> float:
        """Return the weight in the current step."""
        raise NotImplementedError

    def reduced(self) -> None:
        """Begin the next step: all gradients of this one have been reduced."""


def fit(observations: Sequence[TimedShare], proportional: float = 0.0) -> ComputeTime:
    """Return the least-squares model of at least one observation, weighted by its steps.

    A single number of samples says nothing about the fixed part; then it is 0. A negative fixed part (caches,
    or measurement errors) counts as 0. ``proportional`` weighs the assumption of no fixed part: like samples
    that differ from their mean by this part of it.

    >>> fit([TimedShare(10, 3.0), TimedShare(20, 5.0)])
    ComputeTime(fixed_s=1.0, sample_s=0.2)
    """
    steps = sum(item.steps for item in observations)
    mean_samples = sum(item.steps * item.samples for item in observations) / steps
    mean_s = sum(item.steps * item.compute_s for item in observations) / steps
    without_fixed_s = mean_s / mean_samples
    assumed = steps * (proportional * mean_samples) ** 2
    spread = assumed + sum(item.steps * (item.samples - mean_samples) ** 2 for item in observations)
    if not spread:
        return ComputeTime(0.0, max(_MIN_SAMPLE_S, without_fixed_s))
    covariance = assumed * without_fixed_s + sum(
        item.steps * (item.samples - mean_samples) * (item.compute_s - mean_s) for item in observations
    )
    least_s = _MIN_SAMPLE_S + _MIN_PART * without_fixed_s
    sample_s = max(least_s, min(without_fixed_s, covariance / spread))
    return ComputeTime(max(0.0, mean_s - sample_s * mean_samples), sample_s)


def plan_shares(speeds: Sequence[ComputeTime], total: int, limits: ShareLimits = ShareLimits()) -> Shares:  # noqa: B008
    """Divide a global batch so that the slowest rank takes as little time as possible.

    ConfigError: the limits leave no division.

    >>> plan_shares([ComputeTime(0.0, 1.0), ComputeTime(0.0, 3.0), ComputeTime(0.0, 3.0)], 96)
    (58, 19, 19)
    """
    unit = limits.multiple_of
    lows = [-(-limits.min_batch // unit) * unit for _ in speeds]
    most = [limits.most(rank, total) for rank in range(len(speeds))]
    highs = [limit // unit * unit for limit in most]
    if sum(lows) > total or any(low > high for low, high in zip(lows, highs)):
        raise ConfigError(
            f"A global batch of {total} cannot be divided among {len(speeds)} ranks with at least "
            f"{limits.min_batch} samples each (multiple_of={unit}, max_batch={limits.max_batch})."
        )
    if sum(most) < total:
        raise ConfigError(
            f"A global batch of {total} does not fit: with max_batch={limits.max_batch} all ranks together "
            f"take {sum(most)} samples."
        )
    shares = [
        max(low, min(high, int(share // unit * unit)))
        for share, low, high in zip(_at_equal_times(speeds, total, lows, highs), lows, highs)
    ]
    while sum(shares) < total:
        rest = total - sum(shares)
        able = [rank for rank, share in enumerate(shares) if share + unit <= highs[rank] and unit <= rest]
        # The remainder is not a multiple, or fits only where the limit is not a multiple.
        able = able or [rank for rank, share in enumerate(shares) if share < most[rank]]
        # the rank that ends first with one more unit; of equal ones the first
        soonest = min(able, key=lambda rank: speeds[rank].compute_s(shares[rank] + unit))
        shares[soonest] += min(rest, unit, most[soonest] - shares[soonest])
    return tuple(shares)


def _at_equal_times(
    speeds: Sequence[ComputeTime], total: int, lows: Sequence[int], highs: Sequence[int]
) -> List[float]:
    """Return the fractional shares with which the ranks compute the total in the least time."""

    def shares_in(time_s: float) -> List[float]:
        return [
            min(float(high), max(float(low), (time_s - speed.fixed_s) / speed.sample_s))
            for speed, low, high in zip(speeds, lows, highs)
        ]

    below_s, above_s = 0.0, max(speed.compute_s(total) for speed in speeds)
    for _ in range(_HALVINGS):
        middle_s = (below_s + above_s) / 2
        if sum(shares_in(middle_s)) > total:
            above_s = middle_s
        else:
            below_s = middle_s
    return shares_in(below_s)


def compute_s(speeds: Sequence[ComputeTime], shares: Sequence[int]) -> float:
    """Return the compute time of the slowest rank."""
    return max(speed.compute_s(share) for speed, share in zip(speeds, shares))


def proportional_shares(ratios: Sequence[float], total: int, limits: ShareLimits = ShareLimits()) -> Shares:  # noqa: B008
    """Divide in fixed proportions, such as ``[3, 1, 1]``; a rank of proportion 0 gets nothing.

    ConfigError: the proportions are negative or all 0, or the limits leave no division.
    """
    if not ratios or min(ratios) < 0 or not 0 < sum(ratios) < float("inf"):
        raise ConfigError(f"speeds={list(ratios)}: they are numbers, not negative, and not all 0.")
    working = [rank for rank, ratio in enumerate(ratios) if ratio]
    most = None if limits.max_batch is None else [limits.max_batch[rank] for rank in working]
    speeds = [ComputeTime(0.0, 1.0 / ratios[rank]) for rank in working]
    some = iter(plan_shares(speeds, total, limits._replace(max_batch=most)))
    return tuple(next(some) if ratio else 0 for ratio in ratios)


def shorten(shares: Shares, count: int) -> Shares:
    """Divide a short global batch in the proportions of a full one, by largest remainder.

    >>> shorten((58, 19, 19), 10)
    (6, 2, 2)
    """
    total = sum(shares)
    parts = [share * count // total for share in shares]
    rest = sorted(range(len(shares)), key=lambda rank: (-(shares[rank] * count % total), rank))
    for rank in rest[: count - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)
