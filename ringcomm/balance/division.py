"""Global batches and the shares of ranks in them: which samples a rank computes in which step.

Which samples are in which global batch is a function of seed, epoch and number alone, not of the number of
ranks, their speeds, or versions of Python and NumPy: it consists of integer arithmetic and a stable sort.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union
from zlib import crc32

import numpy as np

from ..dtypes import Array
from ..errors import BrokenInvariantError, ConfigError
from ..ops import number
from .plan import ComputeTime, ShareLimits, Shares, plan_shares, proportional_shares, shorten

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
    order: Array = np.argsort(keys, kind="stable").astype(np.int64)
    return order


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
    """Divide the samples of each epoch among any number of ranks.

    Global batches follow from the data set, ``global_batch``, ``seed`` and the epoch alone, so the number of
    ranks may change between any two steps. Shares may change at any step that no rank has taken yet. The last
    global batch of an epoch may be short; of the limits only ``max_batch`` applies to it. ``speeds`` are
    ``"measure"`` (equal shares at first) or proportions. ``seed`` must be the same on all ranks.
    """

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
        """Return the number of a step among the steps of all epochs."""
        return epoch * self.steps + step

    def batch(self, epoch: int, step: int) -> Array:
        """Return the indices of a global batch."""
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
