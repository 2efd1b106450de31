"""Time as the rest of ringcomm sees it: one monotonic clock and one Deadline passed down."""

from __future__ import annotations

import math
import os
import time
from typing import Callable, Optional

Clock = Callable[[], float]
"""Returns seconds on a monotonic scale whose origin means nothing."""

monotonic: Clock = time.monotonic

give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
"""Let another process have the processor if one wants it: to be called between two looks while polling."""


class Deadline:
    """A moment after which a wait gives up. It is made once and passed down, never nested.

    Args:
        timeout_s: seconds from now, or None for a deadline that never passes.
        clock: where the time comes from; tests and simulations pass their own.
    """

    __slots__ = ("_clock", "_started_s", "timeout_s")

    def __init__(self, timeout_s: Optional[float], clock: Clock = monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock()

    def remaining_s(self) -> float:
        """Seconds left: never negative, infinite if there is no limit."""
        if self.timeout_s is None:
            return math.inf
        return max(0.0, self._started_s + self.timeout_s - self._clock())

    def elapsed_s(self) -> float:
        """Seconds since the deadline was set (or last restarted)."""
        return self._clock() - self._started_s

    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.timeout_s is not None and self.elapsed_s() >= self.timeout_s

    def restart(self) -> None:
        """Count from now again: for limits on time *without progress*."""
        self._started_s = self._clock()
