"""Estimate the time of one step from a window of measured steps."""

from __future__ import annotations

from statistics import fmean
from typing import Sequence

_LEVELS_FROM = 10  # in shorter windows two levels cannot be told from chance
_MIN_LEVEL = 4  # a second part of fewer steps is not relied upon
_MIN_PART = 2
_BETWEEN_LEVELS = 1.15  # levels that differ by less have a mean that is not far from either
_EXCEPTIONAL = 3.0  # a step of this many times the mean of the others may be an exception
_EXCEPTIONS = 8  # one step in this many may be one, and one of any window


def typical_s(times: Sequence[float]) -> float:
    """Return the mean seconds of the steps in a window, with two exceptions; 0.0 without steps.

    A CPU quota lets a process run until its part of a period is used up, and then stops it until the period
    ends. So single steps take much shorter or longer than in the long run; means are right there, medians are
    not. Outliers are left out: steps that compile or write a checkpoint. If all steps of the first part of a
    window were quicker than all of the second or the reverse, the rank has changed its speed, and the second
    part counts if it is long enough.

    >>> typical_s([0.05, 0.15, 0.05, 0.15, 9.0])
    0.1
    """
    if not times:
        return 0.0
    return _without_exceptions(_of_one_speed(times))


def _of_one_speed(times: Sequence[float]) -> Sequence[float]:
    """Return all steps, or the part after a change of speed (or before it, if that is longer).

    A test for one change point: the values of the two parts do not overlap.
    """
    if len(times) >= _LEVELS_FROM:
        for place in range(_MIN_PART, len(times) - _MIN_PART + 1):
            before, after = times[:place], times[place:]
            quicker = max(after) * _BETWEEN_LEVELS < min(before)
            if quicker or min(after) > _BETWEEN_LEVELS * max(before):
                return after if len(after) >= _MIN_LEVEL else before
    return times


def _without_exceptions(times: Sequence[float]) -> float:
    kept = sorted(times)
    for _ in range(max(1, len(kept) // _EXCEPTIONS)):
        if len(kept) < 3 or kept[-1] <= _EXCEPTIONAL * fmean(kept[:-1]):
            break
        kept.pop()
    return fmean(kept)
