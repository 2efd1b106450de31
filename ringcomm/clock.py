"""The clock of ringcomm: one monotonic clock, and one Deadline that is passed down."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Callable, Dict, Optional

Clock = Callable[[], float]  # returns seconds on a monotonic scale whose origin means nothing

monotonic: Clock = time.monotonic


class Polling:
    """Whether a wait polls before it sleeps: not when a poll costs processor time.

    A thread that polls yields at each round. Where other programs run, it gets the processor back after their
    time slices, some milliseconds each; a thread that sleeps gets it soon after it was woken. Sums of 1 KB
    among four ranks, on two cores that two other programs used, took 1,650 us with polling, 570 without, and
    take 600 with this.
    """

    LOST_S = 1e-3  # a yield that takes longer has given the processor to a program that computes
    FIRST_S, MAX_S = 0.02, 1.0  # pause of polling after that: at first, and at most, if it happens repeatedly
    ENOUGH = 200  # after this many quick yields the next pause is a first one

    def __init__(
        self,
        clock: Clock = time.perf_counter,
        give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None),
    ) -> None:
        self._clock, self._give_way = clock, give_way
        self._again_s, self._pause_s, self._quick = -math.inf, self.FIRST_S, 0

    def until(self, now_s: float, spin_s: float) -> float:
        """Return the end of the polling of a wait that begins now, of ``spin_s`` where it costs nothing."""
        return now_s + spin_s if now_s >= self._again_s else now_s

    def give_way(self) -> None:
        """Yield the processor between two polls."""
        began_s = self._clock()
        self._give_way()
        now_s = self._clock()
        if now_s - began_s < self.LOST_S:
            self._quick += 1
            return
        self._pause_s = self.FIRST_S if self._quick >= self.ENOUGH else min(2 * self._pause_s, self.MAX_S)
        self._again_s, self._quick = now_s + self._pause_s, 0


POLLING = Polling()  # of this process: its threads compete for the same processors


class Idleness:
    """Whether the other threads of this process are idle: then polling takes no processor time from them.

    A thread that waits for a collective inside native code (as in PyTorch's backward pass) cannot be detected
    as waiting, but uses no processor time meanwhile. One thread at a time may call it.
    """

    LOOK_S = 0.5e-3  # between two measurements: clock ticks make shorter intervals inaccurate
    MAX_BUSY = 0.2  # up to this part of a core the others count as idle

    def __init__(self) -> None:
        self._thread = 0
        self._at_s = self._others_s = 0.0
        self._idle = False

    def __call__(self) -> bool:
        """Return whether they were idle lately; False at first."""
        now_s = time.perf_counter()
        if now_s - self._at_s >= self.LOOK_S:
            others_s = time.process_time() - time.thread_time()
            me = threading.get_ident()
            spent_s, passed_s = others_s - self._others_s, now_s - self._at_s
            self._idle = me == self._thread and spent_s < self.MAX_BUSY * passed_s
            self._thread, self._at_s, self._others_s = me, now_s, others_s
        return self._idle


def is_due(at_s: float, now_s: float) -> bool:
    """Return whether a moment has come; a timer that was set for it may fire a little early."""
    return now_s >= at_s - 1e-3


class Deadline:
    """A moment after which a wait gives up; it is made once and passed down, never nested.

    ``timeout_s`` None: it never passes. Tests and simulations pass a clock.
    """

    __slots__ = ("_clock", "_started_s", "timeout_s")

    def __init__(self, timeout_s: Optional[float], clock: Clock = monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock()

    def remaining_s(self) -> float:
        """Return the seconds left: never negative, infinite without a limit."""
        if self.timeout_s is None:
            return math.inf
        return max(0.0, self._started_s + self.timeout_s - self._clock())

    def elapsed_s(self) -> float:
        """Return the seconds since the deadline was set (or last restarted)."""
        return self._clock() - self._started_s

    def expired(self) -> bool:
        """Return whether the moment has passed."""
        return self.timeout_s is not None and self.elapsed_s() >= self.timeout_s

    def restart(self) -> None:
        """Count from now again: for limits on time *without progress*."""
        self._started_s = self._clock()


class StepClock:
    """Count the training steps of a process, and measure them."""

    MAX_OWNERS = 4096  # owners beyond this number do not count: a program that makes one in each step

    def __init__(self) -> None:
        self.count = 0  # of the owner with the most steps
        self.first_s = self.last_s = self.step_s = 0.0
        self._counts: Dict[object, int] = {}

    def add(self, owner: object = None) -> None:
        """Count a step of an owner, such as an optimizer; it must be hashable.

        A program has as many steps as the owner with the most.
        """
        counts = self._counts
        count = counts.get(owner, 0) + 1
        if count > 1 or len(counts) < self.MAX_OWNERS:
            counts[owner] = count
        if count > self.count:
            now_s = time.perf_counter()
            if self.count:
                self.step_s = now_s - self.last_s  # of the last step; 0 until there are two
            else:
                self.first_s = now_s
            self.count, self.last_s = count, now_s

    @property
    def mean_s(self) -> float:
        """Return the mean time of a step in seconds; 0 until there are two."""
        return (self.last_s - self.first_s) / (self.count - 1) if self.count > 1 else 0.0
