"""How long a rank computes for a batch, and the division of a global batch by which all take equally long.

A share is a rank's number of samples of a global batch. A rank takes ``fixed_s + sample_s * samples`` for its
share, and nothing for none. The division minimizes the time of the slowest rank. All of this is arithmetic:
no clock, no other rank. Every rank computes it from the measurements of all ranks, or from the user's speeds,
so all ranks get the same shares.

**Samples** (:class:`SampleDivision`). Which samples are in which global batch is a function of seed, epoch
and number alone, not of the number of ranks, their speeds, or versions of Python and NumPy: it consists of
integer arithmetic and a stable sort.

**Changes** (:class:`Replanner`). A state machine is fed with measurements of all ranks. All ranks feed it
with the same reports at the same step, so all come to the same decisions without a message.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union
from zlib import crc32

import numpy as np

from ..dtypes import Array
from ..errors import BrokenInvariantError, ConfigError
from ..ops import number

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
        limit = None if self.max_batch is None else self.max_batch[rank]
        return total if limit is None else min(total, limit)


def fit(observations: Sequence[TimedShare], proportional: float = 0.0) -> ComputeTime:
    """Return the least-squares model of at least one observation, weighted by its steps. The fixed
    part is 0 if there is a single number of samples, or it would be negative (caches, errors).
    ``proportional`` weighs the assumption of 0: like samples that differ from their mean by this part of it.

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
    """Divide in fixed proportions, such as ``[3, 1, 1]``; a rank of proportion 0 gets nothing."""
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


# -- samples ------------------------------------------------------------------------------------------

Speeds = Union[str, Sequence[float]]
MEASURE = "measure"

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> Array:
    """Return the indices of all samples in the order of an epoch; ``seed`` must be equal on all ranks."""
    indices = np.arange(count, dtype=np.int64)
    if not shuffle:
        return indices
    mixed_seed = int(_mixed(np.array([seed & _MASK], np.uint64))[0])
    start = _mixed(np.array([(mixed_seed + epoch * _GOLDEN) & _MASK], np.uint64))
    keys = _mixed(indices.astype(np.uint64) * np.uint64(_GOLDEN) + start)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _mixed(state: Any) -> Any:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014), which permutes the 64-bit numbers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def check_whole(least: Optional[int] = None, **values: Any) -> None:
    """Raise ConfigError unless the named arguments are whole numbers, and at least ``least``."""
    for name, value in values.items():
        if not isinstance(value, (int, np.integer)):
            raise ConfigError(f"{name}={value!r}: it must be a whole number.")
        if least is not None and value < least:
            raise ConfigError(f"{name}={value}: it must be at least {least}.")


class SampleDivision:
    """Divides the samples of each epoch among ranks, whose number and shares may change at any later step."""

    def __init__(
        self,
        count: int,
        global_batch: int,
        seed: int = 0,
        size: int = 1,
        speeds: Speeds = MEASURE,
        limits: ShareLimits = ShareLimits(),  # noqa: B008 - a tuple of constants
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_whole(0, count=count)
        check_whole(1, global_batch=global_batch)
        check_whole(seed=seed)
        if not isinstance(speeds, str) or speeds != MEASURE:
            try:
                speeds = [number(speed) for speed in speeds]
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f'speeds={speeds!r}: pass "measure", or one number per rank.') from None
        self.count, self.global_batch, self.seed = int(count), int(global_batch), int(seed)
        self.limits = limits
        self.steps = self.count // self.global_batch if drop_last else -(-self.count // self.global_batch)
        self._speeds = speeds
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._order: Tuple[int, Any] = (-1, None)
        self.resize(size)

    def resize(self, size: int) -> None:
        """Restart with another number of ranks; ConfigError if the speeds do not fit it."""
        most = self.limits.max_batch
        if most is not None and len(most) != size:
            if len(set(most)) > 1:
                raise ConfigError(f"max_batch={list(most)} has not one number per rank ({size}).")
            self.limits = self.limits._replace(max_batch=(most[0],) * size)
        if isinstance(self._speeds, str):
            shares = plan_shares([ComputeTime(0.0, 1.0)] * size, self.global_batch, self.limits)
        elif len(self._speeds) != size:
            raise ConfigError(
                f"speeds={list(self._speeds)} has {len(self._speeds)} numbers, not one per rank ({size})."
            )
        else:
            shares = proportional_shares(self._speeds, self.global_batch, self.limits)
        self.size = size
        self._plans: List[Tuple[int, Shares]] = [(0, shares)]
        self.furthest = -1  # the last step of which this rank has taken its share

    @property
    def digest(self) -> int:
        """Return a 32-bit number that differs if global batches or limits do."""
        parts = (self.count, self.global_batch, self.seed, self._shuffle, self._drop_last, *self.limits)
        return crc32(repr(parts).encode())

    @property
    def measures(self) -> bool:
        """Return whether shares follow from measured speeds."""
        return self._speeds == MEASURE

    def position(self, epoch: int, step: int) -> int:
        return epoch * self.steps + step

    def batch(self, epoch: int, step: int) -> Array:
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.count, self.seed, epoch, self._shuffle))
        order: Array = self._order[1]
        return order[step * self.global_batch : (step + 1) * self.global_batch]

    def full_shares(self, epoch: int, step: int) -> Shares:
        """Return the shares of a full global batch that apply at a step."""
        position = self.position(epoch, step)
        return next(shares for start, shares in reversed(self._plans) if start <= position)

    def shares(self, epoch: int, step: int) -> Shares:
        """Return how many samples of a global batch each rank gets."""
        left = min(self.global_batch, self.count - step * self.global_batch)
        return shorten(self.full_shares(epoch, step), left)

    def take(self, epoch: int, step: int, rank: int) -> Array:
        """Return the indices of a rank's share; after this the shares of the step cannot change."""
        self.furthest = max(self.furthest, self.position(epoch, step))
        shares = self.shares(epoch, step)
        start = sum(shares[:rank])
        return self.batch(epoch, step)[start : start + shares[rank]]

    def change(self, position: int, shares: Shares) -> None:
        """Apply other shares from a position on, of which this rank must not have taken its share."""
        if position <= self.furthest:
            raise BrokenInvariantError(
                f"New shares apply from step {position} on, but this rank has taken its share of step "
                f"{self.furthest} already."
            )
        self._plans = [item for item in self._plans if item[0] < position][-8:] + [(position, shares)]


def limits_of(
    min_batch: int, max_batch: Union[int, Sequence[Optional[int]], None], multiple_of: int, size: int
) -> ShareLimits:
    """Return the limits for the arguments of the public functions; ConfigError if one is out of range."""
    check_whole(0, min_batch=min_batch)
    check_whole(1, multiple_of=multiple_of)
    if max_batch is None:
        return ShareLimits(int(min_batch), None, int(multiple_of))
    several: Any = max_batch if isinstance(max_batch, (list, tuple, np.ndarray)) else [max_batch] * size
    given = list(several)
    for limit in given:
        check_whole(0, max_batch=0 if limit is None else limit)
    if len(given) != size:
        raise ConfigError(f"max_batch={max_batch}: pass one number, or one per rank ({size}).")
    most = tuple(None if limit is None else int(limit) for limit in given)
    return ShareLimits(int(min_batch), most, int(multiple_of))


# -- changes of shares --------------------------------------------------------------------------------

WINDOWS = (4, 7, 20)  # steps of the first, the second and any later observation
MIN_GAIN = 0.10  # part by which the predicted step must be shorter, or shares stay
REFINING_GAIN = 0.03  # the same in the two decisions after the first: only then are there two sizes to fit to
PAUSE = 50  # fewest steps between two changes, after these
_LONGER = 1.10  # a change that makes steps this many times as long is reverted (not the first)
_CHANGED = 0.10  # distance of an observation from the model from which the rank counts as changed
_PROPORTIONAL = 0.2  # see :func:`fit`: first windows are short, and first changes small for some ranks
_SIZES_KEPT = 4
_EXCEPTIONAL = 3.0  # a step of this many times the mean of the others may be an exception
_EXCEPTIONS = 8  # one step in this many may be one, and one of any window
AHEAD = 2  # steps by which ranks may differ when they decide


class RankTimes(NamedTuple):
    """A rank's measurements since its last report."""

    samples: int  # its share of a full global batch
    compute_s: float  # per step, without waiting for other ranks; 0.0: not measured
    waited_s: float  # per step, in communication or for other ranks
    ahead: int  # most steps that its loader took in advance so far
    most: int = 0  # most samples that fit into its memory; 0: not known


class NewShares(NamedTuple):
    """New shares, and a text about the change for people."""

    lead: int  # steps from the decision until they apply
    shares: Shares
    text: str


def typical_s(times: Sequence[float]) -> float:
    """Return the mean seconds of the steps in a window without outliers: steps that compile or write a
    checkpoint. Not the median: a CPU quota makes single steps much shorter or longer than in the long run.

    >>> typical_s([0.05, 0.15, 0.05, 0.15, 9.0])
    0.1
    """
    kept = sorted(times)
    for _ in range(max(1, len(kept) // _EXCEPTIONS)):
        if len(kept) < 3 or kept[-1] <= _EXCEPTIONAL * fmean(kept[:-1]):
            break
        kept.pop()
    return fmean(kept) if kept else 0.0


def rank_names(hosts: Sequence[str]) -> List[str]:
    """Return a name for each rank: its host, with its rank if a host has several.

    >>> rank_names(["desk", "jetson1", "desk"])
    ['desk:0', 'jetson1', 'desk:2']
    """
    return [host if hosts.count(host) == 1 else f"{host}:{rank}" for rank, host in enumerate(hosts)]


class Replanner:
    """Model the speed of every rank, and decide about shares."""

    def __init__(self, shares: Shares, total: int, limits: ShareLimits, hosts: Sequence[str]) -> None:
        self.shares = shares
        self.window = WINDOWS[0]  # steps until the next reports
        self._total = total
        self._limits = limits
        self._hosts = list(hosts)
        self._observed: List[Dict[int, TimedShare]] = [{} for _ in shares]
        self._slower = [1.0 for _ in shares]  # factor by which each rank has become slower since the change
        self._doubted = [False for _ in shares]  # the last observation of a rank did not fit its model
        self._decisions = 0
        self._changed_at: Optional[int] = None
        self._before: Optional[Tuple[Shares, float]] = None  # of the last change, until it has been observed

    def decide(self, step: int, reports: Sequence[RankTimes]) -> Optional[NewShares]:
        """Take the reports of all ranks at this ``step``; return new shares, or None to keep them."""
        for rank, report in enumerate(reports):
            self._slower[rank] *= self._learn(rank, report)
        self._decisions += 1
        self.window = WINDOWS[min(self._decisions, len(WINDOWS) - 1)]
        known = [_fitted(observed) for observed in self._observed if observed]
        if not known:
            return None
        # A rank that has computed nothing yet counts as the fastest: otherwise it would never be measured.
        fastest = min(known, key=lambda speed: speed.compute_s(self._total))
        speeds = [_fitted(observed) if observed else fastest for observed in self._observed]
        exposed_s = max(0.0, min((r.waited_s for r in reports if r.compute_s), default=0.0))
        now_s = max(report.compute_s for report in reports) + exposed_s
        exceeded = self._learn_limits(reports)
        before, self._before = self._before, None
        if before is not None and not exceeded and now_s > _LONGER * before[1]:
            text = (
                f"steps became longer at step {step}, {before[1]:.3g} -> {now_s:.3g} s: "
                f"batches {_text(self.shares)} -> {_text(before[0])} again"
            )
            return self._change(step, reports, before[0], text)
        shares = plan_shares(speeds, self._total, self._limits)
        then_s = max(speed.compute_s(share) for speed, share in zip(speeds, shares)) + exposed_s
        refines = self._changed_at is not None and self._decisions <= 3
        early = self._changed_at is not None and not refines and step - self._changed_at < PAUSE
        pays = then_s < (1.0 - (REFINING_GAIN if refines else MIN_GAIN)) * now_s and not early
        if shares == self.shares or not (exceeded or pays):
            return None
        text = (
            f"{self._why(step, reports)}: batches {_text(self.shares)} -> {_text(shares)}, "
            f"step {now_s:.3g} -> {then_s:.3g} s predicted"
        )
        if self._changed_at is not None and not exceeded:
            self._before = self.shares, now_s
        return self._change(step, reports, shares, text)

    def _change(self, step: int, reports: Sequence[RankTimes], shares: Shares, text: str) -> NewShares:
        self.shares, self._changed_at = shares, step
        self._slower = [1.0 for _ in shares]
        return NewShares(max(report.ahead for report in reports) + AHEAD, shares, text)

    def _learn_limits(self, reports: Sequence[RankTimes]) -> bool:
        """Record the ranks' memory limits; return whether the shares exceed them."""
        most = list(self._limits.max_batch or [None] * len(reports))
        for rank, report in enumerate(reports):
            limit = most[rank]
            if report.most and (limit is None or report.most < limit):
                most[rank] = report.most
        self._limits = self._limits._replace(max_batch=tuple(most))
        return any(report.most and share > report.most for report, share in zip(reports, self.shares))

    def _learn(self, rank: int, report: RankTimes) -> float:
        """Update the model; return the factor by which the rank has become slower (1.0: as before)."""
        if report.compute_s <= 0.0 or report.samples <= 0:
            return 1.0
        observed, factor = self._observed[rank], 1.0
        if len(observed) > 1 or report.samples in observed:
            ratio = report.compute_s / _fitted(observed).compute_s(report.samples)
            changed = abs(ratio - 1.0) > _CHANGED
            doubted, self._doubted[rank] = self._doubted[rank], changed
            if changed and not doubted and self._decisions > 1:
                return 1.0  # its speed may have changed within the window: the next one shows how much
            if changed:
                factor, self._doubted[rank] = ratio, False
                for samples, item in observed.items():
                    observed[samples] = item._replace(compute_s=item.compute_s * factor)
        observed.pop(report.samples, None)
        observed[report.samples] = TimedShare(report.samples, report.compute_s, self.window)
        while len(observed) > _SIZES_KEPT:
            del observed[next(iter(observed))]
        return factor

    def _why(self, step: int, reports: Sequence[RankTimes]) -> str:
        """Return the reason of a change, such as ``jetson1 slowed to 0.6x at step 812``."""
        rank = max(range(len(reports)), key=lambda rank: abs(self._slower[rank] - 1.0))
        factor = self._slower[rank]
        if abs(factor - 1.0) <= _CHANGED:
            rank = max(range(len(reports)), key=lambda rank: reports[rank].compute_s)
            return f"{self._hosts[rank]} is the slowest at step {step}"
        verb = "slowed" if factor > 1.0 else "sped up"
        return f"{self._hosts[rank]} {verb} to {1.0 / factor:.2g}x at step {step}"


def _text(shares: Shares) -> str:
    return "/".join(map(str, shares))


def _fitted(observed: Dict[int, TimedShare]) -> ComputeTime:
    return fit(list(observed.values()), _PROPORTIONAL)
